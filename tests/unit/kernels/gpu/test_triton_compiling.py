"""What the kernels become on sm_90: registers, spills, shared memory, and the instructions that were meant."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
MAX_SHARED_BYTES = 227 * 1024

# Name: (most registers, instructions that must be there, at least so many). At 128 threads a program and N registers a thread
# a multiprocessor holds 512 / N programs: decode and the small kernels need several, prefill one or two.
ATTENTION_LIMITS = {
    "decode": (128, {"HMMA": 32, "wide_copies": 32}),
    "decode-merge": (64, {}),
    "decode-fp8": (136, {"HMMA": 16, "wide_copies": 8}),
    "decode-int8": (136, {"HMMA": 16, "wide_copies": 8}),
    "decode-d64": (96, {"HMMA": 16, "wide_copies": 16}),
    "decode-d80": (136, {"HMMA": 32, "wide_copies": 32}),
    "decode-d256-window": (168, {"HMMA": 64, "wide_copies": 64}),
    "decode-page16": (168, {"HMMA": 32, "wide_copies": 32}),
    "decode-f32": (128, {"FFMA": 512, "wide_copies": 32}),
    "verify-tree": (128, {"HMMA": 32, "wide_copies": 32}),
    "prefill": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-mha": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-fp8": (248, {"HGMMA": 16, "wide_copies": 8}),
    "prefill-window": (232, {"HGMMA": 8, "wide_copies": 16}),
    "prefill-d64": (128, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-d256": (248, {"HGMMA": 32, "wide_copies": 32}),
    "prefill-page16": (192, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-f32": (255, {"FFMA": 512}),
    "decode-in-order": (136, {"HGMMA": 16, "wide_copies": 16}),
    "decode-merge-in-order": (40, {}),
    "decode-fp8-in-order": (168, {"HGMMA": 16, "wide_copies": 8}),
    "decode-d256-in-order": (168, {"HGMMA": 32, "wide_copies": 16}),
    "prefill-in-order": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-fp8-in-order": (240, {"HGMMA": 16, "wide_copies": 8}),
    "prefill-d256-in-order": (255, {"HGMMA": 32, "wide_copies": 16}),
    "prefill-tree": (192, {"HGMMA": 16, "wide_copies": 16}),
    "decode-group7": (128, {"HMMA": 32, "wide_copies": 32}),
    "decode-group32": (128, {"HMMA": 32, "wide_copies": 16}),
    "prefill-split": (192, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-merge": (64, {}),
    "prefill-window-fp8": (255, {"HGMMA": 24, "wide_copies": 16}),
    "prefill-d192-int8": (200, {"HMMA": 64, "wide_copies": 8}),
    "prefill-d256-fp8": (200, {"HMMA": 64, "wide_copies": 8}),
    "prefill-d256-window": (255, {"HGMMA": 32, "wide_copies": 32}),
}
OTHER_LIMITS = {
    "norm": (64, {}),
    "norm-sandwich": (64, {}),
    "activate": (40, {}),
    "heads-decode": (40, {}),
    "heads-prefill": (64, {}),
    "heads-fp8": (48, {}),
    "sample-scan": (96, {}),
    "sample-scan-cut": (96, {}),
    "sample-choose": (40, {}),
    "sample-weigh": (168, {}),
    "sample-collect": (96, {}),
    "sample-choose-cut": (128, {}),
    "sample-choose-cut-262144": (128, {}),
    "moe-route": (56, {}),
    "moe-count": (40, {}),
    "moe-sort": (56, {}),
    "moe-gate-up-1": (128, {"HGMMA": 8, "wide_copies": 16}),
    "moe-down-1": (96, {"HGMMA": 8, "wide_copies": 8}),
    "moe-gate-up-64": (128, {"HGMMA": 8, "wide_copies": 16}),
    "moe-gate-up-256": (128, {"HGMMA": 8, "wide_copies": 16}),
    "moe-gate-up-1024": (168, {"HGMMA": 8, "wide_copies": 12}),
    "moe-gate-up-4096": (255, {"HGMMA": 8, "wide_copies": 12}),
    "moe-down-4096": (168, {"HGMMA": 4, "wide_copies": 8}),
    "moe-4-1": (96, {"HGMMA": 8, "wide_copies": 8}),
    "moe-4-1024": (176, {"HGMMA": 8, "wide_copies": 8}),
    "moe-fp8-64": (104, {"HGMMA": 8, "wide_copies": 8}),
    "moe-fp8-4096": (232, {"HGMMA": 8, "wide_copies": 8}),
    "moe-fp8-down-4096": (168, {"HGMMA": 4, "wide_copies": 8}),
    "moe-sum": (40, {}),
    "feedback-ids": (40, {}),
    "feedback-tables": (40, {}),
    "feedback-keep": (40, {}),
    "linear-4": (128, {"HGMMA": 4, "wide_copies": 4}),
    "linear-4-offset": (128, {"HGMMA": 4, "wide_copies": 4}),
    "linear-4-64": (168, {"HGMMA": 4, "wide_copies": 4}),
    "linear-8": (128, {"HGMMA": 4, "wide_copies": 4}),
    "linear-4-4096": (216, {"HGMMA": 8, "wide_copies": 16}),
    "linear-add": (40, {}),
    "widen-4": (40, {}),
    "widen-fp8-rows": (40, {}),
    "dense-1": (48, {"HGMMA": 4, "wide_copies": 16}),
    "dense-32": (56, {"HGMMA": 4, "wide_copies": 16}),
    "dense-64": (80, {"HGMMA": 4, "wide_copies": 16}),
    "dense-256": (216, {"HGMMA": 4, "wide_copies": 32}),
    "dense-4096": (184, {"HGMMA": 8, "wide_copies": 32}),
    "dense-4096-splits": (232, {"HGMMA": 8, "wide_copies": 32}),
    "dense-odd": (255, {"HGMMA": 8, "wide_copies": 32}),
    "dense-f32": (72, {"FFMA": 128}),
    "linear-fp8": (128, {"HGMMA": 4, "wide_copies": 4}),
    "linear-fp8-64": (168, {"HGMMA": 4, "wide_copies": 4}),
    "float8-quantize": (64, {}),
    "float8-quantize-token": (96, {}),
    "float8-128": (240, {"QGMMA": 4, "wide_copies": 8}),
    "float8-1024": (240, {"QGMMA": 4, "wide_copies": 8}),
    "float8-1024-token": (240, {"QGMMA": 4, "wide_copies": 8}),
}
LIMITS = ATTENTION_LIMITS | OTHER_LIMITS
FAST = ["decode", "prefill", "norm", "heads-decode", "sample-scan", "feedback-tables"]
UNFUSED = [name for name in LIMITS if name.startswith("sample-")]


@functools.cache
def compiled(names):
    """Compile in a process where kernels are not interpreted, and return what came out by name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.unit.kernels.gpu.shipped_launches", *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return {found.pop("name"): found for found in map(json.loads, done.stdout.splitlines())}


