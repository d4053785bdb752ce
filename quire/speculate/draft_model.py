"""Draft-model proposer: a smaller model with the same vocabulary writes ahead (Leviathan et al., arXiv 2211.17192).

Its keys and values lie in a pool of its own under the block ids of the target's: prefixes, forks and copies are the same for
both. What it holds of a block is a function of the tokens up to there alone: whoever needs it may fill it in, even where
the block is shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.contracts.step import StepPlan
from quire.kernels.reference.attention import AttentionInput
from quire.kv.pool import KvPool
from quire.model.build import Model
from quire.model.native_decoder import NativeDecoder
from quire.model.native_steps import OneTokenSteps
from quire.sampling.drafting import DraftDraws, draw_drafts
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.filled_blocks import FilledBlocks
from quire.speculate.proposer import Proposer

_MAX_CATCH_UP = 512
"""Known tokens of one sequence that are computed in a step at most, before it is drafted."""


@dataclass(slots=True)
class _Memo:
    """num_done: known tokens whose KV is there; ahead: drafts behind the known tokens of then whose KV is there too."""

    num_done: int
    ahead_from: int = 0
    ahead: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class _Feed:
    """Tokens of one sequence for one forward pass, the first at position `first`."""

    sequence: DraftedSequence
    tokens: list[int]
    first: int


class DraftModelProposer(Proposer):
    """Drafts by a model, a token a pass, all sequences together.

    kv       the pool, of as many blocks as the target's
    max_len  tokens that a sequence may have for it
    """

    def __init__(self, model: Model, kv: KvPool, max_len: int) -> None:
        self._model, self._kv, self._max_len = model, kv, max_len
        self._block_size = kv.spec.block_size
        self._filled = FilledBlocks(kv.num_blocks, self._block_size)

    def apply(self, plan: StepPlan) -> None:
        """See Proposer."""
        self._filled.apply(plan)
        if plan.block_copies:
            self._kv.copy_blocks(plan.block_copies)

    def look(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        return max(0, min(limit, self._max_len - len(sequence.token_ids)))

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer. A sequence far behind is brought nearer first, and gets no draft."""
        drafts: list[list[int]] = [[] for _ in wanted]
        feeds: list[_Feed] = []
        going: list[int] = []
        for index, (sequence, _) in enumerate(wanted):
            first = self._note_accepted(sequence)
            tokens = sequence.token_ids[first : first + _MAX_CATCH_UP]
            feeds.append(_Feed(sequence, tokens, first))
            if first + len(tokens) == len(sequence.token_ids):
                going.append(index)
        if any(len(feed.tokens) > 1 for feed in feeds):
            found = self._catch_up(feeds, going)
            for index, token_id in zip(going, found, strict=True):
                drafts[index].append(token_id)
        while going := [index for index in going if len(drafts[index]) < wanted[index][1]]:
            num_steps = min(wanted[index][1] - len(drafts[index]) for index in going)
            self._draft_on([(wanted[index][0], drafts[index]) for index in going], num_steps)
        return [Draft.chain(tuple(tokens)) for tokens in drafts]

    def _catch_up(self, feeds: list[_Feed], going: list[int]) -> list[int]:
        """Compute the known tokens of all, and return the first drafts of those whose last one was among them."""
        logits = self._forward(feeds, going)
        for feed in feeds:
            self._note_done(feed.sequence, feed.first + len(feed.tokens))
        rows = [feeds[index].sequence for index in going]
        return draw_drafts(logits, [row.sampling for row in rows], [len(row.token_ids) for row in rows]) if rows else []

    def _draft_on(self, rows: list[tuple[DraftedSequence, list[int]]], num_steps: int) -> None:
        """Draft num_steps more tokens of each row behind its known ones and its drafts; the last of these has no KV yet."""
        sequences = [sequence for sequence, _ in rows]
        firsts = [len(sequence.token_ids) + len(tokens) - 1 for sequence, tokens in rows]
        run = self._stepper(sequences, firsts, num_steps)
        draws = DraftDraws([sequence.sampling for sequence in sequences], [first + 1 for first in firsts])
        for _ in range(num_steps):
            last = [tokens[-1] if tokens else sequence.token_ids[-1] for sequence, tokens in rows]
            found = draws.draw(run(last))
            for (sequence, tokens), fed, token_id in zip(rows, last, found, strict=True):
                if tokens:
                    sequence.memo.ahead.append(fed)
                else:
                    self._note_done(sequence, len(sequence.token_ids))
                tokens.append(token_id)

    def _stepper(
        self, sequences: list[DraftedSequence], firsts: list[int], num_steps: int
    ) -> Callable[[Sequence[int]], torch.Tensor]:
        """Return what computes a token of each sequence, from the positions `firsts` on, and returns the logits behind them."""
        if isinstance(self._model, NativeDecoder):
            tables = np.stack([sequence.table for sequence in sequences])
            return OneTokenSteps(self._model, self._kv, firsts, tables, num_steps).run
        offsets = itertools.count()

        def run(token_ids: Sequence[int]) -> torch.Tensor:
            offset = next(offsets)
            fed = zip(sequences, token_ids, firsts, strict=True)
            return self._forward([_Feed(one, [token_id], first + offset) for one, token_id, first in fed], range(len(firsts)))

        return run

    def _note_accepted(self, sequence: DraftedSequence) -> int:
        """Return the position of the first known token to compute; at least the last one is."""
        tokens, memo = sequence.token_ids, sequence.memo
        if memo is None:
            memo = sequence.memo = _Memo(self._num_held(sequence))
        done, last = memo.num_done, len(tokens) - 1
        for position, token_id in enumerate(memo.ahead, start=memo.ahead_from):
            if position != done or done >= last or tokens[done] != token_id:
                break
            done += 1
        self._note_done(sequence, min(done, last))
        return memo.num_done

    def _num_held(self, sequence: DraftedSequence) -> int:
        """Return how many tokens the blocks hold from the start without a gap."""
        total, size = 0, self._block_size
        for block_id in sequence.table[: -(-len(sequence.token_ids) // size)].tolist():
            filled = int(self._filled.counts[block_id])
            total += filled
            if filled < size:
                break
        return min(total, len(sequence.token_ids) - 1)

    def _note_done(self, sequence: DraftedSequence, num_done: int) -> None:
        memo: _Memo = sequence.memo
        size, filled = self._block_size, self._filled.counts
        for index in range(memo.num_done // size, -(-num_done // size)):
            block_id = sequence.table[index]
            filled[block_id] = max(filled[block_id], min(size, num_done - index * size))
        memo.num_done, memo.ahead_from, memo.ahead = num_done, num_done, []

    def _forward(self, feeds: list[_Feed], wanted: Sequence[int]) -> torch.Tensor:
        """Compute tokens; return the logits behind the last one of each feed in `wanted`."""
        starts = [0]
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self._block_size
        for feed in feeds:
            token_ids += feed.tokens
            for position in range(feed.first, feed.first + len(feed.tokens)):
                positions.append(position)
                slots.append(int(feed.sequence.table[position // size]) * size + position % size)
            starts.append(len(token_ids))
        lengths = [feed.first + len(feed.tokens) for feed in feeds]
        num_blocks = -(-max(lengths) // size)
        tables = torch.from_numpy(np.stack([feed.sequence.table[:num_blocks] for feed in feeds]))
        attention = AttentionInput(torch.tensor(slots), starts, lengths, tables)
        rows = [starts[index + 1] - 1 for index in wanted]
        return self._model.step(torch.tensor(token_ids), torch.tensor(positions), attention, self._kv, rows)
