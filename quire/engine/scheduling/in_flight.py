"""StepsInFlight: the steps that are planned but not committed, and the blocks that they may still write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.base.errors import InvariantError
from quire.base.ids import BlockId, SequenceId
from quire.contracts.step import StepPlan, StepResult
from quire.engine.scheduling.sequence import HeldBlocks, Sequence


class StepsInFlight:
    """At most max_steps: the running step and the next one; with pipeline stages, one for each stage.

    The blocks of a sequence that has ended are kept here until the last step that computes it is committed, because the step
    may still write them.
    """

    def __init__(self, max_steps: int = 2) -> None:
        self._max_steps = max_steps
        self._plans: list[StepPlan] = []
        self._retired: list[tuple[StepPlan, HeldBlocks]] = []

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[StepPlan]:
        """Yield the plans, oldest first."""
        return iter(self._plans)

    @property
    def first(self) -> StepPlan | None:
        """The next plan to be committed; None if there is none."""
        return self._plans[0] if self._plans else None

    @property
    def retired_block_ids(self) -> list[BlockId]:
        """The blocks of ended sequences that are kept."""
        return [block_id for _, held in self._retired for block_id in held.block_ids]

    @property
    def retired_window_ids(self) -> list[BlockId]:
        """The window blocks of ended sequences that are kept."""
        return [window_id for _, held in self._retired for window_id in held.window_ids]

    def begin(self, plan: StepPlan) -> None:
        """Add the plan of the next step."""
        if len(self._plans) == self._max_steps:
            raise InvariantError(f"step {self._plans[0].step_id} must be committed before another one is scheduled")
        self._plans.append(plan)

    def end(self, plan: StepPlan, result: StepResult) -> list[HeldBlocks]:
        """Remove the oldest step, and return the blocks that nothing writes any more. Raises InvariantError for another
        step."""
        if not self._plans or plan is not self._plans[0] or result.step_id != plan.step_id:
            raise InvariantError(f"result of step {result.step_id} and plan of step {plan.step_id} are not those in flight")
        del self._plans[0]
        if not self._retired:
            return []
        found = [held for last, held in self._retired if last is plan]
        self._retired = [(last, held) for last, held in self._retired if last is not plan]
        return found

    def last_with(self, sequence_id: SequenceId) -> StepPlan | None:
        """Return the last step in flight that computes a sequence."""
        for plan in reversed(self._plans):
            if sequence_id in plan.num_scheduled_tokens:
                return plan
        return None

    def leave_out(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences that no step in flight computes."""
        busy = {sequence_id for plan in self._plans for sequence_id in plan.num_scheduled_tokens}
        return [sequence for sequence in sequences if sequence.sequence_id not in busy]

    def retire(self, last: StepPlan, held: HeldBlocks) -> None:
        """Keep the blocks of a sequence that has ended until its last step is committed."""
        self._retired.append((last, held))

    def num_tokens_before(self, plan: StepPlan, sequence_id: SequenceId) -> int:
        """Return how many tokens of a sequence are computed by the steps in flight before a plan."""
        return sum(other.num_scheduled_tokens.get(sequence_id, 0) for other in self._plans if other.step_id < plan.step_id)
