"""What the kernels become on sm_90: registers, spills, shared memory, the instructions that were meant; and on other GPUs."""

import ast
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from quire.kernels.triton.device_traits import DeviceTraits
from tests.unit.kernels.gpu.conftest import ALL_COMBINATIONS, reason_not_to_interpret

ROOT = Path(__file__).resolve().parents[4]
MAX_SHARED_BYTES = 227 * 1024

# Name: (most registers, instructions that must be there, at least so many). At 128 threads a program and N registers a thread
# a multiprocessor holds 512 / N programs: decode and the small kernels need several, prefill one or two.
ATTENTION_LIMITS = {
    "decode": (136, {"HMMA": 32, "wide_copies": 32}),
    "decode-small-values": (255, {"HMMA": 64, "wide_copies": 64}),
    "prefill-small-values": (208, {"HGMMA": 32, "wide_copies": 48}),
    "decode-small-values-window": (255, {"HMMA": 96, "wide_copies": 48}),
    "prefill-small-values-whole": (200, {"HGMMA": 24, "wide_copies": 32}),
    "prefill-alibi": (192, {"HGMMA": 16, "wide_copies": 32}),
    "decode-alibi": (144, {"HMMA": 32, "wide_copies": 32}),
    "decode-plan": (64, {}),
    "decode-merge": (64, {}),
    "decode-fp8": (168, {"HMMA": 16, "wide_copies": 8}),
    "decode-int8": (168, {"HMMA": 16, "wide_copies": 8}),
    "decode-4-bit": (136, {"HMMA": 16, "wide_loads": 8}),
    "decode-k8v4": (168, {"HMMA": 16, "wide_copies": 8}),
    "unrotate": (40, {}),
    "verify-tree-4-bit": (168, {"HMMA": 16, "wide_copies": 8}),
    "prefill-4-bit": (248, {"HGMMA": 16, "wide_copies": 8}),
    "prefill-k8v4": (248, {"HGMMA": 16, "wide_copies": 8}),
    "decode-d64": (128, {"HMMA": 16, "wide_copies": 16}),
    "decode-d80": (152, {"HMMA": 32, "wide_copies": 32}),
    "decode-d256-window": (192, {"HMMA": 64, "wide_copies": 64}),
    "decode-page16": (168, {"HMMA": 32, "wide_copies": 32}),
    "decode-f32": (128, {"FFMA": 512, "wide_copies": 32}),
    "verify-tree": (168, {"HMMA": 32, "wide_copies": 32}),
    "verify-tree-long": (192, {"HGMMA": 16, "wide_copies": 16}),
    "verify-tree-window": (168, {"HMMA": 32, "wide_copies": 32}),
    "verify-tree-fp8": (168, {"HMMA": 16, "wide_copies": 8}),
    "verify-tree-d64": (128, {"HMMA": 16, "wide_copies": 16}),
    "verify-tree-d256": (192, {"HMMA": 64, "wide_copies": 64}),
    "verify-chain": (152, {"HMMA": 32, "wide_copies": 32}),
    "verify-chain-long": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-mha": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-fp8": (248, {"HGMMA": 16, "wide_copies": 8}),
    "prefill-window": (232, {"HGMMA": 8, "wide_copies": 16}),
    "prefill-d64": (128, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-d256": (248, {"HGMMA": 32, "wide_copies": 32}),
    "prefill-page16": (192, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-f32": (255, {"FFMA": 512}),
    "decode-in-order": (152, {"HGMMA": 16, "wide_copies": 16}),
    "decode-merge-in-order": (40, {}),
    "decode-fp8-in-order": (184, {"HGMMA": 16, "wide_copies": 8}),
    "decode-d256-in-order": (168, {"HGMMA": 32, "wide_copies": 16}),
    "prefill-in-order": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-fp8-in-order": (240, {"HGMMA": 16, "wide_copies": 8}),
    "prefill-d256-in-order": (248, {"HGMMA": 32, "wide_copies": 16}),
    "prefill-tree": (192, {"HGMMA": 16, "wide_copies": 16}),
    "decode-group7": (136, {"HMMA": 32, "wide_copies": 32}),
    "decode-group32": (128, {"HMMA": 32, "wide_copies": 16}),
    "prefill-split": (192, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-merge": (64, {}),
    "prefill-window-fp8": (255, {"HGMMA": 24, "wide_copies": 16}),
    "prefill-d192-int8": (200, {"HMMA": 64, "wide_copies": 8}),
    "prefill-d256-fp8": (200, {"HMMA": 64, "wide_copies": 8}),
    "prefill-d256-window": (255, {"HGMMA": 32, "wide_copies": 32}),
    "decode-whole": (128, {"HMMA": 32, "wide_copies": 32}),
    "decode-whole-sinks": (128, {"HMMA": 32, "wide_copies": 32}),
    "decode-merge-sinks": (64, {}),
    "decode-f16": (136, {"HMMA": 32, "wide_copies": 32}),
    "decode-d96": (152, {"HMMA": 32, "wide_copies": 32}),
    "decode-d112": (152, {"HMMA": 32, "wide_copies": 32}),
    "decode-d192": (192, {"HMMA": 64, "wide_copies": 64}),
    "decode-window-fp8": (168, {"HMMA": 16, "wide_copies": 4}),
    # Registers at the launch, which the warps then divide otherwise.
    "prefill-specialized": (168, {"HGMMA": 96, "UTMALDG": 8}),
    "prefill-specialized-turns": (168, {"HGMMA": 96, "UTMALDG": 8}),
    "prefill-specialized-64": (168, {"HGMMA": 72, "UTMALDG": 4}),
    "prefill-specialized-d64": (168, {"HGMMA": 72, "UTMALDG": 4}),
    "prefill-specialized-f16": (168, {"HGMMA": 96, "UTMALDG": 8}),
    "prefill-f16": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-int8": (255, {"HGMMA": 16, "wide_copies": 8}),
    "prefill-sinks": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-d96": (184, {"HGMMA": 16, "wide_copies": 16}),
    "prefill-d192": (255, {"HGMMA": 32, "wide_copies": 32}),
    "decode-latent": (200, {"HMMA": 128, "wide_copies": 16}),
    "decode-latent-merge": (112, {}),
    "decode-latent-in-order": (200, {"HMMA": 128, "wide_copies": 16}),
    "prefill-latent": (200, {"HMMA": 128, "wide_copies": 16}),
    "verify-tree-latent": (200, {"HMMA": 128, "wide_copies": 16}),
    "decode-latent-chosen": (200, {"HMMA": 128, "wide_copies": 16}),
}
OTHER_LIMITS = {
    "index-scores": (96, {"HGMMA": 8}),
    "index-block-scores": (72, {"HMMA": 16}),
    "heads-into-latent": (64, {"HMMA": 16, "wide_copies": 8}),
    "recur-qwen3-next": (96, {}),
    "recur-kimi": (96, {}),
    "recur-mamba2": (96, {}),
    "recur-mamba1": (168, {}),
    "conv-qwen3-next": (64, {}),
    "conv-lfm2": (64, {}),
    "conv-mamba2-f32": (64, {}),
    "norm": (64, {}),
    "norm-sandwich": (64, {}),
    "parts-2": (40, {}),
    "parts-8": (64, {}),
    "parts-8-sum": (64, {}),
    "activate": (40, {}),
    "heads-decode": (40, {}),
    "heads-prefill": (64, {}),
    "heads-fp8": (48, {}),
    "heads-int8": (48, {}),
    "heads-4-bit": (48, {}),
    "heads-4-bit-1024": (96, {}),
    "heads-k8v4": (48, {}),
    "sample-process": (64, {}),
    "sample-count": (40, {}),
    "logprobs-scan": (96, {}),
    "logprobs-gather": (128, {}),
    "logprobs-gather-262144": (128, {}),
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
    "moe-4-1024": (192, {"HGMMA": 8, "wide_copies": 8}),
    "moe-fp8-64": (104, {"HGMMA": 8, "wide_copies": 8}),
    "moe-fp8-4096": (232, {"HGMMA": 8, "wide_copies": 8}),
    "moe-fp8-down-4096": (168, {"HGMMA": 4, "wide_copies": 8}),
    "moe-float8-4096": (255, {"QGMMA": 8, "wide_copies": 24}),
    "moe-float8-down-4096": (192, {"QGMMA": 4, "wide_copies": 16}),
    "moe-clamped-1": (96, {"HGMMA": 8, "wide_copies": 16}),
    "moe-clamped-4096": (255, {"HGMMA": 8, "wide_copies": 12}),
    "moe-clamped-4-64": (80, {"HGMMA": 4}),
    "moe-clamped-4-4096": (168, {"HGMMA": 4, "wide_copies": 4}),
    "moe-clamped-4-down-4096": (128, {"HGMMA": 2, "wide_copies": 4}),
    "moe-sum": (40, {}),
    "moe-adapted-64": (128, {"HGMMA": 8, "wide_copies": 16}),
    "moe-adapted-down-64": (96, {"HGMMA": 8, "wide_copies": 8}),
    "moe-adapted-4096": (255, {"HGMMA": 8, "wide_copies": 12}),
    "moe-adapted-4-64": (128, {"HGMMA": 8, "wide_copies": 8}),
    "lora-shrink": (72, {"HMMA": 8, "wide_copies": 16}),
    "lora-expand": (48, {"HMMA": 2, "wide_loads": 2}),
    "lora-shrink-64": (72, {"HMMA": 8, "wide_copies": 16}),
    "lora-expand-64": (48, {"HMMA": 4, "wide_loads": 4}),
    "lora-number-pairs": (40, {}),
    "lora-sort-pairs": (64, {}),
    "lora-shrink-experts": (64, {"HMMA": 8, "wide_copies": 8}),
    "lora-expand-experts": (48, {"HMMA": 2, "wide_loads": 2}),
    "feedback-ids": (40, {}),
    "feedback-tables": (40, {}),
    "feedback-keep": (40, {}),
    "move": (40, {}),
    "move-fp8": (40, {}),
    "pages-saved": (64, {"wide_loads": 4}),
    "pages-loaded": (64, {"wide_loads": 4}),
    "linear-4": (128, {"HGMMA": 4, "wide_copies": 4}),
    "linear-4-offset": (128, {"HGMMA": 4, "wide_copies": 4}),
    "linear-4-64": (128, {"HGMMA": 8, "wide_copies": 16}),
    "linear-4-offset-64": (168, {"HGMMA": 8, "wide_copies": 4}),
    "linear-8": (128, {"HGMMA": 4, "wide_copies": 4}),
    "linear-8-offset": (128, {"HGMMA": 8, "wide_copies": 4}),
    "linear-4-4096": (255, {"HGMMA": 8, "wide_copies": 16}),
    "linear-add": (40, {}),
    "linear-large-batch": (168, {"HGMMA": 32, "UTMALDG": 4}),
    "linear-large-batch-offset": (168, {"HGMMA": 32, "UTMALDG": 4}),
    "linear-large-batch-f16": (168, {"HGMMA": 16, "UTMALDG": 4}),
    "linear-large-batch-floats": (168, {"HGMMA": 8, "UTMALDG": 4}),
    "dequantize-4": (40, {}),
    "dequantize-fp8-rows": (40, {}),
    "dense-1": (48, {"HGMMA": 4, "wide_copies": 16}),
    "dense-32": (56, {"HGMMA": 4, "wide_copies": 16}),
    "dense-64": (80, {"HGMMA": 4, "wide_copies": 16}),
    "dense-256": (232, {"HGMMA": 4, "wide_copies": 32}),
    "dense-4096": (184, {"HGMMA": 8, "wide_copies": 32}),
    "dense-4096-splits": (232, {"HGMMA": 8, "wide_copies": 32}),
    "dense-odd": (232, {"HGMMA": 8, "wide_copies": 32}),
    "dense-f32": (72, {"FFMA": 128}),
    "linear-fp8": (128, {"HGMMA": 4, "wide_copies": 4}),
    "linear-fp8-64": (168, {"HGMMA": 4, "wide_copies": 4}),
    "float8-quantize": (64, {}),
    "float8-quantize-token": (96, {}),
    "float8-128": (192, {"QGMMA": 4, "wide_copies": 16}),
    "float8-1024": (192, {"QGMMA": 4, "wide_copies": 16}),
    "float8-1024-token": (192, {"QGMMA": 4, "wide_copies": 16}),
}
# Launches that begin before their predecessor ends. EARLY_LOADS stand before they wait: those of weights, which nobody writes,
# and of the step's inputs. Nothing is left to fetch where all columns are loaded early.
_OVERLAPPED = {"PREEXIT": 1, "ACQBULK": 1}
_FETCHING = _OVERLAPPED | {"UBLKPF": 1}
_MERGING = _FETCHING | {"ATOMG": 1, "HMMA": 32, "UBLKPF": 5}
FUSED_LIMITS = {
    "few-qkv": (64, {**_OVERLAPPED, "wide_loads": 9}),
    "few-gate-up": (64, {**_OVERLAPPED, "wide_loads": 9}),
    "few-o": (64, {**_OVERLAPPED, "wide_loads": 8}),
    "few-down": (64, {**_OVERLAPPED, "wide_loads": 12}),
    "few-gate-up-large": (256, {**_OVERLAPPED, "wide_loads": 36}),
    "few-down-large": (128, {**_FETCHING, "wide_loads": 16, "wide_copies": 16}),
    "few-f32": (104, {**_OVERLAPPED, "wide_loads": 18}),
    "few-qkv-8": (168, {**_OVERLAPPED, "HMMA": 16, "wide_loads": 17}),
    "few-gate-up-8": (168, {**_OVERLAPPED, "HMMA": 16, "wide_loads": 17}),
    "few-down-8": (176, {**_OVERLAPPED, "HMMA": 24, "wide_loads": 24}),
    "few-gate-up-16": (256, {**_OVERLAPPED, "HMMA": 64, "wide_loads": 34}),
    "few-down-16": (176, {**_OVERLAPPED, "HMMA": 48, "wide_loads": 24}),
    "few-gate-up-large-8": (168, {**_FETCHING, "HMMA": 16, "wide_loads": 9, "wide_copies": 32}),
    "few-gate-up-large-16": (168, {**_FETCHING, "HMMA": 32, "wide_loads": 9, "wide_copies": 32}),
    "few-qkv-large-16": (256, {**_FETCHING, "HMMA": 48, "wide_loads": 18, "wide_copies": 32}),
    "few-down-large-8": (112, {**_FETCHING, "HMMA": 24, "wide_loads": 16, "wide_copies": 32}),
    "few-down-large-16": (128, {**_FETCHING, "HMMA": 48, "wide_loads": 16, "wide_copies": 32}),
    "few-f32-16": (136, {**_FETCHING, "FFMA": 256, "wide_loads": 8}),
    "codes-qkv-fp8": (144, {**_OVERLAPPED, "wide_loads": 16}),
    "codes-down-fp8": (96, {**_FETCHING, "HMMA": 8, "wide_copies": 24}),
    "codes-down-fp8-8": (96, {**_FETCHING, "HMMA": 8, "wide_copies": 24}),
    "codes-gate-up-fp8-8": (144, {**_OVERLAPPED, "HMMA": 16, "wide_copies": 32}),
    "codes-down-4": (104, {**_FETCHING, "HMMA": 16, "wide_copies": 24}),
    "codes-down-4-8": (104, {**_FETCHING, "HMMA": 16, "wide_copies": 24}),
    "codes-gate-up-4": (184, {**_FETCHING, "HMMA": 32, "wide_copies": 32}),
    "codes-gate-up-4-8": (184, {**_FETCHING, "HMMA": 32, "wide_copies": 32}),
    "codes-gate-up-4-8-f16": (184, {**_FETCHING, "HMMA": 32, "wide_copies": 32}),
    "projected": (144, {**_MERGING, "wide_copies": 64}),
    "projected-small": (168, {**_MERGING, "wide_copies": 64}),
    "projected-fp8": (168, {**_MERGING, "wide_copies": 8}),
    "projected-int8": (168, {**_MERGING, "wide_copies": 8}),
    "projected-d256-window": (192, {**_MERGING, "wide_copies": 64}),
    "projected-page16": (168, {**_MERGING, "wide_copies": 64}),
    "projected-group16": (168, {**_MERGING, "wide_copies": 64}),
    "projected-f32": (128, {**_FETCHING, "ATOMG": 1, "FFMA": 512, "wide_copies": 32}),
}
STACK = {"projected-fp8": 8, "projected-int8": 8, "moe-float8-4096": 8, "decode-small-values-window": 16}
"""Bytes of registers that may be spilled, outside of loops."""
EARLY_LOADS = {name: 3 for name in FUSED_LIMITS if name.startswith("projected")} | {
    "few-qkv": 9,
    "few-gate-up": 9,
    "few-o": 8,
    "few-down": 12,
    "few-gate-up-large": 36,
    "few-down-large": 16,
    "few-f32": 18,
    "few-qkv-8": 17,
    "few-gate-up-8": 17,
    "few-down-8": 24,
    "few-gate-up-16": 34,
    "few-down-16": 24,
    "few-gate-up-large-8": 9,
    "few-gate-up-large-16": 9,
    "few-qkv-large-16": 18,
    "few-down-large-8": 16,
    "few-down-large-16": 16,
    "few-f32-16": 8,
}
# Scales are loaded with the codes of one token; codes for tensor cores are only prefetched.
EARLY_LOADS |= {name: 0 if "HMMA" in limits[1] else 16 for name, limits in FUSED_LIMITS.items() if name.startswith("codes")}
LIMITS = ATTENTION_LIMITS | OTHER_LIMITS | FUSED_LIMITS
FAST = [
    *("decode", "prefill", "norm", "heads-decode", "sample-scan", "feedback-tables", "few-qkv", "few-down", "projected"),
    "dequantize-4",
    "parts-8",
]
GROUPS = {
    "decode": ("decode", "verify"),
    "prefill": ("prefill",),
    "products": ("moe", "linear", "dense", "few", "codes", "projected"),
}
# Where no multiply becomes one with an add: the noise is the CPU's only so, and so are weights that are made dense; a tile of
# keys gives the same bits whole and masked. Products of f32 matrices and logarithms are made of such operations.
UNFUSED = [
    name
    for name in LIMITS
    if name.startswith(("sample-", "prefill", "decode-merge", "heads-", "dequantize-"))
    and not name.startswith("prefill-specialized")
    and not name.endswith(("-f32", "-in-order", "-split", "-sinks"))
]


# Other GPUs have other matrix instructions, less shared memory, and no dependent launch before 9.0. Of all launches each is
# compiled for one of them, and these, whose tiles are the largest or differ, for each; 8.6 differs from 8.9 in float8 alone.
OTHER_ARCHS = (80, 86, 89, 120)
DIFFERING = [
    *("prefill", "prefill-int8", "prefill-d256-window", "prefill-d256-in-order", "moe-gate-up-256", "moe-clamped-4096"),
    *("moe-fp8-4096", "linear-fp8-64", "linear-4-offset-64", "dequantize-fp8-rows"),
]
MOST_STACK_BYTES = 32
"""The assembler may keep what a loop does not need in memory, to have twice as many programs at a time."""


def archs_of(name):
    """Return the GPUs that a launch is there for: before 8.9 there are neither float8 keys and values nor float8 inputs."""
    if name.startswith("linear-large-batch"):
        return (90,)
    of_weights = name.startswith(("linear", "dequantize", "moe", "codes"))
    return OTHER_ARCHS[2:] if "float8" in name or ("fp8" in name and not of_weights) else OTHER_ARCHS


def names_for(arch):
    """Return the launches that are compiled for one of OTHER_ARCHS; with QUIRE_TEST_COMBINATIONS=all every one."""
    chosen = []
    for index, name in enumerate(LIMITS):
        archs = archs_of(name)
        is_chosen = archs[index % len(archs)] == arch or (name in DIFFERING and (arch != 86 or "fp8" in name))
        if arch in archs and (ALL_COMBINATIONS or is_chosen):
            chosen.append(name)
    return chosen


def group_of(name):
    return next((group for group, beginnings in GROUPS.items() if name.startswith(beginnings)), "others")


def compiled(module, *names):
    """Compile in a process where kernels are not interpreted, and return what came out."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"tests.unit.kernels.gpu.{module}", *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def exceeded(found):
    """Return which limits a kernel does not keep, as text."""
    name = found["name"]
    most_registers, least = LIMITS[name]
    stack = STACK.get(name, 0)
    most = {"stack": stack, "LDL": stack // 4, "STL": stack // 4, "registers": most_registers, "shared": MAX_SHARED_BYTES}
    most["early_loads"] = EARLY_LOADS.get(name, 0)
    least = least | {"early_loads": most["early_loads"]}
    if name in UNFUSED:
        most["FFMA"] = 0
    if name.startswith(("linear", "dense")):  # sums that threads share have an order that depends on the tile
        most["SHFL"] = 0
    if name.startswith("linear-large-batch"):  # it waits for each product where the assembler does not let several run
        most["WARPGROUP.DEPBAR"] = 4
    over = [f"{name}: {key} {found[key]} > {limit}" for key, limit in most.items() if found.get(key, 0) > limit]
    return over + [f"{name}: {key} {found.get(key, 0)} < {limit}" for key, limit in least.items() if found.get(key, 0) < limit]


def check_limits(names):
    found = compiled("shipped_launches", "90", *names)
    assert [kernel["name"] for kernel in found] == names
    assert [line for kernel in found for line in exceeded(kernel)] == []


def test_launches_compile_within_their_limits():
    check_limits(FAST)


@pytest.mark.slow
@pytest.mark.parametrize("group", [*GROUPS, "others"])
def test_all_launches_compile_within_their_limits(group):
    names = [name for name in LIMITS if group_of(name) == group and name not in FAST]
    check_limits(names)


@pytest.mark.slow
@pytest.mark.parametrize("arch", OTHER_ARCHS, ids="sm_{}".format)
def test_all_launches_compile_for_other_gpus(arch):
    most_shared = DeviceTraits.of_arch(arch).shared_bytes
    names = names_for(arch)
    found = compiled("shipped_launches", str(arch), *names)
    assert [kernel["name"] for kernel in found] == names
    assert [kernel for kernel in found if kernel["shared"] > most_shared or kernel["stack"] > MOST_STACK_BYTES] == []
    ahead = [kernel["name"] for kernel in found if kernel.get("PREEXIT") or kernel.get("ACQBULK") or kernel.get("UBLKPF")]
    assert ahead == [name for name in names if arch >= 90 and (name in FUSED_LIMITS or name.startswith("float8"))]
    assert [kernel["name"] for kernel in found if "wide_copies" in LIMITS[kernel["name"]][1] and not kernel["LDGSTS"]] == []


def test_every_launch_has_limits():
    tree = ast.parse(Path(__file__).with_name("shipped_launches.py").read_text())
    (table,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign))
    assert [key.value for key in table.keys if key.value not in LIMITS] == []


@pytest.mark.slow
def test_what_the_steps_of_a_model_launch_compiles_without_spills():
    found = compiled("step_launches", "plain", "fp8", "int4", "in-order", "ranks", "in-order-ranks")
    usual = {
        "_gather_ids",
        "_gather_tables",
        "_place_heads",
        "attend_runs",
        "attend_chunks",
        "merge_items",
        "choose_rows",
        "_scatter_ids",
        "_move_rows",
    }
    of_weights = {"_add_parts", "multiply_packed", "fused_quantized_gemv", "dequantize_rows", "add_splits", "multiply_dense"}
    assert usual | of_weights <= {kernel["name"] for kernel in found}
    over = [kernel for kernel in found if kernel["stack"] + kernel["spills"] or kernel["shared"] > MAX_SHARED_BYTES]
    assert over == []


AS_THERE = """import sys
names = "fastapi starlette uvicorn uvloop zmq msgspec prometheus_client pydantic httpx aiohttp"
sys.modules.update(dict.fromkeys(names.split()))
if "--section" in sys.orig_argv:
    import pytest
    from tests.unit.kernels.gpu.quick_interpreter import install
    install(pytest.MonkeyPatch())
"""


def run_benchmark(tmp_path, *arguments):
    """Run bench/gpu.py where there are no packages of a server, as on the machine that it is for."""
    (tmp_path / "sitecustomize.py").write_text(AS_THERE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "bench/gpu.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def test_the_benchmark_says_how_it_is_used_where_there_is_no_server(tmp_path):
    done = run_benchmark(tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert "--smoke" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(reason_not_to_interpret() is not None, reason=str(reason_not_to_interpret()))
def test_the_benchmark_runs_every_kernel_and_whole_models_when_it_is_tried_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_goals import GOALS
    from gpu_sections import read_record

    done = run_benchmark(tmp_path, "--smoke", "--out", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_record((tmp_path / "found.json").read_text())
    assert len([row for row in found["kernels"] if "name" in row]) == 12
    assert {"o fp8 1, fused", "o int4 65, dequantised, cuBLAS"} <= {row.get("name") for row in found["products"]}
    assert {row["section"] for row in found["engine"]} == {"prefill", "engine decode", "mixed", "engine"}
    assert {row["section"] for row in found["engine-in-turn"]} == {"mixed", "engine-in-turn"}
    assert [row["is_cold"] for row in found["start"][:2]] == [True, False]
    assert all(0 < row["weights_s"] < row["total_s"] for row in found["start"][:2])
    assert found["decode-large-fp8"][0]["weights"] == "fp8"
    assert found["in-order-small"][0]["is_in_order"]
    assert {row["what"] for row in found["profile"] if "kernel" in row} == {"decode 2 x 40", "prompt of 9"}
    assert {row.get("what") for row in found["ranks"]} == {None, "tensor parallel", "context parallel"}
    assert {row.get("adapters") for row in found["adapters"]} == {0, 1, 2, None}
    assert [row["is_forced"] for row in found["captured-prompts"] if "is_forced" in row] == [False, True]
    assert 1.5 < found["drafts"][0]["tokens_per_step"] <= 3
    assert found["libraries"][-2]["library"] == "own"
    for goal in GOALS:  # reads what sections write
        assert any(goal.number in row and row["section"] == goal.kind for row in found[goal.section])
    with tarfile.open(tmp_path / "found.logs.tar.gz") as packed:
        assert {"logs/drafts.txt", "logs/tests"} <= set(packed.getnames())
    assert 0 <= found["decode-small"][0]["idle_share"] < 1
    assert found["launches"][0]["kind"] == "one by one"
    assert all(
        {"decode", "prompt"} <= {row["section"] for row in rows}
        for name, rows in found.items()
        if name.startswith(("decode", "in-order"))
    )
