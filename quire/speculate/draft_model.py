"""Draft-model proposer: drafts with a smaller model of the same vocabulary (Leviathan et al., arXiv 2211.17192).

Its keys and values are stored in its own pool under the target's block ids, so prefixes, forks and copies are the same for
both. The contents of a block depend only on the tokens up to its end, so any sequence may fill it, even if the block is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.contracts.step import StepPlan
from quire.kv.pool import KvPool
from quire.model.native_decoder import NativeDecoder
from quire.model.native_steps import draft_greedily
from quire.model.token_runs import TokenRuns, address_of
from quire.sampling.drafting import draw_drafts
from quire.speculate.chain_drafter import ChainDrafter, ChainOrder
from quire.speculate.chains import Chain, extend_chains
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.filled_blocks import FilledBlocks
from quire.speculate.proposer import Proposer, num_beyond_a_step
from quire.speculate.target import Target

MAX_CATCH_UP = 512
"""Default maximum of known tokens of a sequence that are computed in a step before drafting."""


@dataclass(slots=True)
class _Memo:
    """Progress of the draft model in a sequence.

    num_done    known tokens whose KV is stored
    address     of the block table
    ahead_from  position of the first token of `ahead`
    ahead       drafts of the last pass whose KV is stored too
    """

    num_done: int
    address: int
    ahead_from: int = 0
    ahead: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class _Feed:
    """Tokens of one sequence for one forward pass, the first at position `first`."""

    sequence: DraftedSequence
    tokens: list[int]
    first: int


class DraftModelProposer(Proposer):
    """Drafts with a model, one token per pass, all sequences together.

    drafter       the model and a pool with as many blocks as the target's; or a drafter on a device
    max_len       maximum number of tokens of a sequence
    p_min         a greedy draft ends before the first token at which its whole probability is lower; not with torch on the CPU
    max_catch_up  maximum of known tokens of a sequence that are computed in a step before drafting
    """

    def __init__(
        self, drafter: Target | ChainDrafter, max_len: int, p_min: float = 0.0, max_catch_up: int = MAX_CATCH_UP
    ) -> None:
        self._p_min, self.stops_early = p_min, p_min > 0
        self.drafter, self._max_len, self._max_catch_up = drafter, max_len, max_catch_up
        self._block_size = drafter.kv.spec.block_size
        self._filled = FilledBlocks(drafter.kv)
        self.pools = (drafter.kv,) if isinstance(drafter.kv, KvPool) else ()

    def apply(self, plan: StepPlan) -> None:
        """See Proposer."""
        self._filled.apply(plan)

    def forget_blocks(self) -> None:
        """See Proposer."""
        self._filled.clear()

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        return max(0, min(limit, self._max_len - len(sequence.token_ids)))

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer. A sequence with more than max_catch_up tokens to compute gets no draft."""
        drafts: list[list[int]] = [[] for _ in wanted]
        feeds: list[_Feed] = []
        going: list[int] = []
        self.num_caught_up = 0
        for index, (sequence, _) in enumerate(wanted):
            first = self._note_accepted(sequence)
            tokens = sequence.token_ids[first : first + self._max_catch_up]
            self.num_caught_up += num_beyond_a_step(len(tokens))
            feeds.append(_Feed(sequence, tokens, first))
            if first + len(tokens) == len(sequence.token_ids):
                going.append(index)
        drafter = self.drafter
        if not isinstance(drafter, Target):
            goes_on = set(going)
            counts = [count if index in goes_on else 0 for index, (_, count) in enumerate(wanted)]
            return self._draft_there(drafter, feeds, counts)
        is_greedy = all(sequence.sampling.is_greedy for sequence, _ in wanted)
        model = drafter.model
        if isinstance(model, NativeDecoder) and is_greedy and len(going) == len(wanted):
            return self._draft_at_once(model, drafter.kv, feeds, [count for _, count in wanted])
        if any(len(feed.tokens) > 1 for feed in feeds):
            found = self._catch_up(drafter, feeds, going)
            for index, token_id in zip(going, found, strict=True):
                drafts[index].append(token_id)
        chains: list[Chain] = [(wanted[index][0], drafts[index], wanted[index][1]) for index in going]
        extend_chains(drafter, chains, note_fed=self._note_fed)
        return [Draft.chain(tuple(tokens)) for tokens in drafts]

    def _draft_there(self, drafter: ChainDrafter, feeds: list[_Feed], counts: list[int]) -> list[Draft]:
        runs, sequences = _runs(feeds), [feed.sequence for feed in feeds]
        rows = [sequence.sampling for sequence in sequences]
        lengths = [len(sequence.token_ids) for sequence in sequences]
        drafts = drafter.draft_chains(ChainOrder(runs, [0] * len(feeds), counts, rows, lengths, self._p_min))
        return self._take(feeds, runs, drafts, counts)

    def _draft_at_once(self, model: NativeDecoder, kv: KvPool, feeds: list[_Feed], counts: list[int]) -> list[Draft]:
        runs = _runs(feeds)
        return self._take(feeds, runs, draft_greedily(model, kv, runs, counts, self._p_min), counts)

    def _take(self, feeds: list[_Feed], runs: TokenRuns, drafts: list[list[int]], counts: list[int]) -> list[Draft]:
        for feed, end, tokens, count in zip(feeds, runs.ends, drafts, counts, strict=True):
            self._note_done(feed.sequence, end)
            # A draft that ended early did so after its last token, whose KV was computed then.
            feed.sequence.memo.ahead = tokens[: max(0, count - 1)]
        return [Draft.chain(tuple(tokens)) for tokens in drafts]

    def _catch_up(self, drafter: Target, feeds: list[_Feed], going: list[int]) -> list[int]:
        """Compute the pending known tokens, and return the first drafts of the sequences that are complete."""
        runs, kv = _runs(feeds), drafter.kv
        token_ids, positions, attention = runs.tensors(self._block_size)
        last = [runs.starts[index + 1] - 1 for index in going]
        logits = drafter.model.step(token_ids, positions, attention, kv, last)
        for feed in feeds:
            self._note_done(feed.sequence, feed.first + len(feed.tokens))
        rows = [feeds[index].sequence for index in going]
        return draw_drafts(logits, [row.sampling for row in rows], [len(row.token_ids) for row in rows]) if rows else []

    def _note_fed(self, sequence: DraftedSequence, draft: int | None) -> None:
        if draft is None:
            self._note_done(sequence, len(sequence.token_ids))
        else:
            sequence.memo.ahead.append(draft)

    def _note_accepted(self, sequence: DraftedSequence) -> int:
        """Return the position of the first known token to compute; at least the last one is computed."""
        tokens, memo = sequence.token_ids, sequence.memo
        if memo is None:
            memo = sequence.memo = _Memo(self._num_held(sequence), address_of(sequence.table))
        done, last = memo.num_done, len(tokens) - 1
        for position, token_id in enumerate(memo.ahead, start=memo.ahead_from):
            if position != done or done >= last or tokens[done] != token_id:
                break
            done += 1
        self._note_done(sequence, min(done, last))
        return memo.num_done

    def _num_held(self, sequence: DraftedSequence) -> int:
        """Return the number of leading tokens whose KV the blocks hold without a gap."""
        total, size = 0, self._block_size
        for block_id in sequence.table[: -(-len(sequence.token_ids) // size)].tolist():
            filled = self._filled.counts[block_id]
            total += filled
            if filled < size:
                break
        return min(total, len(sequence.token_ids) - 1)

    def _note_done(self, sequence: DraftedSequence, num_done: int) -> None:
        memo: _Memo = sequence.memo
        self._filled.note(sequence.table, memo.num_done, num_done)
        memo.num_done, memo.ahead_from, memo.ahead = num_done, num_done, []


def _runs(feeds: list[_Feed]) -> TokenRuns:
    token_ids: list[int] = []
    starts = [0]
    for feed in feeds:
        token_ids += feed.tokens
        starts.append(len(token_ids))
    ends = [feed.first + len(feed.tokens) for feed in feeds]
    sequences = [feed.sequence for feed in feeds]
    addresses = [sequence.memo.address for sequence in sequences]
    return TokenRuns(token_ids, starts, ends, [sequence.table for sequence in sequences], addresses)
