"""Proposer: the interface of drafting methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from quire.contracts.step import StepPlan
from quire.kv.pool import KvPool
from quire.speculate.acceptance import AcceptanceRecord
from quire.speculate.draft import Draft, DraftedSequence

DraftInput = Literal["layers", "final", "last"]
"""Model states that a proposer reads: layer inputs, hidden states after the final norm, or the last of these per sequence."""
_MOST_OF_A_STEP = 16
"""Maximum number of new tokens, mostly accepted drafts, of a sequence with which a proposer has kept up."""


def num_beyond_a_step(num_tokens: int) -> int:
    """Return how many of num_tokens tokens that are computed before a draft are catch-up work: more than one step yields."""
    return 0 if num_tokens <= _MOST_OF_A_STEP else num_tokens - 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step computed for a sequence whose draft it verified; the tokens that it yielded are already appended.

    draft   the verified draft
    path    indices of the accepted drafts, in order; one more token, the last, was sampled
    rows    1 + len(draft) rows of step_logits: after the previously last known token, and after each draft
    """

    sequence: DraftedSequence
    draft: Draft
    path: tuple[int, ...]
    step_logits: Tensor
    rows: tuple[int, ...]

    @property
    def logits(self) -> Tensor:
        """The rows of logits [1 + len(draft), vocab_size]; valid until the next step."""
        return self.step_logits[list(self.rows)]


class Proposer(ABC):
    """Drafts tokens. The quality of drafts affects speed only, never which tokens are generated.

    record         statistics of its drafts: as chains, as trees with the best tokens first, or as wholes
    wants_logits   whether `on_logits` is called after every step
    aux_hidden_state_layers
                   ascending layers of the model whose inputs it reads; (): the hidden state after the final norm; None: none
    stops_early    whether it may draft fewer tokens than requested
    inputs_last_only   whether it reads only the state of each sequence's last accepted token
    pools          its own KV pools on the CPU, whose blocks have the target's ids
    num_caught_up  tokens that the last call of `propose` computed beyond those of one step: of prompts or of skipped steps
    """

    record: type[AcceptanceRecord] = AcceptanceRecord
    wants_logits: bool = False
    aux_hidden_state_layers: tuple[int, ...] | None = None
    inputs_last_only: bool = False
    stops_early: bool = False
    pools: Sequence[KvPool] = ()
    num_caught_up: int = 0

    @property
    def inputs(self) -> tuple[DraftInput, ...]:
        """The model states that it reads of a step; usually one kind, or none."""
        if self.aux_hidden_state_layers is None:
            return ()
        if self.inputs_last_only:
            return ("last",)
        return ("layers",) if self.aux_hidden_state_layers else ("final",)

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan that allocates or copies blocks, before anything of its step is computed."""
        return

    def on_logits(self, outcomes: Sequence[Outcome]) -> None:
        """Process the logits of a step, before the calls of num_available after it. Called only if `wants_logits`."""
        return

    def on_step_states(self, what: DraftInput, fed: Sequence[tuple[DraftedSequence, int, int]], features: Tensor) -> None:
        """Process `what` of a step, which is one of `inputs`; see on_hidden_states."""
        self.on_hidden_states(fed, features)

    def on_hidden_states(self, fed: Sequence[tuple[DraftedSequence, int, int]], features: Tensor) -> None:
        """Process the hidden states of the known tokens that a step computed, of several sequences. Rejected drafts are
        excluded.

        fed       sequence, position of the first token, and number of tokens, in the order of `features`; only the last token
                  of sequences that got tokens, if `inputs_last_only`
        features  [R, F] f32, as `aux_hidden_state_layers` says. Called after the step and before num_available, when the next
                  tokens are known, except of a sequence that failed. Tokens of cached prefixes are not computed, and not fed
        """
        return

    @abstractmethod
    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """Return how many tokens it could draft now, at most `limit`; called after a sequence has got the tokens of a step."""

    @abstractmethod
    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """Return a draft for each sequence, of at most so many tokens. No token was added since the last `num_available`."""

    def forget_blocks(self) -> None:
        """Forget the contents of all blocks: the proposer will not see the plans of some steps."""
        return

    def release(self, sequence: DraftedSequence) -> None:
        """Release a sequence that ended or was preempted; its memo is discarded."""
        return
