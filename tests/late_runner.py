"""LateRunner: lets the engine step ahead of the CPU's runner, without a GPU: what is launched runs when it is collected.

As a GPU's runner, it allows no step behind one with constraints, whose masks the host has.
"""

from dataclasses import dataclass

from quire.contracts.step import StepPlan, StepResult


@dataclass
class LateStep:
    runner: "LateRunner"
    plan: StepPlan
    allows_next: bool

    def collect(self) -> StepResult:
        return self.runner.collect(self)


class LateRunner:
    """An AheadRunner around a runner whose rows know their tokens by themselves; all else is that runner's own."""

    def __init__(self, inner):
        self.inner = inner
        self.launched = []
        self.log = []
        self._constrained = set()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def launch(self, plan):
        self._constrained |= {start.sequence_id for start in plan.starts if start.request.grammar is not None}
        is_free = self._constrained.isdisjoint(plan.num_scheduled_tokens)
        step = LateStep(self, plan, plan.num_draft_slots is None and is_free)
        assert all(other.allows_next for other in self.launched)
        assert len(self.launched) < 2
        self.launched.append(step)
        self.log.append(("launch", plan.step_id))
        return step

    def collect(self, step):
        assert self.launched.pop(0) is step
        self.log.append(("collect", step.plan.step_id))
        result = self.inner.execute(step.plan)
        for sequence_id in result.errors:  # the next step may be on its way with it
            self.inner.batch.row(sequence_id).token_ids.append(0)
        return result

    def execute(self, plan):
        return self.launch(plan).collect()

    def close(self):
        assert not self.launched
        self.inner.close()
