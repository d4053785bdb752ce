"""StepRecord: the work of one step by sequence, for metrics and the live view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.base.ids import RequestId
from quire.contracts.step import StepPlan
from quire.engine.scheduling.scheduler import Scheduler


class StepShare(NamedTuple):
    """The work of one sequence in a step; is_prefill: prompt tokens, or all known tokens again after a preemption."""

    request_id: RequestId
    choice: int
    num_tokens: int
    is_prefill: bool


class Attended(NamedTuple):
    """The sum of what the sequences of a step attend to, in layers with one window.

    num_tokens  tokens in the cache whose keys and values are read, including those of the step
    num_pairs   of a new token and a token that it attends to
    """

    num_tokens: int
    num_pairs: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One completed step.

    started_s, duration_s  of time.monotonic(), including scheduling and committing; for a step that was launched ahead,
                           from the end of the previous step
    attended               what its sequences attended to, for each window that describe_plan was given
    """

    step_id: int
    started_s: float
    duration_s: float
    attended: list[Attended]
    shares: list[StepShare]


def describe_plan(
    scheduler: Scheduler, plan: StepPlan, windows: Sequence[int | None] = (None,)
) -> tuple[list[StepShare], list[Attended]]:
    """Return the shares of a plan before its commit, in batch order, and what its sequences attend to.

    windows  of the model's layers, each once; None: a token attends to all before it
    """
    shares: list[StepShare] = []
    spans: list[tuple[int, int]] = []
    for sequence_id, num_tokens in plan.num_scheduled_tokens.items():
        sequence = scheduler.sequence(sequence_id)
        num_computed = sequence.num_computed_tokens + scheduler.in_flight.num_tokens_before(plan, sequence_id)
        is_prefill = num_tokens > 1 or num_computed < sequence.num_prompt_tokens
        shares.append(StepShare(sequence.request.request_id, sequence.choice, num_tokens, is_prefill))
        spans.append((num_computed - sequence.num_dropped_tokens, num_tokens))
    return shares, [_attended(spans, window) for window in windows]


def _attended(spans: Sequence[tuple[int, int]], window: int | None) -> Attended:
    """Return what `count` new tokens after `start` known ones attend to, for each (start, count)."""
    num_tokens = num_pairs = 0
    for start, count in spans:
        end = start + count
        if window is None or end <= window:
            num_tokens += end
            num_pairs += end if count == 1 else count * start + count * (count + 1) // 2
            continue
        num_tokens += min(end, window - 1 + count)
        num_whole = max(0, min(count, window - start))  # of the new tokens that attend to all before them
        num_pairs += num_whole * start + num_whole * (num_whole + 1) // 2 + (count - num_whole) * window
    return Attended(num_tokens, num_pairs)
