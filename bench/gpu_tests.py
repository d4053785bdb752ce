"""The kernels' tests on a GPU, for bench/gpu.py: each file in a process, several at once, for they mostly compile.

No torch: nothing here takes any of the device's memory.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

Row = dict[str, object]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("tests/unit/kernels/gpu")
_WORK_S = {
    "device_golden": 326, "triton_attention": 123, "device_recurrent": 79, "device_engine": 61, "device_adapters": 60,
    "device_tiers": 54, "triton_fused": 53, "device_drafts": 39, "device_windows": 39, "device_heads": 37,
    "captured_prompts": 34, "hopper_attention": 28, "triton_decoder": 24, "triton_linear": 21, "triton_moe": 17,
    "quantized_models": 17, "triton_fused_quantized": 16, "triton_rotated": 16, "triton_float8": 15, "triton_sampling": 15,
    "attention_libraries": 14, "triton_lora": 14, "nccl_rank": 14, "device_traits": 13, "triton_layers": 12,
}  # fmt: skip
"""What the tests of longer files take on an H200 beside the start of their process, all parts together, as test_NAME.py.

Estimates: the seconds in gpu-h200-2026-11-28.json, less 7 for each process, by the tests that there were then and are now.
"""

_MOST_S, _SHORT_TOGETHER = 39, 3
"""Files with more work run in parts; other files than these, so many in a process."""

WITHOUT_A_GPU = {
    *("test_kernel_sources.py", "test_triton_compiling.py", "test_device_places.py", "test_compile_server.py"),
    *("test_address_check.py", "test_dry_run.py", "test_gpu_bench.py", "test_serving_variants.py", "test_bound_launches.py"),
    *("test_device_context.py", "test_device_homes.py", "test_random_homes.py"),
    *("test_expert_exchange.py", "test_tensor_parallel_decoder.py", "test_tensor_parallel_engine.py"),
    *("test_run_on_a_gpu.py", "test_staged_call.py"),
}
"""Files that test nothing on a GPU: they read sources, compile ahead of time, test what the host does, or several ranks in the
interpreter."""

_COUNTED = ("passed", "failed", "error", "skipped")
_TAIL = 1500
_SECONDS_TO_SUM_UP = 5
"""What a file that is stopped has to say which of its tests have failed, and how."""


def files_for_a_gpu() -> list[str]:
    """Return what a GPU runs, each in a process, the longest first: "FILE", "FILE IofN", a part of it, or "FILE FILE"."""
    found = {path.name for path in (ROOT / FOLDER).glob("test_*.py")} - WITHOUT_A_GPU
    runs: list[tuple[float, str]] = []
    for stem, seconds in _WORK_S.items():
        name, count = f"test_{stem}.py", -(-seconds // _MOST_S)
        parts = [f"{name} {index}of{count}" for index in range(count)] if count > 1 else [name]
        runs += [(seconds / count, part) for part in parts]
        found.remove(name)
    short, runs = sorted(found), sorted(runs, key=lambda run: -run[0])
    together = (short[first : first + _SHORT_TOGETHER] for first in range(0, len(short), _SHORT_TOGETHER))
    return [*(name for _, name in runs), *map(" ".join, together)]


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started_s: float


def run_test_files(
    names: Sequence[str], command_of: Callable[[str], Sequence[str]], limit_s: float, at_once: int, folder: Path
) -> Iterator[Row]:
    """Yield what became of each file, as they end: counts of tests by outcome, and where it is not green the names of the tests
    that failed, and the end of the output.

    folder  where the whole outputs are written, one a file
    A file that has not ended after limit_s is stopped, and those that have not begun say so. A failing test stops nothing.
    """
    deadline = time.monotonic() + limit_s
    waiting, running = list(names), list[_Run]()
    folder.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        is_late = time.monotonic() > deadline
        while waiting and len(running) < at_once and not is_late:
            running.append(_start(waiting.pop(0), command_of, folder))
        ended = [run for run in running if is_late or run.process.poll() is not None]
        stopped = [run for run in ended if run.process.poll() is None]
        _stop(stopped)
        for run in ended:
            running.remove(run)
            yield _row_of(run, run in stopped)
        if is_late:
            yield from ({"file": name, "error": "left out: no time was left"} for name in waiting)
            return
        time.sleep(0.05)


def _start(name: str, command_of: Callable[[str], Sequence[str]], folder: Path) -> _Run:
    output = (folder / f"{name}.txt").open("w+b")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # what is killed has written what it had found
    process = subprocess.Popen(command_of(name), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return _Run(name, process, output, time.monotonic())


def _stop(runs: Sequence[_Run]) -> None:
    """Interrupt tests, so that they sum up what they have found, and kill those that do not end by that."""
    for run in runs:
        run.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _SECONDS_TO_SUM_UP
    for run in runs:
        try:
            run.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


def _row_of(run: _Run, is_stopped: bool) -> Row:
    code = run.process.poll()
    seconds = time.monotonic() - run.started_s
    with run.output as output:
        output.seek(0)
        text = output.read().decode(errors="replace")
    row: Row = {"file": run.name, "seconds": seconds, **_counts(text)}
    if names := failed_tests(text):
        row["failed_tests"] = names
    if is_stopped:
        row["error"] = f"stopped after {seconds:.0f} s"
    elif code != 0:
        row["error"] = f"ended with {code}"
    return row | {"output": text[-_TAIL:]} if "error" in row else row


def failed_tests(text: str) -> list[str]:
    """Return the names of the tests that failed or could not be run, without their file: pytest -vv tells each at once."""
    lines = (re.match(r"\S+?::(.+?) (?:FAILED|ERROR)\b", line) for line in text.splitlines())
    return list(dict.fromkeys(found[1] for found in lines if found))


def _counts(text: str) -> dict[str, int]:
    """Return how many tests had each outcome, from pytest's last line."""
    last = next((line for line in reversed(text.splitlines()) if re.search(r"\d+ \w+.* in [\d.]+s", line)), "")
    return {word: int(found[1]) for word in _COUNTED if (found := re.search(rf"(\d+) {word}", last))}


def pytest_command(name: str) -> list[str]:
    """Return how one of files_for_a_gpu is tested, slow tests included."""
    words = name.split(" ")
    part = "" if words[-1].endswith(".py") else words.pop()
    files = [str(FOLDER / file) for file in words]
    command = [sys.executable, "-m", "pytest", "-vv", *files, "-m", "slow or not slow", "-o", "addopts="]
    return ["env", f"QUIRE_TEST_PART={part.replace('of', '/')}", *command] if part else command
