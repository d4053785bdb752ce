"""PooledPace: a pace that takes in like steps of one sequence many at once.

A few calls in Python behind a step that has filled the caches take a twentieth of a small model's step; the same calls one
after the other take a fraction of that.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.speculate.pace import STEPS_TO_SETTLE_AWAKE, Pace
from quire.speculate.acceptance import AcceptanceRecord
from quire.speculate.step_times import Kind


class PooledPace(Pace):
    """Until the next decision is due nothing depends on what one sequence's steps with drafts tell: they are kept till then."""

    def __init__(self, max_tokens: int, record: type[AcceptanceRecord] = AcceptanceRecord) -> None:
        super().__init__(max_tokens, record)
        self._calm_left = 0  # steps for which what to draft is known
        self._verified: list[tuple[AcceptanceRecord, int, Sequence[int], int | None]] = []
        # Drafts, duration and drafts made of each step, and how many had been verified before it ended.
        self._steps: list[tuple[int, float, int | None, int]] = []

    def note_start(self) -> None:
        self._tell()
        super().note_start()

    def note_step(
        self, num_sequences: int, num_drafts: int, duration_s: float, num_made: int | None = None, deciding_s: float = 0.0
    ) -> None:
        if self._calm_left > 0 and num_sequences == 1 and num_drafts > 0 and self._num_caught_up == 0:
            self._steps.append((num_drafts, duration_s, num_made, len(self._verified)))
            return
        self._tell()
        super().note_step(num_sequences, num_drafts, duration_s, num_made, deciding_s)

    def pass_step(self, num_drafts: int) -> None:
        self._tell()
        super().pass_step(num_drafts)

    def note_verified(
        self, record: AcceptanceRecord, num_drafts: int, path: Sequence[int], num_made: int | None = None
    ) -> None:
        if self._calm_left > 0:
            self._verified.append((record, num_drafts, path, num_made))
        else:
            super().note_verified(record, num_drafts, path, num_made)

    def go_on_alone(self, record: AcceptanceRecord, num_drafts: int, path: Sequence[int], num_made: int, most: int) -> int:
        """Take in how the draft of a sequence alone fared, as note_verified, and return how many to take next, at most `most`;
        do nothing, and return 0, where that is to be decided."""
        if self._calm_left <= 1 or most > self._num_offered:
            return 0
        self._calm_left -= 1
        self._verified.append((record, num_drafts, path, num_made))
        return min(most, self._best)

    def choose(self, offers: Sequence[tuple[AcceptanceRecord, int]]) -> list[int]:
        if self._calm_left > 1 and len(offers) == 1 and offers[0][1] <= self._num_offered:
            self._calm_left -= 1
            return [min(offers[0][1], self._best)]
        self._tell()
        chosen = super().choose(offers)
        self._calm_left = self._begin_calm() if len(offers) == 1 else 0
        return chosen

    def _tell(self) -> None:
        """Take in what was kept."""
        self._calm_left = 0
        steps, verified = self._steps, self._verified
        if steps:
            num_told = steps[-1][3]
            for one in verified[:num_told]:
                super().note_verified(*one)
            self._earn(float(len(steps) + self._num_accepted), self._note_alike(steps), len(steps))
            self._go_on(1, len(steps))
            del verified[:num_told]
            steps.clear()
        for one in verified:
            super().note_verified(*one)
        verified.clear()

    def _note_alike(self, steps: Sequence[tuple[int, float, int | None, int]]) -> float:
        """Note what steps with drafts took; return that in plain steps."""
        took, plain_s = 0.0, self._costs.plain_s(1) or 1.0
        usual: dict[Kind, float | None] = {}
        for num_drafts, duration_s, num_made, _ in steps:
            kind = self._costs.kind(1, num_drafts, num_drafts if num_made is None else num_made, looks=True)
            if kind not in usual:
                usual[kind] = self._costs.usual_of(kind, plain_s)
            took += self._costs.fit(duration_s / plain_s, num_drafts, usual[kind])
            self._num_alike += 1
            if self._num_alike >= STEPS_TO_SETTLE_AWAKE:
                self._costs.note_alike(kind, duration_s)
        return took
