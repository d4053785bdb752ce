"""Proposer: what drafts tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.contracts.step import StepPlan
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.records import AcceptanceRecord


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step computed of a sequence whose draft it verified; the tokens that it got are known by now.

    draft   what was verified
    path    indices of the drafts that were accepted, in order: the tokens of all but the last one that was sampled
    rows    1 + len(draft) rows of step_logits: behind the token that was the last known one, and behind each draft
    """

    sequence: DraftedSequence
    draft: Draft
    path: tuple[int, ...]
    step_logits: Tensor
    rows: tuple[int, ...]

    @property
    def logits(self) -> Tensor:
        """The rows of logits [1 + len(draft), vocab_size]; to be taken before the next step."""
        return self.step_logits[list(self.rows)]


class Proposer(ABC):
    """Drafts tokens, well or badly: which tokens come out does not depend on them.

    record      how its drafts are counted: as chains, as trees whose best tokens come first, or as wholes
    observes    whether it wants to be told of every step's outcomes
    tap_layers  layers of the model whose inputs it reads, low to high; (): the hidden state after the final norm; None: none
    """

    record: type[AcceptanceRecord] = AcceptanceRecord
    observes: bool = False
    tap_layers: tuple[int, ...] | None = None

    def apply(self, plan: StepPlan) -> None:
        """Take in a step's plan before anything is computed; of interest to who keeps something in blocks."""
        return

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Take in what a step computed, before the looks that follow it. Called only if `observes`."""
        return

    def feed(self, sequence: DraftedSequence, first: int, features: Tensor) -> None:
        """Take in what the model computed in a step of the tokens at [first, first + N) of a sequence, of accepted ones alone.

        features  [N, F] f32 what `tap_layers` says. Called after the step, before the look; the tokens that follow are known
                  then, but for those of a sequence that failed. Prefixes that were cached are not computed, and not fed
        """
        return

    @abstractmethod
    def look(self, sequence: DraftedSequence, limit: int) -> int:
        """Return how many tokens it could draft now, at most `limit`; called when a sequence has got its tokens of a step."""

    @abstractmethod
    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """Return a draft for each sequence, of at most so many tokens; its known tokens are those of the last look."""

    def release(self, sequence: DraftedSequence) -> None:
        """Forget a sequence that ended or was preempted; its memo goes with it."""
        return
