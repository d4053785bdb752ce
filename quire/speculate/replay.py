"""Replay proposer: drafts of a forced share of right tokens, to measure what speculation costs and gains at any acceptance."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.proposer import Proposer

Outputs = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt -> the tokens that plain decoding gave."""


class ReplayProposer(Proposer):
    """Drafts what plain decoding gave, each token right with probability `share`; what is behind a wrong one does not matter.

    outputs  of prompts that have one choice
    """

    def __init__(self, outputs: Outputs, share: float, vocab_size: int, seed: int = 0) -> None:
        self._outputs, self._share, self._vocab_size = outputs, share, vocab_size
        self._random = random.Random(seed)

    def look(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        num_done = len(sequence.token_ids) - sequence.num_prompt_tokens
        tokens = self._outputs[sequence.request.prompt_token_ids][num_done : num_done + limit]
        sequence.memo = tuple(
            token_id if self._random.random() < self._share else (token_id + 1) % self._vocab_size for token_id in tokens
        )
        return len(sequence.memo)

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        return [Draft.chain(sequence.memo[:limit]) for sequence, limit in wanted]
