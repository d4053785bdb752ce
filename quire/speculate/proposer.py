"""Proposer: what drafts tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from quire.contracts.step import StepPlan
from quire.kv.pool import KvPool
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.records import AcceptanceRecord

DraftInput = Literal["layers", "final", "last"]
"""What a proposer reads of a step: inputs of layers, hidden states after the final norm, or the last one of a sequence."""
_MOST_OF_A_STEP = 16
"""Tokens that it has to compute of a sequence which it has kept up with, accepted drafts mostly."""


def num_beyond_a_step(num_tokens: int) -> int:
    """Return how many of so many tokens, that are computed before a draft, a step does not bring."""
    return 0 if num_tokens <= _MOST_OF_A_STEP else num_tokens - 1


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

    record       how its drafts are counted: as chains, as trees whose best tokens come first, or as wholes
    wants_logits  whether it wants to be told of every step's outcomes
    aux_hidden_state_layers
                 layers of the model whose inputs it reads, low to high; (): the hidden state after the final norm; None: none
    stops_early  whether it may draft fewer tokens than it could
    leaves_out   of these: whether it computes all that it is asked for, and leaves the doubtful out afterwards, as on a GPU
    inputs_last_only   whether it reads only what stands at the last token of a step that a sequence keeps

    pools          those of its own whose blocks have the target's ids, on the CPU
    num_caught_up  tokens that the last call of `propose` computed beyond what a step brings: of prompts, or slept through
    """

    record: type[AcceptanceRecord] = AcceptanceRecord
    wants_logits: bool = False
    aux_hidden_state_layers: tuple[int, ...] | None = None
    inputs_last_only: bool = False
    stops_early: bool = False
    leaves_out: bool = False
    pools: Sequence[KvPool] = ()
    num_caught_up: int = 0

    @property
    def inputs(self) -> tuple[DraftInput, ...]:
        """What it reads of a step; mostly one thing, or none."""
        if self.aux_hidden_state_layers is None:
            return ()
        if self.inputs_last_only:
            return ("last",)
        return ("layers",) if self.aux_hidden_state_layers else ("final",)

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan that gives out blocks, or copies some, before anything of its step is computed."""
        return

    def on_logits(self, outcomes: Sequence[Outcome]) -> None:
        """Take in what a step computed, before the looks that follow it. Called only if `wants_logits`."""
        return

    def on_step_states(self, what: DraftInput, fed: Sequence[tuple[DraftedSequence, int, int]], features: Tensor) -> None:
        """Take in `what` of a step, which is one of `inputs`; see on_hidden_states."""
        self.on_hidden_states(fed, features)

    def on_hidden_states(self, fed: Sequence[tuple[DraftedSequence, int, int]], features: Tensor) -> None:
        """Take in what the model computed in a step of known tokens of several sequences, of accepted drafts alone.

        fed       sequence, position of the first token, and number of tokens, in the order of `features`; the last one alone
                  of sequences that got tokens, if `inputs_last_only`
        features  [R, F] f32 what `aux_hidden_state_layers` says. Called after the step, before num_available; the tokens
                  that follow are known then, but for those of a sequence that failed. Prefixes that were cached are not computed, and not fed
        """
        return

    @abstractmethod
    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """Return how many tokens it could draft now, at most `limit`; called when a sequence has got its tokens of a step."""

    @abstractmethod
    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """Return a draft for each sequence, of at most so many tokens; its known tokens are those of the last look."""

    def forget_blocks(self) -> None:
        """Forget what it keeps in blocks: plans will be left out that say what becomes of them."""
        return

    def release(self, sequence: DraftedSequence) -> None:
        """Forget a sequence that ended or was preempted; its memo goes with it."""
        return