def check(name, found):
    most_registers, least = LIMITS[name]
    assert found["stack"] == 0, found
    assert found.get("LDL", 0) == found.get("STL", 0) == 0, found
    assert found["registers"] <= most_registers, found
    assert found["shared"] <= MAX_SHARED_BYTES, found
    for opcode, number in least.items():
        assert found.get(opcode, 0) >= number, (opcode, found)
    if name in UNFUSED:
        assert found.get("FFMA", 0) == 0, "the noise is only the CPU's where no multiply is fused with an add"


@pytest.mark.parametrize("name", FAST)
def test_launches_compile_within_their_limits(name):
    check(name, compiled(tuple(FAST))[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LIMITS if name not in FAST])
def test_all_launches_compile_within_their_limits(name):
    check(name, compiled(tuple(name for name in LIMITS if name not in FAST))[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, kernels",
    [
        ("plain", set()),
        ("fp8", {"multiply_narrow", "widen_rows"}),
        ("int4", {"multiply_narrow", "add_splits", "widen_rows"}),
        ("in-order", {"multiply_dense", "add_splits"}),
    ],
)
def test_what_the_steps_of_a_model_launch_compiles_without_spills(kind, kernels):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.kernels.gpu.step_launches", kind]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    usual = {"_take_ids", "_take_tables", "_place_heads", "attend_runs", "merge_chunks", "choose_rows", "_keep_ids"}
    assert usual | kernels <= {kernel["name"] for kernel in found}
    assert all(kernel["stack"] <= 64 and kernel["shared"] <= MAX_SHARED_BYTES for kernel in found), found


def run_benchmark(tmp_path, *arguments):
    """Run bench/gpu.py where there are no packages of a server, as on the machine that it is for."""
    missing = [
        "fastapi",
        "starlette",
        "uvicorn",
        "uvloop",
        "zmq",
        "msgspec",
        "prometheus_client",
        "pydantic",
        "httpx",
        "aiohttp",
    ]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({missing!r}))\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "bench/gpu.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def test_the_benchmark_says_how_it_is_used_where_there_is_no_server(tmp_path):
    done = run_benchmark(tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert "--smoke" in done.stdout


@pytest.mark.slow
def test_the_benchmark_runs_every_kernel_and_whole_models_when_it_is_tried_without_a_gpu(tmp_path):
    done = run_benchmark(tmp_path, "--smoke", "--out", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len([row for row in found["kernels"] if "name" in row]) == 13
    assert {row["section"] for row in found["engine"]} == {"start", "prefill", "mixed", "engine"}
    assert found["decode-large-fp8"][0]["weights"] == "fp8"
    assert found["in-order-small"][0]["is_in_order"]
    assert all({"decode", "prompt"} <= {row["section"] for row in rows} for name, rows in found.items() if "-" in name)
