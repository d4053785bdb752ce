"""How bench/gpu.py runs the kernels' tests on a GPU: a file that fails, hangs or crashes costs itself."""

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.covering import part_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def gpu_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("gpu_tests")
    del sys.modules["gpu_tests"]


VERBOSE = """tests/a.py::test_one[x-1] PASSED [ 20%]
tests/a.py::test_two[a b] FAILED [ 40%]
tests/a.py::test_three ERROR [ 60%]
tests/a.py::test_four SKIPPED (no card) [ 80%]
E   FAILED nothing
FAILED tests/a.py::test_two[a b] - AssertionError
"""
CODES = {
    "fine": "print('3 passed, 1 deselected in 0.10s')",
    "fails": "print('1 failed, 2 passed, 1 skipped in 0.10s'); raise SystemExit(1)",
    "hangs": "print('begun', flush=True); import time; time.sleep(600)",
    "names": f"print({VERBOSE!r}); print('1 failed, 1 passed, 1 skipped, 1 error in 0.10s'); raise SystemExit(1)",
    "sums up": f"import time\nprint({VERBOSE!r})\ntry:\n time.sleep(600)\nexcept KeyboardInterrupt:\n print('summed up')",
    "is deaf": f"import signal, time\nsignal.signal(2, signal.SIG_IGN)\nprint({VERBOSE!r})\ntime.sleep(600)",
}


@pytest.fixture
def run(gpu_tests, tmp_path):
    return lambda *rest, **options: run_in(tmp_path, gpu_tests, *rest, **options)


def run_in(folder, gpu_tests, names, limit_s, at_once=2):
    found = gpu_tests.run_test_files(names, lambda name: [sys.executable, "-S", "-c", CODES[name]], limit_s, at_once, folder)
    return {row["file"]: row for row in found}


def test_outcomes_are_counted_and_failures_shown_and_the_next_file_runs(run):
    found = run(["fails", "fine"], 120, at_once=1)
    assert (found["fails"]["failed"], found["fails"]["passed"], found["fails"]["skipped"]) == (1, 2, 1)
    assert found["fails"]["error"] == "ended with 1"
    assert "1 failed" in found["fails"]["output"]
    assert found["fine"]["passed"] == 3
    assert "error" not in found["fine"]


@pytest.mark.slow
def test_a_file_that_hangs_is_stopped_and_one_that_has_not_begun_is_named_when_the_time_is_over(run):
    started = time.monotonic()
    found = run(["hangs", "fine"], 2, at_once=1)
    assert time.monotonic() - started < 60
    assert found["hangs"]["error"].startswith("stopped after")
    assert "begun" in found["hangs"]["output"]
    assert found["fine"] == {"file": "fine", "error": "left out: no time was left"}


def test_names_of_failures_and_whole_outputs_are_kept(run, tmp_path):
    found = run(["names"], 120)["names"]
    assert found["failed_tests"] == ["test_two[a b]", "test_three"]
    assert VERBOSE in (tmp_path / "names.txt").read_text()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["sums up", "is deaf"])
def test_names_of_failures_are_kept_when_a_file_is_stopped(run, tmp_path, monkeypatch, gpu_tests, name):
    monkeypatch.setattr(gpu_tests, "_SECONDS_TO_SUM_UP", 30 if name == "sums up" else 1)
    found = run([name], 3)[name]
    assert found["error"].startswith("stopped after")
    assert found["failed_tests"] == ["test_two[a b]", "test_three"]
    text = (tmp_path / f"{name}.txt").read_text()
    assert VERBOSE in text
    assert ("summed up" in text) == (name == "sums up")


def test_all_files_that_need_a_gpu_run_in_parts_or_together(gpu_tests):
    names = gpu_tests.files_for_a_gpu()
    files = [word for name in names for word in name.split(" ") if word.endswith(".py")]
    assert len(names) == len(set(names))
    there = {path.name for path in (ROOT / "tests/unit/kernels/gpu").glob("test_*.py")}
    assert there > gpu_tests.WITHOUT_A_GPU
    assert set(files) == there - gpu_tests.WITHOUT_A_GPU
    parted = {name.partition(" ")[0] for name in names if "of" in name.rpartition(" ")[2]}
    assert "test_device_golden.py" in parted
    assert all(files.count(file) == 1 for file in set(files) - parted)
    command = gpu_tests.pytest_command("test_a.py test_b.py")
    assert [word[-9:] for word in command if "test_" in word] == ["test_a.py", "test_b.py"]


def test_parts_of_a_file_have_each_of_its_tests_once(gpu_tests):
    tests = list(range(10))
    parts = [f"{index}/3" for index in range(3)]
    assert sorted(test for part in parts for test in part_of(tests, part)) == tests
    assert [f"QUIRE_TEST_PART={part}" for part in parts] == [
        gpu_tests.pytest_command(f"test_a.py {index}of3")[1] for index in range(3)
    ]


@pytest.mark.slow
def test_process_collects_its_part_of_a_file(gpu_tests):
    def collected(name):
        command = [*gpu_tests.pytest_command(name), "--collect-only", "-q"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
        return [line for line in found if "::" in line]

    file = "test_triton_float8.py"
    assert collected(f"{file} 1of3") == part_of(collected(file), "1/3")
