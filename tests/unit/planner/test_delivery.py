"""What a server adds to steps: samples by the pause before a request, and the fit that counts them."""

import random
from dataclasses import asdict, replace

import pytest

from quire.planner.delivery import Delivery
from quire.planner.step_time import StepWork, fit_steps
from tests.unit.planner.test_step_time import RATES, synthetic_steps

DELIVERY = Delivery(
    delays=(*((0.001 * place, 0.001) for place in range(20)), *((0.5 + 0.001 * place, 0.004) for place in range(20))),
    stalls=((0.002, (0.0, 0.0, 0.0, 0.001)), (0.5, (0.0, 0.0, 0.0, 0.005))),
    step_s=0.002,
    sequence_s=0.001,
)


def test_delays_and_stalls_are_those_of_requests_after_such_a_pause():
    rng = random.Random(1)
    assert {DELIVERY.draw_delay(idle_s, rng) for idle_s in (0.0, 0.004) for _ in range(50)} == {0.001}
    assert {DELIVERY.draw_delay(idle_s, rng) for idle_s in (0.51, 9.0, float("inf")) for _ in range(50)} == {0.004}
    assert {DELIVERY.draw_stall(0.0, rng) for _ in range(100)} == {0.0, 0.001}
    assert {DELIVERY.draw_stall(3.0, rng) for _ in range(100)} == {0.0, 0.005}
    assert DELIVERY.least_delay_s == 0.001
    assert "40 requests" in DELIVERY.describe()


def test_samples_are_read_as_they_were_written():
    assert Delivery.from_dict(asdict(DELIVERY)) == DELIVERY
    for name in ("delays", "stalls"):
        with pytest.raises(ValueError, match="no samples"):
            Delivery.from_dict({**asdict(DELIVERY), name: []})


def test_times_at_a_server_are_longer_by_step_and_sequence():
    shape, steps = synthetic_steps()
    fit = fit_steps(steps, shape, "bfloat16", "bfloat16", RATES)
    served = fit.served(DELIVERY)
    work = StepWork.of_spans([(100, 1)] * 4, shape.windows, 4)
    assert served.mean_s(work) - fit.mean_s(work) == pytest.approx(0.002 + 4 * 0.001)
    assert served.request_s == pytest.approx(0.0025)
    assert served.residuals == fit.residuals == replace(fit).residuals
