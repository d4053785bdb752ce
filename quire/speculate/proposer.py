"""Proposer: what drafts tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.contracts.step import StepPlan
from quire.speculate.draft import Draft, DraftedSequence


class Proposer(Protocol):
    """Drafts tokens, well or badly: which tokens come out does not depend on them."""

    def apply(self, plan: StepPlan) -> None:
        """Take in a step's plan before anything is computed; of interest to who keeps something in blocks."""
        ...

    def look(self, sequence: DraftedSequence, limit: int) -> int:
        """Return how many tokens it could draft now, at most `limit`; called when a sequence has got its tokens of a step."""
        ...

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """Return a draft for each sequence, of at most so many tokens; its known tokens are those of the last look."""
        ...

    def release(self, sequence: DraftedSequence) -> None:
        """Forget a sequence that ended or was preempted."""
        ...
