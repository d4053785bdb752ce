"""StepPacer: what a thread reads and writes next to each step is bounded, by count."""

import threading

import pytest

from quire.parallel.step_pacer import StepPacer


def _work(pacer, pieces):
    thread = threading.Thread(target=lambda: [pacer.take(piece) for piece in pieces], daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("pieces", [[40] * 20, [100] * 9, [250, 10, 10, 600, 30], [1] * 500])
def test_no_more_bytes_than_the_steps_allow(pieces):
    pacer = StepPacer(100, idle_s=None)
    thread, num_steps = _work(pacer, pieces), 0
    while thread.is_alive():
        found = pacer.num_bytes
        assert found <= 100 * (num_steps + 1) + max(0, max(pieces) - 100)
        pacer.begin_step()
        pacer.end_step()
        num_steps += 1
        thread.join(0.001)
    assert pacer.num_bytes == sum(pieces)
    assert num_steps >= sum(pieces) // 100 - 1 - max(pieces) // 100


def test_work_goes_on_without_steps_but_not_in_a_long_one():
    pacer = StepPacer(10, idle_s=0.001)
    pacer.begin_step()
    pacer.take(10)
    thread = _work(pacer, [10] * 5)
    thread.join(0.05)
    assert pacer.num_bytes == 10
    pacer.end_step()
    thread.join(20)
    assert pacer.num_bytes == 60
