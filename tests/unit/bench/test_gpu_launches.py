"""How bench/gpu.py finds how long a GPU waits between steps, with a clock of numbers."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the benchmark's kernel is written in it")


@pytest.fixture
def gpu_launches(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "bench"))
    yield importlib.import_module("gpu_launches")
    del sys.modules["gpu_launches"]


def test_the_idle_share_is_what_lies_between_steps(gpu_launches):
    spans = [(0.0, 3.0), (4.0, 7.0), (7.0, 9.0), (10.0, 10.0)]
    assert gpu_launches.idle_share(spans, lambda first, last: last - first) == pytest.approx(2 / 10)


def test_every_replay_of_a_captured_step_stands_between_two_stamps(gpu_launches):
    capturer = gpu_launches.StampedCapturer(gpu_launches.RepeatingCapturer(), itertools.count().__next__)
    ran = []
    replay = capturer.capture(lambda: ran.append(1))
    replay()
    replay()
    assert ran == [1, 1]
    assert capturer.spans == [(0, 1), (2, 3)]


def test_a_row_says_why_steps_were_not_captured(gpu_launches):
    class Failing:
        def capture(self, step):
            raise RuntimeError("not permitted when stream is capturing")

    capturer = gpu_launches.StampedCapturer(Failing(), itertools.count().__next__)
    with pytest.raises(RuntimeError, match="not permitted"):
        capturer.capture(lambda: None)
    row = gpu_launches.measured_idle_share(capturer, 3)
    assert set(row) == {"error", "output"}
    assert "not permitted" in row["output"]


def test_a_row_has_the_idle_share_of_the_last_steps_or_says_that_there_were_too_few(gpu_launches):
    capturer = gpu_launches.StampedCapturer(gpu_launches.RepeatingCapturer(), itertools.count(0.0).__next__)
    replay = capturer.capture(lambda: None)
    replay()
    assert "error" in gpu_launches.measured_idle_share(capturer, 5)
    replay()
    replay()
    assert gpu_launches.measured_idle_share(capturer, 2) == {"idle_share": pytest.approx(1 / 3)}
