"""Head proposer: drafts with a layer that reads the model's hidden states (EAGLE, multi-token prediction).

At position i the head reads the model's features of token i and the token i + 1. It stores their keys and values in its own
pool under the target's block ids. After the last known features it reads its own outputs; these positions are computed again
when the model's features of them are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from quire.contracts.step import StepPlan
from quire.kernels.reference.attention import AttentionMetadata
from quire.kv.pool import KvPool
from quire.model.heads.build import HeadModel
from quire.model.heads.head_spec import LayerHead
from quire.model.token_runs import BlockTable, TokenRuns, address_of
from quire.sampling.drafting import draw_drafts
from quire.speculate.acceptance import TreeRecord
from quire.speculate.chain_drafter import BlockCache, ChainOrder, HeadDrafter
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.features import FeatureRun, join
from quire.speculate.filled_blocks import FilledBlocks
from quire.speculate.head_pass import HeadPass, index_tensor
from quire.speculate.head_trees import HeadTrees
from quire.speculate.proposer import Proposer, num_beyond_a_step

_is_greedy = attrgetter("sampling.is_greedy")
MAX_PENDING = 256
"""Positions of a sequence whose features may be pending. While nothing is drafted the oldest are dropped, so that a long prompt
or a long time without drafts costs little."""


@dataclass(slots=True)
class _Memo:
    """Positions [start, done) are computed; those from `done` on are pending: `waiting` holds their num_waiting features.

    address  of the sequence's block table
    """

    start: int
    done: int
    waiting: list[FeatureRun]
    num_waiting: int
    address: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the drafts.

    top_k      tokens tried after each token; 1: a chain
    depth      maximum number of levels of a tree, or of tokens of a chain
    p_min      a greedy chain ends before the first token at which the head's probability of the whole chain is lower
    """

    top_k: int = 1
    depth: int = 64
    p_min: float = 0.0


