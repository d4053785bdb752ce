"""How bench/gpu.py runs the kernels' tests on a GPU: a file that fails, hangs or crashes costs itself."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def gpu_tests():
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "bench" / "gpu_tests.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_tests"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_tests"]


CODES = {
    "fine": "print('3 passed, 1 deselected in 0.10s')",
    "fails": "print('1 failed, 2 passed, 1 skipped in 0.10s'); raise SystemExit(1)",
    "hangs": "print('begun', flush=True); import time; time.sleep(600)",
}


def run(gpu_tests, names, limit_s, at_once=2):
    found = gpu_tests.run_test_files(names, lambda name: [sys.executable, "-c", CODES[name]], limit_s, at_once)
    return {row["file"]: row for row in found}


def test_outcomes_are_counted_and_failures_shown_and_the_next_file_runs(gpu_tests):
    found = run(gpu_tests, ["fails", "fine"], 120, at_once=1)
    assert (found["fails"]["failed"], found["fails"]["passed"], found["fails"]["skipped"]) == (1, 2, 1)
    assert found["fails"]["error"] == "ended with 1"
    assert "1 failed" in found["fails"]["output"]
    assert found["fine"]["passed"] == 3
    assert "error" not in found["fine"]


def test_a_file_that_hangs_is_stopped_and_one_that_has_not_begun_is_named_when_the_time_is_over(gpu_tests):
    started = time.monotonic()
    found = run(gpu_tests, ["hangs", "fine"], 2, at_once=1)
    assert time.monotonic() - started < 60
    assert found["hangs"]["error"].startswith("stopped after")
    assert "begun" in found["hangs"]["output"]
    assert found["fine"] == {"file": "fine", "error": "left out: no time was left"}


def test_files_that_need_no_gpu_are_left_out_and_attention_comes_first(gpu_tests):
    files = gpu_tests.files_for_a_gpu()
    assert files[0] == "test_triton_attention.py"
    assert "test_triton_compiling.py" not in files
    there = {path.name for path in (ROOT / "tests/unit/kernels/gpu").glob("test_*.py")}
    assert set(files) < there
    assert set(gpu_tests._FIRST) | gpu_tests._WITHOUT_A_GPU <= there


def test_no_test_of_a_file_stops_at_the_first_failure(gpu_tests):
    assert "-x" not in gpu_tests.pytest_command("test_triton_attention.py")
