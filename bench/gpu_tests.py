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
FIRST = [
    "test_triton_attention.py",
    "test_hopper_attention.py",
    "test_triton_fused_quantized.py",
    "test_device_tiers.py",
    "test_device_heads.py",
    "test_device_drafts.py",
    "test_triton_layers.py",
    "test_triton_decoder.py",
    "test_device_engine.py",
    "test_device_stepper.py",
    "test_triton_linear.py",
    "test_triton_sampling.py",
    "test_device_overlap.py",
    "test_device_golden.py",
]
"""What is worth most; the other files come after these."""

WITHOUT_A_GPU = {
    *("test_kernel_sources.py", "test_triton_compiling.py", "test_device_places.py"),
    *("test_address_check.py", "test_dry_run.py", "test_gpu_bench.py", "test_serving_variants.py"),
    *("test_device_context.py", "test_expert_exchange.py", "test_device_homes.py", "test_random_homes.py"),
    *("test_tensor_parallel_decoder.py", "test_tensor_parallel_engine.py", "test_staged_call.py", "test_bound_launches.py"),
}
"""Files that test nothing on a GPU: they read sources, compile ahead of time, try checks, several ranks and this benchmark in
the interpreter, or launch nothing."""

PARTS = {"test_device_golden.py": 5, "test_triton_attention.py": 4, "test_triton_fused.py": 3, "test_device_recurrent.py": 2}
"""Of files that take longest, in how many processes they run."""

_COUNTED = ("passed", "failed", "error", "skipped")
_TAIL = 1500
_SECONDS_TO_SUM_UP = 5
"""What a file that is stopped has to say which of its tests have failed, and how."""


def files_for_a_gpu() -> list[str]:
    """Return the names of the files that a GPU runs, what is worth most first; of long ones "FILE IofN": a part of it."""
    found = {path.name for path in (ROOT / FOLDER).glob("test_*.py")} - WITHOUT_A_GPU
    names = [*(name for name in FIRST if name in found), *sorted(found - set(FIRST))]
    counts = {name: PARTS.get(name, 1) for name in names}
    parted = [f"{name} {index}of{count}" for name, count in counts.items() if count > 1 for index in range(count)]
    return [*parted, *(name for name, count in counts.items() if count == 1)]


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
    file, _, part = name.partition(" ")
    command = [sys.executable, "-m", "pytest", "-vv", str(FOLDER / file), "-m", "slow or not slow", "-o", "addopts="]
    return ["env", f"QUIRE_TEST_PART={part.replace('of', '/')}", *command] if part else command
