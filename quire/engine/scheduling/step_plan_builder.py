"""StepPlanBuilder: a StepPlan while it is being made, and what running sequences have left to compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.base.ids import BlockId, SequenceId
from quire.contracts.step import SequenceStart, StepPlan, TableRun
from quire.engine.scheduling.kv_allocator import NO_GROWTH, BlockGrowth, KvAllocator
from quire.engine.scheduling.sequence import Sequence
from quire.engine.scheduling.window_blocks import WindowBlocks


def _start(sequence: Sequence, kv: KvAllocator | None) -> SequenceStart:
    states, windows = (None, None) if kv is None else (kv.states, kv.windows)
    return SequenceStart(
        sequence_id=sequence.sequence_id,
        request=sequence.request,
        choice=sequence.choice,
        token_ids=tuple(sequence.token_ids),
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=tuple(sequence.block_ids),
        uses_short_rope=sequence.short_rope_len is not None,
        state_slot=None if states is None else states.take_start(sequence),
        window_blocks=_window_start(sequence, windows),
    )


def _window_start(sequence: Sequence, windows: WindowBlocks | None) -> tuple[TableRun, ...]:
    return () if windows is None else ((sequence.window_first, tuple(windows.held(sequence))),)


class StepPlanBuilder:
    """Collects sequences and their numbers of tokens under one token budget. A removed sequence leaves no trace.

    home_budget  the most tokens of the sequences of one of num_homes homes; decoding sequences may exceed it. None: no limit
    """

    def __init__(
        self, max_num_tokens: int, max_num_sequences: int | None = None, num_homes: int = 1, home_budget: int | None = None
    ) -> None:
        self._max_num_sequences = max_num_sequences
        self._home_budget = home_budget
        self.num_home_tokens = [0] * num_homes
        """Tokens of the sequences of each home."""
        self._sequences: dict[SequenceId, Sequence] = {}
        self._num_tokens: dict[SequenceId, int] = {}
        self._growths: dict[SequenceId, BlockGrowth] = {}  # only sequences whose table has changed
        self._num_draft_slots: dict[SequenceId, int] = {}
        self.num_tokens_left = max_num_tokens
        """Unused tokens of the budget."""
        self.is_starved = False
        """Whether a sequence was left out because only a step in flight can free blocks for it."""

    def tokens_left(self, home: int) -> int:
        """Return the unused tokens of the budget that a sequence of a home may get."""
        if self._home_budget is None:
            return self.num_tokens_left
        return max(0, min(self.num_tokens_left, self._home_budget - self.num_home_tokens[home]))

    @property
    def has_tokens_left(self) -> bool:
        """Whether a sequence of any home may get tokens."""
        return any(self.tokens_left(home) > 0 for home in range(len(self.num_home_tokens)))

    def num_home_sequences(self) -> list[int]:
        """Return the number of sequences of each home."""
        counts = [0] * len(self.num_home_tokens)
        for sequence in self._sequences.values():
            counts[sequence.home] += 1
        return counts

    def _take_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_tokens_left -= num_tokens
        self.num_home_tokens[sequence.home] += num_tokens

    @property
    def is_empty(self) -> bool:
        """Whether no sequence computes anything."""
        return not self._sequences

    @property
    def is_full(self) -> bool:
        """Whether it has the maximum number of sequences."""
        return self._max_num_sequences is not None and len(self._sequences) >= self._max_num_sequences

    @property
    def sequences(self) -> Iterable[Sequence]:
        """The sequences in the step, in batch order."""
        return self._sequences.values()

    def add(self, sequence: Sequence, num_tokens: int, growth: BlockGrowth) -> None:
        """Add num_tokens >= 1 tokens of a sequence, whose block table has just grown by `growth`."""
        sequence_id = sequence.sequence_id
        self._sequences[sequence_id] = sequence
        self._num_tokens[sequence_id] = num_tokens
        self._take_tokens(sequence, num_tokens)
        if growth is not NO_GROWTH:
            self._growths[sequence_id] = growth

    def add_draft_slots(self, sequence: Sequence, num_slots: int, growth: BlockGrowth) -> None:
        """Add num_slots >= 1 draft slots to a sequence in the step, for which its table has grown again."""
        sequence_id = sequence.sequence_id
        before = self._growths.get(sequence_id)
        self._num_draft_slots[sequence_id] = num_slots
        self._take_tokens(sequence, num_slots)
        if before is None and growth is not NO_GROWTH:
            self._growths[sequence_id] = growth
        elif before is not None and growth is not NO_GROWTH:
            self._growths[sequence_id] = BlockGrowth(
                before.appended + growth.appended,
                before.replaced + growth.replaced,
                before.copies + growth.copies,
                before.window_blocks + growth.window_blocks,
                before.window_copies + growth.window_copies,
            )

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is in the step, and return its tokens to the budget."""
        sequence_id = sequence.sequence_id
        if sequence_id in self._sequences:
            del self._sequences[sequence_id]
            self._take_tokens(sequence, -self._num_tokens.pop(sequence_id))
            self._growths.pop(sequence_id, None)
            self._take_tokens(sequence, -self._num_draft_slots.pop(sequence_id, 0))

    def build(
        self,
        step_id: int,
        ended: tuple[SequenceId, ...],
        kv: KvAllocator | None = None,
        evicted: dict[SequenceId, tuple[int, ...]] | None = None,
        launched: Mapping[SequenceId, int] | None = None,
    ) -> StepPlan:
        """Return the plan; new sequences are described in full, the others by their growth.

        kv       its checkpoints from which sequences start, and that the step saves, and its window blocks
        evicted  what the worker's tables have and those of the scheduler have not
        launched  tokens that the step in flight computes; None: there is no such step
        """
        states = None if kv is None else kv.states
        starts = tuple([_start(sequence, kv) for sequence in self._sequences.values() if not sequence.is_known])
        state_saves: dict[SequenceId, tuple[tuple[int, int], ...]] = {}
        for sequence_id, sequence in self._sequences.items() if states is not None else ():
            given = sequence, self._num_tokens[sequence_id], step_id, (launched or {}).get(sequence_id, 0)
            saves = () if states is None else states.plan_saves(*given)
            if saves:
                state_saves[sequence_id] = saves
        new_block_ids: dict[SequenceId, tuple[BlockId, ...]] = {}
        replaced_blocks: dict[SequenceId, tuple[tuple[int, BlockId], ...]] = {}
        block_copies: list[tuple[BlockId, BlockId]] = []
        window_blocks: dict[SequenceId, tuple[TableRun, ...]] = {}
        window_copies: list[tuple[BlockId, BlockId]] = []
        for sequence_id, growth in self._growths.items():
            block_copies.extend(growth.copies)
            window_copies.extend(growth.window_copies)
            if not self._sequences[sequence_id].is_known:
                continue
            if growth.appended:
                new_block_ids[sequence_id] = growth.appended
            if growth.replaced:
                replaced_blocks[sequence_id] = growth.replaced
            if growth.window_blocks:
                window_blocks[sequence_id] = growth.window_blocks
        return StepPlan(
            step_id=step_id,
            num_scheduled_tokens=self._num_tokens,
            starts=starts,
            new_block_ids=new_block_ids or None,
            replaced_blocks=replaced_blocks or None,
            block_copies=tuple(block_copies),
            ended=ended,
            num_draft_slots=self._num_draft_slots or None,
            state_saves=state_saves or None,
            window_blocks=window_blocks or None,
            window_copies=tuple(window_copies),
            evicted_blocks=evicted or None,
            scored_blocks=self._scored_blocks() or None,
        )

    def _scored_blocks(self) -> dict[SequenceId, int]:
        """Return how many blocks of the sequences are to be scored because they reach an eviction."""
        found: dict[SequenceId, int] = {}
        for sequence_id, sequence in self._sequences.items():
            rule = sequence.eviction
            if rule is None or not rule.compression.needs_scores:
                continue
            num_computed, num_dropped = sequence.num_computed_tokens, sequence.num_dropped_tokens
            end = num_computed + self._num_tokens[sequence_id]
            if end == rule.next_len(num_computed, num_dropped):
                found[sequence_id] = rule.num_scored(end, num_dropped)
        return found


