"""KvAllocator: allocates blocks for sequences, shares equal prefixes, and copies shared blocks before they are written.

One rule keeps shared KV intact: a sequence writes only into blocks that are not shared and not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.base.errors import InvariantError
from quire.base.ids import BlockId, SequenceId
from quire.contracts.block_keys import block_key, root_key
from quire.contracts.step import StepPlan
from quire.engine.scheduling.block_pool import BlockPool
from quire.engine.scheduling.host_tier import HostTier
from quire.engine.scheduling.prefix_index import BlockContent, PrefixEntry, PrefixIndex
from quire.engine.scheduling.sequence import Sequence
from quire.engine.scheduling.sequence_queue import SequenceQueue
from quire.engine.scheduling.state_checkpoints import StateCheckpoints


@dataclass(frozen=True, slots=True)
class BlockGrowth:
    """How a block table changed, with the terms of StepPlan.

    appended  new blocks at its end
    replaced  (index in the table, new block)
    copies    (source, target) of the replaced blocks whose earlier tokens are kept. The source may already belong to
              another sequence, which writes it in the same step: hence all copies come before all writes
    """

    appended: tuple[BlockId, ...] = ()
    replaced: tuple[tuple[int, BlockId], ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()


NO_GROWTH = BlockGrowth()

_MARK = "\udfff"
"""Prefix of roots that are not only a salt. It is a lone surrogate, with which few salts begin; such salts are escaped."""


def content_root(sequence: Sequence) -> str:
    """Return the root of a sequence's block keys: everything other than tokens that changes the KV or separates requests."""
    salt = sequence.request.cache_salt
    if sequence.short_rope_len is not None:
        return f"{_MARK}short rope{salt}"
    return f"{_MARK}{salt}" if salt.startswith(_MARK) else salt


