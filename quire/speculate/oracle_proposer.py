"""Oracle proposer: drafts tokens that are right with a given probability, to measure the cost and gain of speculation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from torch import Tensor

from quire.contracts.step import StepPlan
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.proposer import DraftInput, Outcome, Proposer

Outputs = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt -> the tokens that plain decoding generated."""


class OracleProposer(Proposer):
    """Drafts the tokens of plain decoding, each replaced by a wrong one with probability 1 - `share`.

    outputs  for prompts with one choice
    drafter  a proposer that drafts too, so that a step has its costs: all tokens that it drafts are replaced, those of a tree
             by a chain. A draft model computes its tokens again, as if they had been rejected
    """

    def __init__(self, outputs: Outputs, share: float, vocab_size: int, drafter: Proposer | None = None, seed: int = 0) -> None:
        self._outputs, self._share, self._vocab_size, self._drafter = outputs, share, vocab_size, drafter
        self._random = random.Random(seed)
        if drafter is not None:
            self.wants_logits, self.aux_hidden_state_layers = drafter.wants_logits, drafter.aux_hidden_state_layers
            self.stops_early, self.pools = drafter.stops_early, drafter.pools

    def _replay(self, sequence: DraftedSequence, count: int) -> Draft:
        num_done = len(sequence.token_ids) - sequence.num_prompt_tokens
        tokens = self._outputs[sequence.request.prompt_token_ids][num_done : num_done + count]
        share, size = self._share, self._vocab_size
        return Draft(tuple(token if self._random.random() < share else (token + 1) % size for token in tokens))

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        if self._drafter is not None:
            return self._drafter.num_available(sequence, limit)
        num_done = len(sequence.token_ids) - sequence.num_prompt_tokens
        return min(limit, max(0, len(self._outputs[sequence.request.prompt_token_ids]) - num_done))

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        if self._drafter is None:
            return [self._replay(sequence, limit) for sequence, limit in wanted]
        drafts = self._drafter.propose(wanted)
        self.num_caught_up = self._drafter.num_caught_up
        return [self._replay(sequence, len(draft)) for (sequence, _), draft in zip(wanted, drafts, strict=True)]

    def apply(self, plan: StepPlan) -> None:
        """See Proposer."""
        if self._drafter is not None:
            self._drafter.apply(plan)

    def on_logits(self, outcomes: Sequence[Outcome]) -> None:
        """See Proposer."""
        if self._drafter is not None:
            self._drafter.on_logits(outcomes)

    @property
    def inputs(self) -> tuple[DraftInput, ...]:
        """See Proposer."""
        return () if self._drafter is None else self._drafter.inputs

    def on_step_states(self, what: DraftInput, fed: Sequence[tuple[DraftedSequence, int, int]], features: Tensor) -> None:
        """See Proposer."""
        if self._drafter is not None:
            self._drafter.on_step_states(what, fed, features)

    def forget_blocks(self) -> None:
        """See Proposer."""
        if self._drafter is not None:
            self._drafter.forget_blocks()

    def release(self, sequence: DraftedSequence) -> None:
        """See Proposer."""
        if self._drafter is not None:
            self._drafter.release(sequence)
