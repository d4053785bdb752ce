"""Prefill and decode apart, by hand."""

from dataclasses import dataclass, replace

import pytest

from quire.planner.apart import plan_apart
from quire.planner.capacity import Objectives, Replica
from quire.planner.memory import Lengths, Limits
from quire.planner.plan import make_plan
from quire.planner.report import describe_plan
from quire.planner.step_time import StepWork
from tests.unit.planner.shapes import make_shape
from tests.unit.planner.test_plan import make_question

LENGTHS = Lengths.of([200] * 10, [100] * 10)


@dataclass(frozen=True)
class PlainTime:
    """10 ms a step, 1 ms a prompt token in it, 1 ms a sequence that decodes."""

    request_s: float = 0.002

    def mean_s(self, work: StepWork) -> float:
        return 0.010 + 0.001 * work.num_tokens


def make_replica(max_num_seqs=40) -> Replica:
    return Replica(make_shape(), PlainTime(), Limits(max_num_seqs, 128, 4096, 16, 0.9), 100_000)


def test_roles_are_divided_by_what_each_does():
    # A prompt of 200 tokens is two steps, 0.138 + 0.082 s: 4.545/s. A batch of 40 decodes in 0.05 s: 800 tokens, 8 requests/s.
    found = plan_apart(make_replica(), 6, LENGTHS, Objectives(), 1000.0, 1e9)
    assert (found.num_prefill, found.num_decode, found.batch, found.limit) == (4, 2, 40, "decode")
    assert found.requests_per_s == pytest.approx(16.0)
    assert found.tpot_s == pytest.approx(0.050)
    assert found.ttft_s == pytest.approx(0.002 + 0.220 + 200 * 1000 / 1e9 + 0.050)


def test_objectives_limit_the_batch_and_the_prompt():
    found = plan_apart(make_replica(), 6, LENGTHS, Objectives(tpot_s=0.030), 1000.0, 1e9)
    assert (found.batch, found.tpot_s) == (20, pytest.approx(0.030))
    assert plan_apart(make_replica(), 6, LENGTHS, Objectives(ttft_s=0.2), 1000.0, 1e9) is None
    assert plan_apart(make_replica(), 6, LENGTHS, Objectives(tpot_s=0.005), 1000.0, 1e9) is None
    assert plan_apart(make_replica(), 1, LENGTHS, Objectives(), 1000.0, 1e9) is None


def test_cached_prompt_tokens_are_neither_computed_nor_sent():
    half = plan_apart(make_replica(), 6, LENGTHS, Objectives(), 1000.0, 1e9, hit_share=0.5)
    assert half.ttft_s == pytest.approx(0.002 + 0.110 + 100 * 1000 / 1e9 + 0.050)
    assert half.requests_per_s > 16.0


def test_plan_says_what_the_division_would_serve():
    plan = make_plan(replace(make_question(), num_devices=4))
    assert plan.apart is not None
    assert plan.apart.num_prefill + plan.apart.num_decode == plan.best.layout.num_replicas
    assert "for prefill and" in describe_plan(plan)
    assert plan.to_dict()["apart"]["requests_per_s"] == plan.apart.requests_per_s
    assert make_plan(make_question(num_devices=1)).apart is None
