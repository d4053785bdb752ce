"""Head proposer: a layer that reads what the model has computed drafts ahead (EAGLE, multi-token prediction).

At the place of token i it reads the model's features there and the token i + 1, which it keeps as keys and values in a pool of
its own under the target's block ids. Behind the last features it reads what it said itself; these places are computed again
when the model's own features of them are known.
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
from quire.speculate.chain_drafter import BlockCache, ChainOrder, HeadDrafter
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.features import FeatureRun, join
from quire.speculate.filled_blocks import FilledBlocks
from quire.speculate.head_pass import HeadPass, index_tensor
from quire.speculate.head_trees import HeadTrees
from quire.speculate.proposer import Proposer, num_beyond_a_step
from quire.speculate.records import TreeRecord

_is_greedy = attrgetter("sampling.is_greedy")
MAX_PENDING = 256
"""Places of a sequence whose features wait to be read: while nothing is drafted the oldest are forgotten, so that a long prompt
or a long sleep costs little."""


@dataclass(slots=True)
class _Memo:
    """Places [start, done) are read, and [done, ...) wait: `waiting` are their features, num_waiting of them.

    address  of the sequence's block table
    """

    start: int
    done: int
    waiting: list[FeatureRun]
    num_waiting: int
    address: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What drafts look like.

    top_k      tokens that are tried behind each; 1: a chain
    depth      levels of a tree, or tokens of a chain, at most
    min_share  a greedy chain ends before the first token with which all of it is less likely, as the head says
    """

    top_k: int = 1
    depth: int = 64
    min_share: float = 0.0


class HeadProposer(Proposer):
    """Drafts by a head, all sequences together: chains, a token a pass, or trees, a level a pass.

    model    the head, by the CPU's kernels, or where it is
    kv       the pool, of as many blocks as the target's
    max_len  tokens that a sequence may have for it
    """

    def __init__(
        self, model: HeadModel | HeadDrafter, head: LayerHead, kv: BlockCache, max_len: int, shape: Shape | None = None
    ) -> None:
        shape = shape or Shape()
        top_k, depth = shape.top_k, shape.depth
        self._min_share = shape.min_share if top_k == 1 else 0.0
        self.stops_early = self._min_share > 0
        self.leaves_out = isinstance(model, HeadDrafter)
        self.aux_hidden_state_layers: tuple[int, ...] | None = head.aux_hidden_state_layers
        self._model, self._kv, self._max_len = model, kv, max_len
        self.pools = (kv,) if isinstance(kv, KvPool) else ()
        # Asked once: to hold a model against a protocol takes as long as a draft of a small head.
        self._drafter = model if isinstance(model, HeadDrafter) else None
        self._vocabulary = None if head.vocabulary is None else head.vocabulary.long()
        self._vocab_size = head.body.vocab_size if head.vocabulary is None else int(head.vocabulary.max()) + 1
        self._block_size = kv.spec.block_size
        self._filled = FilledBlocks(kv)
        said = None if self._drafter is not None else self._vocabulary  # whose logits are the target's tokens'
        self._trees = HeadTrees(model, kv, said, top_k, depth) if top_k > 1 else None
        self._most = depth if self._trees is None else self._trees.max_tokens
        if self._trees is not None:
            self.record = TreeRecord

    def apply(self, plan: StepPlan) -> None:
        """See Proposer."""
        self._filled.apply(plan)

    def on_hidden_states(self, fed: Sequence[tuple[DraftedSequence, int, int]], features: Tensor) -> None:
        """See Proposer."""
        if self._drafter is not None:
            features = self._drafter.narrow(features)
        row = 0
        for sequence, first, count in fed:
            self._take_in(sequence, first, FeatureRun(features, row, count))
            row += count

    def _take_in(self, sequence: DraftedSequence, first: int, run: FeatureRun) -> None:
        if len(sequence.token_ids) >= self._max_len:
            sequence.memo = None  # nothing is drafted behind so many tokens: what waited would do so for ever
            return
        memo: _Memo | None = sequence.memo
        if memo is None or memo.done + memo.num_waiting != first:
            start, done = self._filled.run_before(sequence.table, first)
            memo = sequence.memo = _Memo(start, done, [], 0, address_of(sequence.table))
            if done < first:
                # Places that nobody read, the last of a block or those up to here in this one: the nearest features do.
                nearest = run.features[run.first : run.first + 1].clone().expand(first - done, -1)
                memo.waiting.append(FeatureRun(nearest, 0, first - done))
                memo.num_waiting = first - done
        elif memo.waiting:
            # What was not read in the step after its own may wait for long, and would keep all that others computed there.
            memo.waiting[-1] = memo.waiting[-1].kept()
        memo.waiting.append(run)
        memo.num_waiting += run.count
        if memo.num_waiting > 2 * MAX_PENDING:
            self._forget_oldest(memo)

    def _forget_oldest(self, memo: _Memo) -> None:
        """Keep half of what waits, from the start of a block: the memory of a long sleep is bounded, and copied seldom.

        At least the last place is kept: of a block that is longer than half, all of it.
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
        if self._drafter is not None:
            rows, lengths = [one.sampling for one in sequences], [len(one.token_ids) for one in sequences]
            order = ChainOrder(runs, origins, counts, rows, lengths, self._min_share)
            return self._drafter.draft_chains(order, features[: runs.starts[-1]])
        model = self._model
        if all(map(_is_greedy, sequences)):
            return model.draft(runs, origins, self._kv, features, counts, self._min_share)
        return self._draw(model, sequences, counts, self._first_pass(runs, origins, counts, features))

    def _first_pass(self, runs: TokenRuns, origins: list[int], counts: list[int], features: Tensor) -> HeadPass:
        return HeadPass(*runs.tensors(self._block_size, origins, counts), features[: runs.starts[-1]].contiguous())

    def _draw(self, model: HeadModel, sequences: list[DraftedSequence], counts: list[int], first: HeadPass) -> list[list[int]]:
        """Draft with the noise that the verifier will use, a pass at a time."""
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
        """Return logits of the target's tokens; those that the head cannot say are out of the question."""
        if self._vocabulary is None:
            return logits
        wide = torch.full((len(logits), self._vocab_size), -torch.inf, dtype=logits.dtype)
        wide[:, self._vocabulary] = logits
        return wide


def _waiting(sequences: Sequence[DraftedSequence]) -> tuple[TokenRuns, list[int], Tensor]:
    """Return the places that wait, of all sequences one after the other, from where on these are seen, and the features of the
    places, which may be more rows."""
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