def find_remaining(
    running: Iterable[Sequence], launched: Mapping[SequenceId, int]
) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
    """Return the sequences with one token to compute, which decode, and those with more, with how many.

    Late ones are in neither, nor those whose pages are still being loaded.

    launched  tokens that a step in flight computes: what is left is counted after them
    """
    decoding: list[Sequence] = []
    prefilling: list[tuple[Sequence, int]] = []
    for sequence in running:
        if sequence.is_mask_pending or sequence.is_loading:
            continue
        num_left = len(sequence.token_ids) - sequence.num_computed_tokens
        if launched:
            num_left = sequence.num_tokens_after(launched.get(sequence.sequence_id, 0))
        if num_left == 1:
            decoding.append(sequence)
        elif num_left > 1:
            prefilling.append((sequence, num_left))
    return decoding, prefilling


def give_draft_slots(draft: StepPlanBuilder, kv: KvAllocator, num_running: int, max_num_drafts: int | None = None) -> None:
    """Give slots to the decoding sequences of a step; a block is left for each running one, so that nobody is preempted.

    max_num_drafts  of a sequence; None: as many as it requests
    """
    for sequence in draft.sequences:
        num_known = len(sequence.token_ids)
        if sequence.num_requested_drafts == 0 or num_known - sequence.num_computed_tokens != 1:
            continue
        # With every draft accepted one more token follows, and the KV of the last one is never computed.
        num_slots = min(sequence.num_requested_drafts, sequence.max_total_tokens - num_known - 1)
        num_slots = min(num_slots, draft.tokens_left(sequence.home))
        if sequence.short_rope_len is not None:
            num_slots = min(num_slots, sequence.short_rope_len - num_known)
        if max_num_drafts is not None:
            num_slots = min(num_slots, max_num_drafts)
        if sequence.eviction is not None:  # the length of an eviction is reached by a known token, never by a draft
            next_len = sequence.eviction.next_len(num_known - 1, sequence.num_dropped_tokens)
            num_slots = num_slots if next_len is None else min(num_slots, next_len - num_known - 1)
        if num_slots <= 0:
            continue
        num_spare = kv.num_missing_blocks(sequence, 1 + num_slots)
        if num_spare == 0 and kv.windows is None:  # it owns its blocks, and can write all of them now
            draft.add_draft_slots(sequence, num_slots, NO_GROWTH)
            continue
        if not kv.leaves_blocks(sequence, 1 + num_slots, num_running):
            continue
        growth = kv.grow(sequence, 1 + num_slots)
        if growth is not None:
            draft.add_draft_slots(sequence, num_slots, growth)