class HeadProposer(Proposer):
    """Drafts with a head, for all sequences together: chains, one token per pass, or trees, one level per pass.

    model    the head, run by the CPU kernels or on its device
    kv       a pool with as many blocks as the target's
    max_len  maximum number of tokens of a sequence
    """

    def __init__(
        self, model: HeadModel | HeadDrafter, head: LayerHead, kv: BlockCache, max_len: int, shape: Shape | None = None
    ) -> None:
        shape = shape or Shape()
        top_k, depth = shape.top_k, shape.depth
        self._p_min = shape.p_min if top_k == 1 else 0.0
        self.stops_early = self._p_min > 0
        self.aux_hidden_state_layers: tuple[int, ...] | None = head.aux_hidden_state_layers
        self.model, self._kv, self._max_len = model, kv, max_len
        self.pools = (kv,) if isinstance(kv, KvPool) else ()
        # Cached, because isinstance against a protocol takes as long as a draft of a small head.
        self.drafter = model if isinstance(model, HeadDrafter) else None
        self._vocabulary = None if head.vocabulary is None else head.vocabulary.long()
        self._vocab_size = head.body.vocab_size if head.vocabulary is None else int(head.vocabulary.max()) + 1
        self._block_size = kv.spec.block_size
        self._filled = FilledBlocks(kv)
        vocabulary = None if self.drafter is not None else self._vocabulary  # a HeadDrafter's logits cover the target's tokens
        self._trees = HeadTrees(model, kv, vocabulary, top_k, depth) if top_k > 1 else None
        self._most = depth if self._trees is None else self._trees.max_tokens
        if self._trees is not None:
            self.record = TreeRecord

    def apply(self, plan: StepPlan) -> None:
        """See Proposer."""
        self._filled.apply(plan)

    def on_hidden_states(self, fed: Sequence[tuple[DraftedSequence, int, int]], features: Tensor) -> None:
        """See Proposer."""
        if self.drafter is not None:
            features = self.drafter.fuse_features(features)
        row = 0
        for sequence, first, count in fed:
            self.take_in(sequence, first, FeatureRun(features, row, count))
            row += count

    def take_in(self, sequence: DraftedSequence, first: int, run: FeatureRun) -> None:
        """Keep the features of the tokens from `first` on until the head reads them."""
        if len(sequence.token_ids) >= self._max_len:
            sequence.memo = None  # nothing is drafted beyond max_len, so the pending features would be kept forever
            return
        memo: _Memo | None = sequence.memo
        if memo is None or memo.done + memo.num_waiting != first:
            start, done = self._filled.run_before(sequence.table, first)
            memo = sequence.memo = _Memo(start, done, [], 0, address_of(sequence.table))
            if done < first:
                # Positions that were never fed, the last of a block or those before `first` in it: use the nearest features.
                nearest = run.features[run.first : run.first + 1].clone().expand(first - done, -1)
                memo.waiting.append(FeatureRun(nearest, 0, first - done))
                memo.num_waiting = first - done
        elif memo.waiting:
            # Features not read in the step after their own may stay long; release those of other sequences in the tensor.
            memo.waiting[-1] = memo.waiting[-1].kept()
        memo.waiting.append(run)
        memo.num_waiting += run.count
        if memo.num_waiting > 2 * MAX_PENDING:
            self._forget_oldest(memo)

    def _forget_oldest(self, memo: _Memo) -> None:
        """Keep about half of the pending features, from the start of a block, to bound the memory; copies are rare this way.

        At least the last position is kept: all of its block, if a block is longer than half.
        """
        end, size = memo.done + memo.num_waiting, self._block_size
        first = min(-(-(end - MAX_PENDING) // size) * size, (end - 1) // size * size)
        if first > memo.done:
            memo.start = memo.done = first
            memo.num_waiting = end - first
            memo.waiting = [FeatureRun(join(memo.waiting)[-memo.num_waiting :].clone(), 0, memo.num_waiting)]

    def forget_blocks(self) -> None:
        """See Proposer."""
        self._filled.clear()

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        memo: _Memo | None = sequence.memo
        length = len(sequence.token_ids)
        if memo is None or memo.done + memo.num_waiting != length - 1:
            return 0
        return max(0, min(limit, self._most, self._max_len - length))

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        sequences: list[DraftedSequence] = []
        counts: list[int] = []
        for sequence, count in wanted:
            sequences.append(sequence)
            counts.append(count)
        runs, origins, features = _waiting(sequences)
        drafts: list[Draft] = []
        if self._trees is not None:
            first = self._first_pass(runs, origins, counts, features)
            drafts = self._trees.draft(sequences, counts, first)
        else:
            for tokens in self._draft_chains(sequences, origins, counts, runs, features):
                drafts.append(Draft(tuple(tokens)))
        self.num_caught_up = 0
        for sequence, end in zip(sequences, runs.ends, strict=True):
            memo: _Memo = sequence.memo
            self.num_caught_up += num_beyond_a_step(memo.num_waiting)
            self._filled.note(sequence.table, memo.done, end)
            memo.done, memo.waiting, memo.num_waiting = end, [], 0
        return drafts

    def _draft_chains(
        self, sequences: list[DraftedSequence], origins: list[int], counts: list[int], runs: TokenRuns, features: Tensor
    ) -> list[list[int]]:
        if self.drafter is not None:
            rows, lengths = [one.sampling for one in sequences], [len(one.token_ids) for one in sequences]
            order = ChainOrder(runs, origins, counts, rows, lengths, self._p_min)
            return self.drafter.draft_chains(order, features[: runs.starts[-1]])
        model = self.model
        if all(map(_is_greedy, sequences)):
            return model.draft(runs, origins, self._kv, features, counts, self._p_min)
        return self._draw(model, sequences, counts, self._first_pass(runs, origins, counts, features))

    def _first_pass(self, runs: TokenRuns, origins: list[int], counts: list[int], features: Tensor) -> HeadPass:
        return HeadPass(*runs.tensors(self._block_size, origins, counts), features[: runs.starts[-1]].contiguous())

    def _draw(self, model: HeadModel, sequences: list[DraftedSequence], counts: list[int], first: HeadPass) -> list[list[int]]:
        """Draft with the noise that the verifier will use, one token per pass."""
        origins = [sequence.memo.start for sequence in sequences]
        step, features, token_ids, positions = first.attention, first.features, first.token_ids, first.positions
        found: list[list[int]] = [[] for _ in sequences]
        rows = [start - 1 for start in step.query_starts[1:]]
        going = list(range(len(sequences)))
        size = self._block_size
        while True:
            logits = self._widen(model.enter(token_ids, positions, step, self._kv, features, rows))
            places = [len(sequences[index].token_ids) + len(found[index]) for index in going]
            drawn = draw_drafts(logits, [sequences[index].sampling for index in going], places)
            for index, token_id in zip(going, drawn, strict=True):
                found[index].append(token_id)
            kept = [row for row, index in enumerate(going) if len(found[index]) < counts[index]]
            if not kept:
                return found
            features = model.recycled(len(going))[kept].contiguous()
            going = [going[row] for row in kept]
            ends = [len(sequences[index].token_ids) - 1 + len(found[index]) - 1 for index in going]
            token_ids, positions = index_tensor([found[index][-1] for index in going]), index_tensor(ends)
            slots = [int(sequences[i].table[end // size]) * size + end % size for i, end in zip(going, ends, strict=True)]
            lengths = [end + 1 - origins[index] for index, end in zip(going, ends, strict=True)]
            rows = list(range(len(going)))
            tables = first.attention.block_tables[torch.tensor(going)]
            step = AttentionMetadata(index_tensor(slots), list(range(len(going) + 1)), lengths, tables)

    def _widen(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary; tokens outside the head's vocabulary get -inf."""
        if self._vocabulary is None:
            return logits
        wide = torch.full((len(logits), self._vocab_size), -torch.inf, dtype=logits.dtype)
        wide[:, self._vocabulary] = logits
        return wide


def _waiting(sequences: Sequence[DraftedSequence]) -> tuple[TokenRuns, list[int], Tensor]:
    """Return the pending positions of all sequences, concatenated, the origin of each sequence, and the features of the
    positions, possibly followed by more rows."""
    token_ids: list[int] = []
    starts, ends, origins = [0], [], []
    waiting: list[FeatureRun] = []
    tables: list[BlockTable] = []
    addresses: list[int] = []
    for sequence in sequences:
        memo: _Memo = sequence.memo
        end = memo.done + memo.num_waiting
        token_ids += sequence.token_ids[memo.done + 1 : end + 1]
        starts.append(len(token_ids))
        ends.append(end)
        origins.append(memo.start)
        waiting += memo.waiting
        tables.append(sequence.table)
        addresses.append(memo.address)
    return TokenRuns(token_ids, starts, ends, tables, addresses), origins, join(waiting, may_go_on=True)