class KvAllocator:
    """The block pool and the prefix index together; the only writer of the block tables of sequences.

    states     checkpoints of recurrent states; None: the model has no recurrent state
    host_tier  where replaced blocks are saved; None: there is none. Not supported with recurrent states
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_state_checkpoints: int | None = None,
        host_tier: HostTier | None = None,
    ) -> None:
        assert host_tier is None or num_state_checkpoints is None, "a page has no recurrent state"
        self.host_tier = host_tier
        self.states: StateCheckpoints | None = None
        if num_state_checkpoints is not None:
            self.states = StateCheckpoints(num_state_checkpoints, block_size, is_caching=enable_prefix_caching)
        self.index = PrefixIndex(on_drop=self._note_drop)
        self.pool = BlockPool(num_blocks, on_reuse=self._reuse, is_kept=self.index.__contains__)
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

    def admit(self, sequence: Sequence) -> int | None:
        """Allocate blocks for all known tokens of a sequence without blocks, and return how many tokens are cached.

        None, without a change, if too few blocks are free. Sets its block table and num_computed_tokens.
        """
        contents = self._cacheable(sequence)
        hits = self.index.match(contents)
        if self.states is not None:
            hits = self.states.cut(sequence, hits)
        hit_ids = [entry.block_id for entry in hits]
        num_new = self._num_blocks_for(sequence.num_tokens) - len(hits)
        num_revived = sum(self.pool.num_refs(block_id) == 0 for block_id in hit_ids)
        if num_new + num_revived > self.pool.num_free:
            return None
        self._num_cached_blocks -= num_revived
        self.pool.share(hit_ids)  # before allocate, which could otherwise return the hits themselves
        tier = self.host_tier
        if tier is None:
            sequence.block_ids = [*hit_ids, *self._allocate(num_new)]
        else:
            self._allocate_and_load(sequence, hits, contents[len(hits) :], num_new, tier)
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_published_blocks = len(hits)
        sequence.last_entry = hits[-1] if hits else None
        if self.states is not None:
            self.states.start_from(sequence, hits)
        return sequence.num_computed_tokens

    def _allocate_and_load(
        self, sequence: Sequence, hits: list[PrefixEntry], contents: list[BlockContent], num_new: int, tier: HostTier
    ) -> None:
        """Allocate a sequence's blocks, and load the pages of the host tier that follow its hits, to which they are added.

        Loaded blocks are published at once, since the loads of a step are executed before everything that reads them.
        """
        for entry in hits:
            entry.is_reused = True
            tier.note_use(entry.content.key)
        slots = tier.match(content.key for content in contents)
        tier.pin(slots)  # before allocate, which saves what it replaces
        new_ids = self._allocate(num_new)
        sequence.block_ids = [*(entry.block_id for entry in hits), *new_ids]
        for slot, content, block_id in zip(slots, contents, new_ids, strict=False):
            entry = self.index.publish(hits[-1] if hits else None, content, block_id)
            if entry is None or entry.block_id != block_id:
                break  # another content has the key
            entry.is_reused = True
            tier.load(slot, block_id)
            hits.append(entry)
        tier.unpin(slots)
        if sequence.request.cache_retention_s > 0:
            for entry in hits:
                tier.retain(entry, sequence.request.cache_retention_s)
        tier.let_go(sequence.request.request_id)

    def missing_keys(self, sequence: Sequence) -> list[int]:
        """Return the keys of a sequence's cacheable blocks after those that the pool and the host tier have."""
        contents = self._cacheable(sequence)
        rest = [content.key for content in contents[len(self.index.match(contents)) :]]
        return rest if self.host_tier is None else rest[len(self.host_tier.match(rest)) :]

    def with_page_moves(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the pages that it saves and loads."""
        if self.host_tier is None or not self.host_tier.has_moves:
            return plan
        saves, loads = self.host_tier.take_moves()
        return replace(plan, page_saves=saves, page_loads=loads)

    def end_page_moves(self, plan: StepPlan, is_failed: bool) -> None:
        """Record that a plan was executed; if it failed, its saved pages and loaded blocks are dropped."""
        tier = self.host_tier
        if tier is None:
            return
        tier.unpin(slot for slot, _ in plan.page_loads)
        if is_failed:
            tier.drop_slots(slot for _, slot in plan.page_saves)
            for _, block_id in plan.page_loads:
                self.index.drop(block_id)

    def save_cached(self, max_blocks: int) -> None:
        """Save the pages of up to max_blocks published blocks that no tier has, in the order in which they came."""
        tier = self.host_tier
        if tier is None:
            return
        unsaved = [entry for key, _, entry in self.index.iter_entries() if not entry.is_saved and key not in tier]
        for entry in unsaved[:max_blocks]:
            entry.is_saved = tier.save(entry.block_id, entry.content.key)

    def has_room_for(self, sequence: Sequence) -> bool:
        """Return whether `admit` would find enough blocks for a sequence if none of its tokens is cached."""
        return self._num_blocks_for(sequence.num_tokens) <= self.pool.num_free

    def grow(self, sequence: Sequence, num_tokens: int, num_launched: int = 0) -> BlockGrowth | None:
        """Make the slots of the next num_tokens >= 1 tokens writable; None, without a change, if too few blocks are free.

        num_launched: tokens after the computed ones that a step in flight computes.
        """
        table, start = sequence.block_ids, sequence.num_computed_tokens + num_launched
        first = start // self.block_size
        is_one_block = first < len(table) and start + num_tokens <= (first + 1) * self.block_size
        if is_one_block and self._is_writable(table[first]):  # the case of almost every decoded token
            return NO_GROWTH
        num_appended, locked = self._missing(table, start, num_tokens)
        if num_appended == 0 and not locked:
            return NO_GROWTH
        new_ids = self.pool.allocate(num_appended + len(locked))
        if new_ids is None:
            return None
        replaced = tuple(zip(locked, new_ids, strict=False))
        copies: list[tuple[BlockId, BlockId]] = []
        for index, new_id in replaced:
            if index * self.block_size < start:  # the block contains tokens before the first written one
                copies.append((table[index], new_id))
            self.free([table[index]])
            table[index] = new_id
        appended = new_ids[len(locked) :]
        table.extend(appended)
        return BlockGrowth(appended, replaced, tuple(copies))

    def has_room_behind(self, running: SequenceQueue, launched: Mapping[SequenceId, int]) -> bool:
        """Return whether all running sequences can continue after a step in flight, which computes `launched` tokens of
        them."""
        num_free = self.pool.num_free
        if num_free >= len(running):  # their tables cover the known tokens, so one more token takes at most one block
            return True
        for sequence in running:
            num_launched = launched.get(sequence.sequence_id, 0)
            num_tokens = sequence.num_tokens_behind(num_launched)
            if num_tokens > 0:
                start = sequence.num_computed_tokens + num_launched
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
        return max(0, -(-(sequence.num_computed_tokens + num_tokens) // self.block_size) - len(sequence.block_ids))

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Let `target`, which has no blocks, share the blocks of the prompt that `source` has computed.

        The last prompt token is computed again, so that `target` gets its own logits.
        """
        target.block_ids = source.block_ids[: self._num_blocks_for(target.num_prompt_tokens)]
        self.pool.share(target.block_ids)
        target.block_contents = source.block_contents[: target.num_prompt_tokens // self.block_size]
        target.num_computed_tokens = target.num_prompt_tokens - 1
        if self.states is not None:
            self.states.fork(source, target)

    def can_fork(self, source: Sequence) -> bool:
        """Return whether everything that forks of a sequence start from is available."""
        return self.states is None or self.states.can_fork(source)

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence; published ones remain cached until they are reused."""
        self.free(self.detach(sequence))

    def detach(self, sequence: Sequence) -> list[BlockId]:
        """Remove all blocks from a sequence, and return them in order, to be freed later."""
        block_ids, sequence.block_ids = sequence.block_ids, []
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        sequence.last_entry = None
        if self.states is not None:
            self.states.forget(sequence)
        return block_ids

    def publish(self, sequence: Sequence) -> None:
        """Add the full blocks of a sequence, up to its computed tokens, to the prefix index, and its saved states."""
        self._publish(sequence)
        if self.states is not None:
            self.states.commit(sequence)

    def _publish(self, sequence: Sequence) -> None:
        if not self._is_caching:
            return
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full <= sequence.num_published_blocks:
            return
        if sequence.last_entry is not None and not sequence.last_entry.is_live:
            # The chain referred to an equal block that was reused: start again with the sequence's own blocks.
            sequence.num_published_blocks, sequence.last_entry = 0, None
        contents, keep_s = self._contents(sequence, num_full), sequence.request.cache_retention_s
        for index in range(sequence.num_published_blocks, num_full):
            entry = self.index.publish(sequence.last_entry, contents[index], sequence.block_ids[index])
            if entry is None:
                return
            sequence.num_published_blocks, sequence.last_entry = index + 1, entry
            if keep_s > 0 and (index + 1) * self.block_size <= sequence.num_prompt_tokens and self.host_tier is not None:
                self.host_tier.retain(entry, keep_s)

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

    def free(self, block_ids: list[BlockId]) -> None:
        """Drop a reference of each block of a table given in order."""
        self.pool.free(block_ids)
        self._num_cached_blocks += sum(self.pool.num_refs(block_id) == 0 and block_id in self.index for block_id in block_ids)

    def _reuse(self, block_id: BlockId) -> None:
        """Drop the content of a block that was free until now."""
        self._num_cached_blocks -= block_id in self.index
        if self.host_tier is not None:
            entry = self.index.entry_of(block_id)
            if entry is not None:
                self.host_tier.offer(block_id, entry.content.key, entry.is_reused)
        self.index.drop(block_id)

    def _note_drop(self, block_id: BlockId) -> None:
        # A block that is being reused counts as held here: _reuse has seen to it.
        self._num_cached_blocks -= self.pool.num_refs(block_id) == 0
        if self.states is not None:
            self.states.drop(block_id)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _allocate(self, num_blocks: int) -> tuple[BlockId, ...]:
        block_ids = self.pool.allocate(num_blocks)
        if block_ids is None:
            raise InvariantError(f"{num_blocks} blocks were counted as free, but {self.pool.num_free} are")
        return block_ids
