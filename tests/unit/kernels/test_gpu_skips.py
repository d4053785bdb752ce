"""The tests of the GPU kernels skip where they cannot run, and fail instead where a run is there for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts pytest anew

ROOT = Path(__file__).resolve().parents[3]


def run_without_triton(folder, **environment):
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/unit/kernels/gpu/test_triton_linear.py"]
    return subprocess.run(
        command, cwd=ROOT, env={**kept, "PYTHONPATH": path, **environment}, capture_output=True, text=True, check=False
    )


def test_modules_skip_when_there_is_no_triton(tmp_path):
    done = run_without_triton(tmp_path)
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 5, "no tests ran"


def test_a_skip_is_a_failure_when_the_tests_are_required(tmp_path):
    done = run_without_triton(tmp_path, QUIRE_GPU_TESTS="required")
    assert done.returncode not in (0, 5), done.stdout + done.stderr
    assert "skipped although QUIRE_GPU_TESTS=required" in done.stdout
