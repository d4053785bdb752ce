"""KvAllocator: allocates blocks for sequences, shares equal prefixes, and copies shared blocks before they are written.

One rule keeps shared KV intact: a sequence writes only into blocks that are not shared and not published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial

from quire.base.errors import InvariantError
from quire.base.ids import BlockId, SequenceId
from quire.contracts.block_keys import block_key, root_key
from quire.contracts.step import StepPlan, StepResult, TableRun
from quire.engine.scheduling.block_pool import BlockLayout, BlockPool
from quire.engine.scheduling.host_tier import HostTier, Pages
from quire.engine.scheduling.prefix_index import BlockContent, PrefixEntry, PrefixIndex
from quire.engine.scheduling.sequence import HeldBlocks, Sequence
from quire.engine.scheduling.sequence_queue import SequenceQueue
from quire.engine.scheduling.state_checkpoints import StateCheckpoints
from quire.engine.scheduling.state_pages import MissingPages, PrefixStart, StatePages
from quire.engine.scheduling.window_blocks import WindowBlocks, WindowLimits


@dataclass(frozen=True, slots=True)
class BlockGrowth:
    """How a block table changed, with the terms of StepPlan.

    appended  new blocks at its end
    replaced  (index in the table, new block)
    copies    (source, target) of the replaced blocks whose earlier tokens are kept. The source may already belong to
              another sequence, which writes it in the same step: hence all copies come before all writes
    window_blocks, window_copies  new entries of the window group's table, and copies in that group
    """

    appended: tuple[BlockId, ...] = ()
    replaced: tuple[tuple[int, BlockId], ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    window_blocks: tuple[TableRun, ...] = ()
    window_copies: tuple[tuple[BlockId, BlockId], ...] = ()


NO_GROWTH = BlockGrowth()
_NO_BLOCKS: frozenset[BlockId] = frozenset()

_MARK = "\udfff"
"""Prefix of roots that are not only a salt. It is a lone surrogate, with which few salts begin; such salts are escaped."""


def _live_page(entry: PrefixEntry) -> Pages:
    """Return the page of a block that is still published, to be saved."""
    return [(entry.block_id, entry.content.key)] if entry.is_live else []


def content_root(sequence: Sequence) -> str:
    """Return the root of a sequence's block keys: everything other than tokens that changes the KV or separates requests."""
    salt, adapter_key = sequence.request.cache_salt, sequence.request.adapter_key
    if sequence.short_rope_len is not None:
        root = f"{_MARK}short rope{salt}"
    else:
        root = f"{_MARK}{salt}" if salt.startswith(_MARK) else salt
    return f"{_MARK}adapter {adapter_key} {root}" if adapter_key else root


