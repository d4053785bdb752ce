"""StatePages: recurrent states at the ends of blocks as pages of the host tier, and where a sequence starts with them.

A prefix of a model with a recurrent state goes on only where there is a state. So a state is saved as some pages of its own,
under keys that are made from that of the block at whose end it was taken. They are pages like those of blocks for all that
moves and keeps pages. Where no layer has attention, blocks have no bytes, and only states are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from quire.base.ids import BlockId
from quire.contracts.block_keys import state_page_keys
from quire.engine.scheduling.host_tier import HostTier, Pages
from quire.engine.scheduling.prefix_index import BlockContent, PrefixEntry, PrefixIndex
from quire.engine.scheduling.sequence import Sequence as Choice
from quire.engine.scheduling.state_checkpoints import INTERVAL_TOKENS, StateCheckpoints


class PrefixStart(NamedTuple):
    """Where a sequence starts.

    num_blocks   blocks at its start that it does not compute
    slots        of the host tier, of the pages of those after its hits; None: there is nothing to load
    state_slots  of the pages of its state; none: the pool has the state
    """

    num_blocks: int
    slots: list[int | None]
    state_slots: list[int]


@dataclass(frozen=True, slots=True)
class MissingPages:
    """What a request could use of the pages that neither the pool nor the host tier has.

    keys             of its blocks, from the first missing one on
    num_start        blocks that the pool and the host tier have, up to their last state
    num_state_pages  pages of a state; 0: there are no states, and the other fields are not used
    present          keys of the blocks before those
    states           keys of the blocks whose states the pool or the host tier has
    """

    keys: Sequence[int]
    num_start: int = 0
    num_state_pages: int = 0
    present: Sequence[int] = ()
    states: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.keys) or len(self.present) > self.num_start

    @property
    def num_blocks(self) -> int:
        """Blocks that could be used."""
        return len(self.present) + len(self.keys) - self.num_start

    def choose(self, find: Callable[[Sequence[int]], list[int]]) -> tuple[list[int], int]:
        """Return the keys of the pages to read from a store, and the number of blocks that are then not computed.

        find  returns those of some keys, from the first on, that the store has
        """
        found = find(self.keys) if self.keys else []
        if self.num_state_pages == 0:
            return found, len(found)
        blocks = [*self.present, *found]
        for num_blocks in range(len(blocks), self.num_start, -1):
            key, pages = blocks[num_blocks - 1], list[int]()
            if key not in self.states:
                if not find(state_page_keys(key, 1)):
                    continue
                pages = state_page_keys(key, self.num_state_pages)
            if len(find(pages)) == len(pages):
                return [*found[: max(0, num_blocks - len(self.present))], *pages], num_blocks - self.num_start
        return [], 0


class StatePages:
    """Owned by the KvAllocator.

    num_pages    of a state
    first_id     in plans, page p of checkpoint c is block first_id + c * num_pages + p
    has_kv       blocks have bytes, and so pages
    """

    def __init__(
        self, states: StateCheckpoints, index: PrefixIndex, tier: HostTier, num_pages: int, first_id: int, has_kv: bool
    ) -> None:
        self._states, self._index, self._tier = states, index, tier
        self.num_pages, self._first_id, self._has_kv = num_pages, first_id, has_kv

    def block_ids(self, slot: int) -> list[BlockId]:
        """Return the blocks of plans that stand for the pages of a checkpoint."""
        first = self._first_id + slot * self.num_pages
        return [BlockId(first + page) for page in range(self.num_pages)]

    def drop(self, block_id: BlockId) -> None:
        """Drop the checkpoint of which a block of a plan is a page: the step that was to load it has failed."""
        self._states.drop_slot((block_id - self._first_id) // self.num_pages)

    def find(self, hits: Sequence[PrefixEntry], contents: Sequence[BlockContent]) -> tuple[PrefixStart, int]:
        """Return where a sequence of some cacheable blocks starts, and how many of them others have had, as far as is known.

        hits  the blocks of the pool that it begins with
        """
        slots = self._slots_after(hits, contents)
        return self._start(hits, contents, slots), len(hits) + (len(slots) if self._has_kv else 0)

    def _start(self, hits: Sequence[PrefixEntry], contents: Sequence[BlockContent], slots: list[int | None]) -> PrefixStart:
        """Return where a sequence starts; slots: of the pages of the blocks after the hits."""
        num_hits, can_load = len(hits), self._states.has_room
        for num_blocks in range(num_hits + len(slots), 0, -1):
            loaded = slots[: max(0, num_blocks - num_hits)]
            if num_blocks <= num_hits and self._states.slot_of(hits[num_blocks - 1].block_id) is not None:
                return PrefixStart(num_blocks, loaded, [])
            state_slots = self._state_slots(contents[num_blocks - 1].key) if can_load else []
            if state_slots:
                return PrefixStart(num_blocks, loaded, state_slots)
        return PrefixStart(0, [], [])

    def _slots_after(self, hits: Sequence[PrefixEntry], contents: Sequence[BlockContent]) -> list[int | None]:
        """Return the slots of the pages of the blocks after the hits."""
        usable: list[int] = []
        for content in contents[len(hits) :]:
            entry = self._index.find(content.key)
            if entry is not None and entry.content != content:
                break  # another content has the key
            usable.append(content.key)
        return [*self._tier.match(usable)] if self._has_kv else [None] * len(usable)

    def _state_slots(self, key: int) -> list[int]:
        """Return the slots of the state after the block of a key; empty: the tier has not all of its pages."""
        if state_page_keys(key, 1)[0] not in self._tier:
            return []
        slots = self._tier.match(state_page_keys(key, self.num_pages))
        return slots if len(slots) == self.num_pages else []

    def missing(self, hits: Sequence[PrefixEntry], contents: Sequence[BlockContent]) -> MissingPages:
        """Return what a sequence of some cacheable blocks could use of pages that are neither in the pool nor in the tier."""
        slots = self._slots_after(hits, contents)
        start, num_found = self._start(hits, contents, slots), len(hits) + len(slots)
        present = [content.key for content in contents[:num_found]]
        here = {hit.content.key for hit in hits if self._states.slot_of(hit.block_id) is not None}
        return MissingPages(
            [content.key for content in contents[num_found:]],
            start.num_blocks,
            self.num_pages,
            present,
            frozenset(here | {content.key for content in contents if self._state_slots(content.key)}),
        )

    def load(self, entry: PrefixEntry, state_slots: Sequence[int]) -> None:
        """Load a state in the next plan, into a checkpoint of a block that has none; its slots must be pinned until then."""
        slot = self._states.adopt(entry.block_id)
        for block_id, state_slot in zip(self.block_ids(slot), state_slots, strict=True):
            self._tier.load(state_slot, block_id)

    def note_use(self, entry: PrefixEntry) -> None:
        """Note that a sequence starts from the checkpoint of a block."""
        for _, key in self._pages(entry):
            self._tier.note_use(key)

    def offer(self, entry: PrefixEntry) -> None:
        """Called before the checkpoint of a block, if it has one, is dropped; saves it in the next plan if worthwhile."""
        pages = self._pages(entry)
        if not all(key in self._tier for _, key in pages) and self._tier.is_worth_saving(
            pages[0][1], entry.is_reused, entry.is_recomputed
        ):
            self._tier.save_all(pages, is_last=True)

    def note_checkpoint(self, sequence: Choice, position: int, entry: PrefixEntry) -> None:
        """Save a new checkpoint of a sequence where it is to be retained, or everything is to be saved at once."""
        is_of_prompt = position <= sequence.num_prompt_tokens
        if is_of_prompt and sequence.request.cache_retention_s > 0:
            self.retain(entry, sequence.request.cache_retention_s)
        if is_of_prompt or position % INTERVAL_TOKENS == 0:  # the others are replaced soon
            self._write_through(entry)

    def note_end(self, sequence: Choice) -> None:
        """Save the last checkpoint of a sequence that loses its blocks, where everything is to be saved at once."""
        if sequence.last_checkpoint is not None:
            self._write_through(sequence.last_checkpoint)

    def retain(self, entry: PrefixEntry, keep_s: float) -> None:
        """Save the checkpoint of a block in the next plan, if it has one, and keep it longer than others."""
        pages = self._pages(entry)
        if sum(self._tier.retain(key, block_id, keep_s) for block_id, key in pages) < len(pages):
            entry.is_reused = True  # it is worth saving when it leaves the pool

    def save_page(self, block_key: int, page: int) -> int | None:
        """Return the slot of a page of the state after a block, see KvAllocator.save_page."""
        key = state_page_keys(block_key, self.num_pages)[page]
        if key not in self._tier:
            entry = self._index.find(block_key)
            pages: Pages = () if entry is None else self._pages(entry)
            if not pages or not self._tier.save(*pages[page]):
                return None
        return self._tier.slot_of(key)

    def save_cached(self, max_pages: int) -> None:
        """Save checkpoints of up to max_pages pages that no tier has."""
        for block_id in self._states.block_ids():
            entry = self._index.entry_of(block_id)
            if entry is None or entry.is_state_saved:
                continue
            pages = [page for page in self._pages(entry) if page[1] not in self._tier]
            if len(pages) > max_pages:
                return
            entry.is_state_saved = self._tier.save_all(pages)
            max_pages -= len(pages)

    def _write_through(self, entry: PrefixEntry) -> None:
        pages = self._pages(entry)
        if pages:
            self._tier.write_through(pages[0][1], partial(self._pages, entry))

    def _pages(self, entry: PrefixEntry) -> Pages:
        """Return the pages of the checkpoint of a block; none: it has no checkpoint."""
        slot = self._states.slot_of(entry.block_id) if entry.is_live else None
        keys = state_page_keys(entry.content.key, self.num_pages)
        return [] if slot is None else list(zip(self.block_ids(slot), keys, strict=True))
