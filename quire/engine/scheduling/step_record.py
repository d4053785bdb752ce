"""StepRecord: what one step computed for whom, for those who watch the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.base.ids import RequestId
from quire.contracts.step import StepPlan
from quire.engine.scheduling.scheduler import Scheduler


class StepShare(NamedTuple):
    """What one sequence computes in a step; is_prefill: prompt tokens, or all known tokens again after a preemption."""

    request_id: RequestId
    choice: int
    num_tokens: int
    is_prefill: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that was made.

    started_s, duration_s  of time.monotonic(), scheduling and committing included; of a step that was launched behind another
                           one, from the end of that one on
    num_context_tokens     tokens in the cache that its sequences attended to, those of the step included, summed
    """

    step_id: int
    started_s: float
    duration_s: float
    num_context_tokens: int
    shares: list[StepShare]


def describe_plan(scheduler: Scheduler, plan: StepPlan) -> tuple[list[StepShare], int]:
    """Return the shares of a plan that is not committed yet, in batch order, and the tokens that are attended to."""
    shares: list[StepShare] = []
    num_context_tokens = 0
    for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
        sequence = scheduler.sequence(sequence_id)
        num_computed = sequence.num_computed_tokens + scheduler.in_flight.num_tokens_before(plan, sequence_id)
        is_prefill = num_tokens > 1 or num_computed < sequence.num_prompt_tokens
        shares.append(StepShare(sequence.request.request_id, sequence.choice, num_tokens, is_prefill))
        num_context_tokens += num_computed + num_tokens
    return shares, num_context_tokens