class KvAllocator:
    """The block pool and the prefix index together; the only writer of the block tables of sequences.

    states     checkpoints of recurrent states; None: the model has no recurrent state
    host_tier  where replaced blocks are saved; None: there is none. Not supported with windows
    state_pages  saves and loads the states of checkpoints, too; None: there is no host tier, or no checkpoint
    windows    the window group; None: the model has one KV cache group
    layout     which ranks hold the blocks of a sequence; with several places there are no windows, states or host tier. With
               homes each has a prefix cache of its own
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_state_checkpoints: int | None = None,
        num_state_pages: int = 0,
        has_block_pages: bool = True,
        host_tier: HostTier | None = None,
        window: WindowLimits | None = None,
        layout: BlockLayout | None = None,
    ) -> None:
        self.layout = BlockLayout() if layout is None else layout
        assert self.layout.num_places == 1 or (host_tier is None and window is None and num_state_checkpoints is None)
        self.host_tier = host_tier
        self._block_tier = host_tier if has_block_pages else None
        self.states: StateCheckpoints | None = None
        if num_state_checkpoints is not None:
            is_caching = enable_prefix_caching
            self.states = StateCheckpoints(num_state_checkpoints, block_size, is_caching=is_caching, on_evict=self._offer_state)
        num_places = self.layout.num_places
        self.index = PrefixIndex(on_drop=self._note_drop, num_places=num_places if self.layout.has_homes else 1)
        is_kept = self.index.__contains__
        self.pool = BlockPool(num_blocks, on_reuse=self._reuse, is_kept=is_kept, num_places=num_places)
        self.state_pages: StatePages | None = None
        if self.states is not None and host_tier is not None:
            self.state_pages = StatePages(self.states, self.index, host_tier, num_state_pages, num_blocks, has_block_pages)
        self.windows: WindowBlocks | None = None
        if window is not None:
            self.windows = WindowBlocks(window, block_size, self.index.__contains__)
        self._num_cached_blocks = 0
        self.block_size = block_size
        self._is_caching = enable_prefix_caching

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that are in the prefix index."""
        return self._num_cached_blocks

    def cached_block_ids(self) -> list[BlockId]:
        """Return them; O(blocks in the index)."""
        return [block_id for _, block_id, _ in self.index.iter_entries() if self.pool.num_refs(block_id) == 0]

    def num_cached_tokens(self, sequence: Sequence, home: int) -> int:
        """Return how many tokens of a sequence without blocks the prefix cache of a home has."""
        return len(self.index.match(self._cacheable(sequence), home)) * self.block_size

    def admit(self, sequence: Sequence, home: int = 0) -> int | None:
        """Allocate blocks for the known tokens of a sequence without blocks, and return how many tokens are cached.

        None, without a change, if too few blocks are free. Sets its home, its block table and num_computed_tokens.
        """
        contents = self._cacheable(sequence)
        hits = self.index.match(contents, home)
        num_matched = len(hits)
        start: PrefixStart | None = None
        if self.state_pages is not None:
            start, num_shared = self.state_pages.find(hits, contents)
            sequence.num_shared_tokens = num_shared * self.block_size if num_shared > start.num_blocks else 0
            hits = hits[: start.num_blocks]
        elif self.states is not None:
            hits = self.states.cut(sequence, hits)
        if self.windows is not None:
            hits = self.windows.cut(hits)
        if self.layout.num_places > 1 and not self.layout.has_homes:
            hits = self._cut_at_wrong_place(hits)
        hit_ids = [entry.block_id for entry in hits]
        num_blocks = self._num_blocks_for(sequence.num_admitted_tokens)
        num_new = num_blocks - len(hits)
        revived_ids = [block_id for block_id in hit_ids if self.pool.num_refs(block_id) == 0]
        num_revived = len(revived_ids)
        first = home if self.layout.has_homes else self._first_place(hit_ids, num_blocks)
        if not self._has_free(first, range(len(hits), num_blocks), revived_ids):
            return None
        if self.windows is not None and self.windows.num_wanted(hit_ids, num_new) > self.windows.pool.num_free:
            return None
        sequence.home = home
        self._num_cached_blocks -= num_revived
        self.pool.share(hit_ids)  # before allocate, which could otherwise return the hits themselves
        tier = self.host_tier
        if tier is None:
            sequence.block_ids = [*hit_ids, *self._allocate(first, range(len(hits), num_blocks))]
        else:
            self._allocate_and_load(sequence, hits, contents[len(hits) :], num_new, start)
        if self.windows is not None:
            self.windows.start(sequence, hit_ids, num_matched)
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_published_blocks = len(hits)
        sequence.last_entry = hits[-1] if hits else None
        if self.states is not None:
            self.states.start_from(sequence, hits)
        return sequence.num_computed_tokens

    def _allocate_and_load(
        self, sequence: Sequence, hits: list[PrefixEntry], contents: list[BlockContent], num_new: int, start: PrefixStart | None
    ) -> None:
        """Allocate a sequence's blocks, and load the pages of the host tier that follow its hits, to which they are added.

        Loaded blocks are published at once, since the loads of a step are executed before everything that reads them.

        start  where it starts; None: there are no states, and all pages that follow are loaded
        """
        tier, states = self.host_tier, self.state_pages
        assert tier is not None
        for entry in hits:
            entry.is_reused |= sequence.num_preemptions == 0  # else the blocks are perhaps its own
            if self._block_tier is not None:
                tier.note_use(entry.content.key)
        slots = [*tier.match(content.key for content in contents)] if start is None else start.slots
        state_slots = [] if start is None else start.state_slots
        pinned = [slot for slot in (*slots, *state_slots) if slot is not None]
        tier.pin(pinned)  # before allocate, which saves what it replaces
        new_ids = self._allocate(0, range(num_new))
        sequence.block_ids = [*(entry.block_id for entry in hits), *new_ids]
        for slot, content, block_id in zip(slots, contents, new_ids, strict=False):
            entry = self.index.publish(hits[-1] if hits else None, content, block_id)
            if entry is None or entry.block_id != block_id:
                if states is not None:
                    raise InvariantError("a page was to be loaded under a key that another content has")
                break  # another content has the key
            entry.is_reused = True
            if slot is not None:
                tier.load(slot, block_id)
            hits.append(entry)
        if states is not None and hits:
            if state_slots:
                states.load(hits[-1], state_slots)
            else:
                states.note_use(hits[-1])
        tier.unpin(pinned)
        for entry in hits if sequence.request.cache_retention_s > 0 else ():
            self._retain(entry, sequence.request.cache_retention_s)
        if states is not None and hits and sequence.request.cache_retention_s > 0:
            states.retain(hits[-1], sequence.request.cache_retention_s)
        tier.let_go(sequence.request.request_id)

    def _retain(self, entry: PrefixEntry, keep_s: float) -> None:
        tier = self._block_tier
        if tier is not None and not tier.retain(entry.content.key, entry.block_id, keep_s):
            entry.is_reused = True  # it is worth saving when it leaves the pool

    def clear_cache(self) -> None:
        """Drop all published blocks from the prefix index. No sequence may hold a block."""
        for block_id in [block_id for _, block_id, _ in self.index.iter_entries()]:
            self.index.drop(block_id)
            if self.windows is not None:
                self.windows.forget(block_id)

    def missing_pages(self, sequence: Sequence) -> MissingPages:
        """Return which pages a sequence could use that neither the pool nor the host tier has."""
        contents = self._cacheable(sequence)
        hits = self.index.match(contents)
        if self.state_pages is not None:
            return self.state_pages.missing(hits, contents)
        rest = [content.key for content in contents[len(hits) :]]
        return MissingPages(rest if self.host_tier is None else rest[len(self.host_tier.match(rest)) :])

    def moved_ids(self, sequence: Sequence) -> list[BlockId]:
        """Return the blocks of a sequence, and those that stand for the state from which it will start, as plans name them."""
        if self.state_pages is None or sequence.state_slot is None:
            return sequence.block_ids
        return [*sequence.block_ids, *self.state_pages.block_ids(sequence.state_slot)]

    def page_keys(self, sequence: Sequence) -> list[int]:
        """Return the keys of the full blocks of a sequence's known tokens."""
        return [content.key for content in self._contents(sequence, sequence.num_tokens // self.block_size)]

    def save_page(self, key: int) -> int | None:
        """Return the slot of a page, which is saved in the next plan if only the pool has it; None: neither has it, or there is
        no room in this plan."""
        tier = self.host_tier
        if tier is None:
            return None
        if key not in tier:
            entry = self.index.find(key)
            if entry is None or not tier.save(entry.block_id, key):
                return None
        return tier.slot_of(key)

    def with_page_moves(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the pages that it saves and loads."""
        if self.host_tier is None or not self.host_tier.has_moves:
            return plan
        saves, loads = self.host_tier.take_moves(plan.step_id)
        return replace(plan, page_saves=saves, page_loads=loads)

    def end_page_moves(self, result: StepResult) -> frozenset[BlockId]:
        """Record which pages have been saved and loaded. If the step failed, its own saved pages and loaded blocks are dropped;
        return these blocks."""
        tier = self.host_tier
        if tier is None:
            return _NO_BLOCKS
        if result.is_failed:
            saves, loads = tier.end_moves(result.step_id)
            tier.drop_slots(slot for _, slot in saves)
            for _, block_id in loads:
                if self.state_pages is not None and block_id >= self.pool.num_blocks:
                    self.state_pages.drop(block_id)
                else:
                    self.index.drop(block_id)
            return frozenset(block_id for _, block_id in loads)
        for step_id in result.done_moves:
            tier.end_moves(step_id)
        return _NO_BLOCKS

    def save_cached(self, max_blocks: int) -> None:
        """Save the pages of up to max_blocks published blocks that no tier has, in the order in which they came, and then of
        checkpoints."""
        tier, unsaved = self._block_tier, list[PrefixEntry]()
        if tier is not None:
            unsaved = [entry for key, _, entry in self.index.iter_entries() if not entry.is_saved and key not in tier]
            for entry in unsaved[:max_blocks]:
                entry.is_saved = tier.save(entry.block_id, entry.content.key)
        if self.state_pages is not None:
            self.state_pages.save_cached(max(0, max_blocks - len(unsaved)))

    def has_room_for(self, sequence: Sequence) -> bool:
        """Return whether `admit` would find enough blocks for a sequence if none of its tokens is cached."""
        num_blocks, windows = self._num_blocks_for(sequence.num_admitted_tokens), self.windows
        if windows is not None and windows.num_wanted([], num_blocks) > windows.pool.num_free:
            return False
        return self._has_free(self._first_place([], num_blocks), range(num_blocks))

    def cover_start(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the slots of the first num_tokens tokens to compute writable in the window group, after `admit`."""
        if self.windows is not None:
            self.windows.extend(sequence, self._num_blocks_for(sequence.num_computed_tokens + num_tokens))

    def grow(self, sequence: Sequence, num_tokens: int, num_launched: int = 0) -> BlockGrowth | None:
        """Make the slots of the next num_tokens >= 1 tokens writable; None, without a change, if too few blocks are free.

        num_launched: tokens after the computed ones that a step in flight computes.
        """
        table, start = sequence.block_ids, sequence.num_slots_computed + num_launched
        first = start // self.block_size
        is_one_block = first < len(table) and start + num_tokens <= (first + 1) * self.block_size
        windows = self.windows
        if is_one_block and self._is_writable(table[first]) and (windows is None or first < sequence.window_end):
            return NO_GROWTH  # the case of almost every decoded token
        num_appended, locked = self._missing(table, start, num_tokens)
        num_windows = 0
        if windows is not None:
            num_windows = windows.num_missing(sequence, self._num_blocks_for(start + num_tokens), locked)
            if num_windows > windows.pool.num_free:
                return None
        if num_appended == 0 and not locked and num_windows == 0:
            return NO_GROWTH
        new_ids = self._try_allocate(self._first_place(table), [*locked, *range(len(table), len(table) + num_appended)])
        if new_ids is None:
            return None
        replaced = tuple(zip(locked, new_ids, strict=False))
        copies: list[tuple[BlockId, BlockId]] = []
        window_blocks: list[TableRun] = []
        window_copies: list[tuple[BlockId, BlockId]] = []
        for index, new_id in replaced:
            is_begun = index * self.block_size < start  # the block contains tokens before the first written one
            if is_begun:
                copies.append((table[index], new_id))
            if windows is not None and index < sequence.window_end:
                pair = windows.replace(table[index], new_id)
                window_blocks.append((index, pair[1:]))
                if is_begun:
                    window_copies.append(pair)
            self._free_blocks([table[index]])
            table[index] = new_id
        appended = new_ids[len(locked) :]
        table.extend(appended)
        if windows is None:
            return BlockGrowth(appended, replaced, tuple(copies))
        window_blocks += windows.extend(sequence, self._num_blocks_for(start + num_tokens))
        return BlockGrowth(appended, replaced, tuple(copies), tuple(window_blocks), tuple(window_copies))

    def has_room_after(self, running: SequenceQueue, launched: Mapping[SequenceId, int]) -> bool:
        """Return whether all running sequences can continue after a step in flight, which computes `launched` tokens of
        them."""
        num_free = min(map(self.pool.num_free_at, range(self.layout.num_places)))
        if self.windows is not None and self.windows.pool.num_free < self.windows.peak_blocks + 2 * len(running):
            return False
        if num_free >= len(running):  # their tables cover the known tokens, so one more token takes at most one block
            return True
        for sequence in running:
            num_launched = launched.get(sequence.sequence_id, 0)
            num_tokens = sequence.num_tokens_after(num_launched)
            if num_tokens > 0:
                start = sequence.num_slots_computed + num_launched
                num_appended, locked = self._missing(sequence.block_ids, start, num_tokens)
                num_free -= num_appended + len(locked)
        return num_free >= 0

    def _missing(self, table: list[BlockId], start: int, num_tokens: int) -> tuple[int, list[int]]:
        """Return how many blocks a table lacks for tokens from `start` on, and the indices of those that must be replaced."""
        num_blocks = self._num_blocks_for(start + num_tokens)
        touched = range(start // self.block_size, min(num_blocks, len(table)))
        return max(0, num_blocks - len(table)), [index for index in touched if not self._is_writable(table[index])]

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks the table lacks for the next num_tokens tokens."""
        return max(0, self._num_blocks_for(sequence.num_slots_computed + num_tokens) - len(sequence.block_ids))

    def leaves_blocks(self, sequence: Sequence, num_tokens: int, num_left: int) -> bool:
        """Return whether num_left blocks remain free in each group after the next num_tokens tokens of a sequence."""
        windows = self.windows
        if windows is not None:
            num_windows = windows.num_missing(sequence, self._num_blocks_for(sequence.num_computed_tokens + num_tokens), [])
            if windows.pool.num_free - num_windows < num_left:
                return False
        table = sequence.block_ids
        missing = range(len(table), len(table) + self.num_missing_blocks(sequence, num_tokens))
        if self.layout.num_places == 1:
            return self.pool.num_free - len(missing) >= num_left
        if self.layout.has_homes:
            return self.pool.num_free_at(sequence.home) - len(missing) >= num_left
        demand = Counter(self.layout.places(self._first_place(table), missing))
        return all(self.pool.num_free_at(place) - demand[place] >= num_left for place in range(self.layout.num_places))

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Let `target`, which has no blocks, share the blocks of the prompt that `source` has computed.

        The last prompt token is computed again, so that `target` gets its own logits.
        """
        target.block_ids = source.block_ids[: self._num_blocks_for(target.num_prompt_tokens)]
        target.home = source.home
        self.pool.share(target.block_ids)
        if self.windows is not None:
            self.windows.fork(source, target)
        target.block_contents = source.block_contents[: target.num_prompt_tokens // self.block_size]
        target.num_computed_tokens = target.num_prompt_tokens - 1
        if self.states is not None:
            self.states.fork(source, target)

    def can_fork(self, source: Sequence, num_forked: int) -> bool:
        """Return whether everything that a fork of a sequence starts from is available after num_forked others, and a block of
        each group for its next token."""
        if self.windows is not None and self.windows.pool.num_free <= num_forked:
            return False
        place = self.layout.place(self._first_place(source.block_ids), (source.num_prompt_tokens - 1) // self.block_size)
        return self.pool.num_free_at(place) > num_forked and (self.states is None or self.states.can_fork(source))

    def evict(self, sequence: Sequence, indices: tuple[int, ...]) -> None:
        """Take the full blocks at some indices, ascending, out of a sequence's table. No step in flight may use them.

        A block that another sequence shares, or that the prefix index has, keeps its content.
        """
        evicted = [sequence.block_ids[index] for index in indices]
        for index in reversed(indices):
            del sequence.block_ids[index]
        sequence.num_dropped_tokens += len(indices) * self.block_size
        self._free_blocks(evicted)

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence; published ones remain cached until they are reused."""
        self.free(self.detach(sequence))

    def detach(self, sequence: Sequence) -> HeldBlocks:
        """Remove all blocks from a sequence, and return them in order, to be freed later."""
        window_ids = [] if self.windows is None else self.windows.detach(sequence)
        block_ids, sequence.block_ids = sequence.block_ids, []
        sequence.num_computed_tokens = 0
        sequence.num_dropped_tokens = 0
        sequence.num_published_blocks = 0
        sequence.last_entry = None
        if self.states is not None:
            if self.state_pages is not None:
                self.state_pages.note_end(sequence)
            self.states.forget(sequence)
        return HeldBlocks(block_ids, window_ids)

    def publish(self, sequence: Sequence, step_id: int) -> None:
        """Add the full blocks of a sequence, up to its computed tokens, to the prefix index, and the states that a step has
        saved.

        After an eviction nothing more is added: the KV of later tokens depends on what was evicted. Nor are tokens after
        exact_len.
        """
        if sequence.num_dropped_tokens == 0:
            self._publish(sequence)
        if self.windows is not None:
            self.windows.advance(sequence)
        for position, entry in () if self.states is None else self.states.commit(sequence, step_id):
            if self.state_pages is not None:
                self.state_pages.note_checkpoint(sequence, position, entry)

    def _publish(self, sequence: Sequence) -> None:
        if not self._is_caching:
            return
        num_exact = sequence.num_computed_tokens
        if sequence.exact_len is not None:
            num_exact = min(num_exact, sequence.exact_len)
        num_full = num_exact // self.block_size
        if num_full <= sequence.num_published_blocks:
            return
        if sequence.last_entry is not None and not sequence.last_entry.is_live:
            # The chain referred to an equal block that was reused: start again with the sequence's own blocks.
            sequence.num_published_blocks, sequence.last_entry = 0, None
        contents, keep_s = self._contents(sequence, num_full), sequence.request.cache_retention_s
        for index in range(sequence.num_published_blocks, num_full):
            entry = self.index.publish(sequence.last_entry, contents[index], sequence.block_ids[index], sequence.home)
            if entry is None:
                return
            sequence.num_published_blocks, sequence.last_entry = index + 1, entry
            entry.is_recomputed |= sequence.num_preemptions > 0 and entry.block_id == sequence.block_ids[index]
            if self.windows is not None and entry.block_id != sequence.block_ids[index]:
                self._move_entry(entry, sequence.block_ids[index], self.windows)
            if self._block_tier is not None:
                if keep_s > 0 and (index + 1) * self.block_size <= sequence.num_prompt_tokens:
                    self._retain(entry, keep_s)
                self._block_tier.write_through(entry.content.key, partial(_live_page, entry))

    def _cacheable(self, sequence: Sequence) -> list[BlockContent]:
        """Return the blocks at the start of a sequence that may come from a cache."""
        if not self._is_caching:
            return []
        return self._contents(sequence, sequence.max_cached_tokens // self.block_size)

    def _contents(self, sequence: Sequence, num_blocks: int) -> list[BlockContent]:
        contents, size = sequence.block_contents, self.block_size
        root = content_root(sequence)
        for index in range(len(contents), num_blocks):
            token_ids = tuple(sequence.token_ids[index * size : (index + 1) * size])
            parent_key = contents[-1].key if contents else root_key(root)
            contents.append(BlockContent(block_key(parent_key, token_ids), root, token_ids))
        return contents[:num_blocks]

    def _is_writable(self, block_id: BlockId) -> bool:
        return self.pool.num_refs(block_id) == 1 and block_id not in self.index

    def _move_entry(self, entry: PrefixEntry, block_id: BlockId, windows: WindowBlocks) -> None:
        """Let an entry whose block has lost its window block name an equal block that has one."""
        old_id = entry.block_id
        if windows.of(old_id) is not None or windows.of(block_id) is None:
            return
        is_free = self.pool.num_refs(old_id) == 0
        self.index.move(entry, block_id)
        if is_free:  # to the head of the free list, as its content cannot be found any more
            self._num_cached_blocks -= 1
            self.pool.share([old_id])
            self.pool.free([old_id])

    def free(self, held: HeldBlocks) -> None:
        """Drop a reference of each block that a sequence has held."""
        if self.windows is not None:
            self.windows.pool.free(held.window_ids)
        self._free_blocks(held.block_ids)

    def _free_blocks(self, block_ids: list[BlockId]) -> None:
        self.pool.free(block_ids)
        self._num_cached_blocks += sum(self.pool.num_refs(block_id) == 0 and block_id in self.index for block_id in block_ids)

    def _reuse(self, block_id: BlockId) -> None:
        """Drop the content of a block that was free until now."""
        self._num_cached_blocks -= block_id in self.index
        entry = None if self.host_tier is None else self.index.entry_of(block_id)
        if entry is not None:
            if self._block_tier is not None:
                self._block_tier.offer(block_id, entry.content.key, entry.is_reused, entry.is_recomputed)
            if self.state_pages is not None:
                self.state_pages.offer(entry)
        self.index.drop(block_id)
        if self.windows is not None:
            self.windows.forget(block_id)

    def _offer_state(self, block_id: BlockId) -> None:
        entry = self.index.entry_of(block_id)
        if self.state_pages is not None and entry is not None:
            self.state_pages.offer(entry)

    def _note_drop(self, block_id: BlockId) -> None:
        # A block that is being reused counts as held here: _reuse has seen to it.
        self._num_cached_blocks -= self.pool.num_refs(block_id) == 0
        if self.states is not None:
            self.states.drop(block_id)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _first_place(self, table: SequenceOf[BlockId], num_blocks: int = 0) -> int:
        """Return the place of the first block of a table; of an empty one, the place from which num_blocks blocks leave the
        most blocks free at the fullest place."""
        if table:
            return self.pool.place_of(table[0])
        if self.layout.num_places == 1:
            return 0

        def num_left(first: int) -> int:
            demand = Counter(self.layout.places(first, range(num_blocks)))
            return min(self.pool.num_free_at(place) - demand[place] for place in range(self.layout.num_places))

        return max(range(self.layout.num_places), key=num_left)

    def _cut_at_wrong_place(self, hits: list[PrefixEntry]) -> list[PrefixEntry]:
        """Return the hits before the first one that is not where a sequence that starts with them has it.

        Sequences with one prefix may have started at different places, and each has published some of its blocks.
        """
        for index, entry in enumerate(hits):
            if self.pool.place_of(entry.block_id) != self.layout.place(self.pool.place_of(hits[0].block_id), index):
                return hits[:index]
        return hits

    def _has_free(self, first: int, indices: SequenceOf[int], block_ids: Iterable[BlockId] = ()) -> bool:
        """Return whether blocks for these indices of a table are free, in addition to block_ids, which are."""
        if self.layout.num_places == 1:
            return len(indices) + sum(1 for _ in block_ids) <= self.pool.num_free
        demand = Counter(self.layout.places(first, indices))
        demand.update(map(self.pool.place_of, block_ids))
        return self.pool.has_free(demand)

    def _try_allocate(self, first: int, indices: SequenceOf[int]) -> tuple[BlockId, ...] | None:
        """Allocate blocks for these indices of a table; None, without a change, if too few are free."""
        if self.layout.num_places == 1:
            return self.pool.allocate(len(indices))
        return self.pool.allocate_at(self.layout.places(first, indices))

    def _allocate(self, first: int, indices: SequenceOf[int]) -> tuple[BlockId, ...]:
        block_ids = self._try_allocate(first, indices)
        if block_ids is None:
            raise InvariantError(f"{len(indices)} blocks were counted as free, but {self.pool.num_free} are")
        return block_ids
