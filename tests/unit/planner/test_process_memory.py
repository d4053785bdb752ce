"""The memory that `quire plan` counts against that of a process, with a full pool and the largest steps."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("quire.kernels.cpu._native")

SCRIPT = Path(__file__).parents[3] / "bench" / "planner_bars.py"


@pytest.mark.slow
def test_plan_is_within_ten_per_cent_of_the_process():
    done = subprocess.run([sys.executable, str(SCRIPT), "memory", "--quick"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
