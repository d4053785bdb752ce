"""Head proposer: a layer that reads what the model has computed drafts ahead (EAGLE, multi-token prediction).

At the place of token i it reads the model's features there and the token i + 1, which it keeps as keys and values in a pool of
its own under the target's block ids. Behind the last features it reads what it said itself; these places are computed again
when the model's own features of them are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import StepPlan
from quire.kernels.reference.attention import AttentionInput
from quire.kv.pool import KvPool
from quire.model.heads.build import HeadModel
from quire.model.heads.head_spec import LayerHead
from quire.sampling.drafting import draw_drafts
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.filled_blocks import FilledBlocks
from quire.speculate.proposer import Proposer

_MAX_PENDING = 256
"""Places of a sequence whose features wait to be read: while nothing is drafted the oldest are forgotten, so that a long prompt
or a long sleep costs little."""


@dataclass(slots=True)
class _Memo:
    """Places [start, done) are read, and [done, ...) wait: `waiting` are their features, in runs, num_waiting of them."""

    start: int
    done: int
    waiting: list[Tensor]
    num_waiting: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """The places that a pass computes, of all sequences one after the other."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInput
    features: Tensor


class HeadProposer(Proposer):
    """Drafts by a head, a token a pass, all sequences together.

    kv       the pool, of as many blocks as the target's
    max_len  tokens that a sequence may have for it
    """

    def __init__(self, model: HeadModel, head: LayerHead, kv: KvPool, max_len: int) -> None:
        self.tap_layers: tuple[int, ...] | None = head.tap_layers
        self._model, self._kv, self._max_len = model, kv, max_len
        self._vocabulary = None if head.vocabulary is None else head.vocabulary.long()
        self._vocab_size = head.body.vocab_size if head.vocabulary is None else int(head.vocabulary.max()) + 1
        self._block_size = kv.spec.block_size
        self._filled = FilledBlocks(kv.num_blocks, self._block_size)

    def apply(self, plan: StepPlan) -> None:
        """See Proposer."""
        self._filled.apply(plan)
        if plan.block_copies:
            self._kv.copy_blocks(plan.block_copies)

    def feed(self, sequence: DraftedSequence, first: int, features: Tensor) -> None:
        """See Proposer."""
        memo: _Memo | None = sequence.memo
        if memo is None or memo.done + memo.num_waiting != first:
            start, done = self._filled.run_before(sequence.table, first)
            memo = sequence.memo = _Memo(start, done, [], 0)
            if done < first:
                # Places that nobody read, the last of a block or those up to here in this one: the nearest features do.
                memo.waiting.append(features[:1].expand(first - done, -1))
                memo.num_waiting = first - done
        memo.waiting.append(features)
        memo.num_waiting += len(features)
        if memo.num_waiting > 2 * _MAX_PENDING:
            # Half is kept, from the start of a block: the memory of a long sleep is bounded, and copied seldom.
            end = memo.done + memo.num_waiting
            memo.start = memo.done = -(-(end - _MAX_PENDING) // self._block_size) * self._block_size
            memo.waiting = [torch.cat(memo.waiting)[memo.done - end :].clone()]
            memo.num_waiting = end - memo.done

    def look(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        memo: _Memo | None = sequence.memo
        length = len(sequence.token_ids)
        if memo is None or memo.done + memo.num_waiting != length - 1:
            return 0
        return max(0, min(limit, self._max_len - length))

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        sequences = [sequence for sequence, _ in wanted]
        counts = [count for _, count in wanted]
        first = self._first_pass(sequences, counts)
        if all(sequence.sampling.is_greedy for sequence in sequences):
            drafted = self._model.draft(first.token_ids, first.positions, first.attention, self._kv, first.features, counts)
        else:
            drafted = self._draw(sequences, counts, first)
        for sequence in sequences:
            memo: _Memo = sequence.memo
            end = memo.done + memo.num_waiting
            self._filled.note(sequence.table, memo.done, end)
            sequence.memo = _Memo(memo.start, end, [], 0)
        return [Draft.chain(tuple(tokens)) for tokens in drafted]

    def _first_pass(self, sequences: list[DraftedSequence], counts: list[int]) -> _Pass:
        """Return the places that wait; tables begin where a sequence's read places do, with room for its drafts."""
        size = self._block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths = [0], []
        runs: list[Tensor] = []
        tables: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        for sequence, count in zip(sequences, counts, strict=True):
            memo: _Memo = sequence.memo
            end = memo.done + memo.num_waiting
            token_ids += sequence.token_ids[memo.done + 1 : end + 1]
            positions += range(memo.done, end)
            table = sequence.table[memo.start // size : -(-(end + count - 1) // size)]
            slots += [int(table[(at - memo.start) // size]) * size + at % size for at in range(memo.done, end)]
            starts.append(len(token_ids))
            lengths.append(end - memo.start)
            runs += memo.waiting
            tables.append(table)
        width = max(map(len, tables))
        block_tables = np.zeros((len(tables), width), dtype=np.int64)
        for row, table in enumerate(tables):
            block_tables[row, : len(table)] = table
        attention = AttentionInput(_tensor(slots), starts, lengths, torch.from_numpy(block_tables))
        features = runs[0] if len(runs) == 1 else torch.cat(runs)
        return _Pass(_tensor(token_ids), _tensor(positions), attention, features.contiguous())

    def _draw(self, sequences: list[DraftedSequence], counts: list[int], first: _Pass) -> list[list[int]]:
        """Draft with the noise that the verifier will use, a pass at a time."""
        found: list[list[int]] = [[] for _ in sequences]
        step, features, token_ids, positions = first.attention, first.features, first.token_ids, first.positions
        rows = [start - 1 for start in step.query_starts[1:]]
        going = list(range(len(sequences)))
        size = self._block_size
        while True:
            logits = self._widen(self._model.enter(token_ids, positions, step, self._kv, features, rows))
            places = [len(sequences[index].token_ids) + len(found[index]) for index in going]
            drawn = draw_drafts(logits, [sequences[index].sampling for index in going], places)
            for index, token_id in zip(going, drawn, strict=True):
                found[index].append(token_id)
            kept = [row for row, index in enumerate(going) if len(found[index]) < counts[index]]
            if not kept:
                return found
            features = self._model.recycled(len(going))[kept].contiguous()
            going = [going[row] for row in kept]
            ends = [len(sequences[index].token_ids) - 1 + len(found[index]) - 1 for index in going]
            token_ids, positions = _tensor([found[index][-1] for index in going]), _tensor(ends)
            slots = [int(sequences[i].table[end // size]) * size + end % size for i, end in zip(going, ends, strict=True)]
            lengths = [end + 1 - sequences[index].memo.start for index, end in zip(going, ends, strict=True)]
            rows = list(range(len(going)))
            tables = first.attention.block_tables[torch.tensor(going)]
            step = AttentionInput(_tensor(slots), list(range(len(going) + 1)), lengths, tables)

    def _widen(self, logits: Tensor) -> Tensor:
        """Return logits of the target's tokens; those that the head cannot say are out of the question."""
        if self._vocabulary is None:
            return logits
        wide = torch.full((len(logits), self._vocab_size), -torch.inf, dtype=logits.dtype)
        wide[:, self._vocabulary] = logits
        return wide


def _tensor(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
