"""HostTier: the mapping of pages to slots of the host tier, and the pages that the next step saves and loads.

A page is the KV of one full block, or a part of a recurrent state, see StatePages. Its key is the key of the block: the hash of
its tokens and of all tokens before them. The bytes are in the worker, which copies them between blocks and slots as the plans
say; this module only tracks them.

A save copies a block as it stands before the step, and all saves of a step come before its loads. So a slot that the step loads
from is never given to a save of the same step; and a block that the step loads into and gives away again needs no save.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.base.errors import InvariantError
from quire.base.ids import BlockId, RequestId
from quire.contracts.scheduler_config import KvSave

PageMoves = tuple[tuple[tuple[BlockId, int], ...], tuple[tuple[int, BlockId], ...]]
"""The page_saves, (block, slot), and page_loads, (slot, block), of a plan."""
Pages = Sequence[tuple[BlockId, int]]
"""Blocks that are saved together, with the keys of their pages."""
_NO_MOVES: PageMoves = ((), ())

_MAX_SEEN_KEYS = 1 << 16
"""Keys that are remembered of pages which were dropped without being saved: what comes a second time is worth saving."""
_SPARED_TURNS = 4
"""Pages that are to be retained stay until the tier could have been filled so many times with others."""


@dataclass(slots=True)
class HostTierStats:
    """Counts since the engine was made.

    num_saved        pages copied to the host tier
    num_loaded       pages copied from it into blocks
    num_not_saved    pages worth saving that left the pool without being saved, because a step may save only so many or every
                     slot was in use
    num_host_hits    pages that admissions found in the host tier
    num_disk_hits    those that were read from the disk tier for them
    num_peer_hits    those that were pulled from a prefill engine for them
    """

    num_saved: int = 0
    num_loaded: int = 0
    num_not_saved: int = 0
    num_host_hits: int = 0
    num_disk_hits: int = 0
    num_peer_hits: int = 0


class HostTier:
    """The slots of the host tier in least-recently-used order; owned by the KvAllocator of one scheduler.

    num_slots  pages that fit
    max_saves  pages that one step saves at most
    kv_save    see EngineConfig
    tracks_uses  set by a disk tier, which takes them
    """

    def __init__(self, num_slots: int, max_saves: int, kv_save: KvSave) -> None:
        self.num_slots, self._max_saves, self._kv_save = num_slots, max_saves, kv_save
        self._slots: OrderedDict[int, int] = OrderedDict()  # key -> slot, the least recently used first
        self._keys: list[int | None] = [None] * num_slots
        self._num_pins = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._keep_s = [0.0] * num_slots  # asked for by `retain`
        self._spared: dict[int, int] = {}  # slots of such pages, which are passed over until so many slots were taken
        self._num_taken = 0
        self._uses: dict[int, float] = {}  # keys that were hit or retained, with their keep_s, for the disk tier
        self.tracks_uses = False
        self._from_disk: set[int] = set()  # slots whose page was read from the disk tier and not used yet
        self._from_peer: set[int] = set()  # the same for pages that were pulled from a prefill engine
        self._held: dict[RequestId, list[int]] = {}
        self._saves: dict[int, BlockId] = {}
        self._written_later: OrderedDict[int, Callable[[], Pages]] = OrderedDict()  # what to save at once, by key
        self._loads: dict[BlockId, int] = {}
        self._moving: dict[int, PageMoves] = {}  # by step: its saves and loads, which may not be made yet
        self._num_loading: Counter[BlockId] = Counter()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self.stats = HostTierStats()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def key_of(self, slot: int) -> int | None:
        """Return the key of the page in a slot; None: it is free, or a page is being read into it."""
        return self._keys[slot]

    def slot_of(self, key: int) -> int | None:
        """Return the slot of a page, also of one that the next plan saves; None: it is not here."""
        return self._slots.get(key)

    def is_saving(self, slot: int) -> bool:
        """Return whether the next plan saves into a slot, or one whose pages are still being copied: it has other bytes until
        then."""
        return slot in self._saves or any(slot == other for saves, _ in self._moving.values() for _, other in saves)

    def is_loading(self, block_ids: Iterable[BlockId]) -> bool:
        """Return whether pages are being copied into one of these blocks, or will be by the next plan."""
        if not self._num_loading and not self._loads:
            return False
        return any(block_id in self._num_loading or block_id in self._loads for block_id in block_ids)

    def match(self, keys: Iterable[int]) -> list[int]:
        """Return the slots of the pages that a chain of keys begins with. They count as used: what is read next for the rest of
        the chain must not replace them."""
        found: list[tuple[int, int]] = []
        for key in keys:
            slot = self._slots.get(key)
            if slot is None:
                break
            found.append((key, slot))
        for key, _ in reversed(found):
            self._slots.move_to_end(key)
        return [slot for _, slot in found]

    def offer(self, block_id: BlockId, key: int, is_reused: bool, is_recomputed: bool) -> None:
        """Called before a published block is reused; saves its page in the next plan if that is worthwhile."""
        slot = self._loads.pop(block_id, None)
        if slot is not None:
            self.unpin([slot])
        if key not in self._slots and self.is_worth_saving(key, is_reused, is_recomputed):
            self.save_all([(block_id, key)], is_last=True)

    def is_worth_saving(self, key: int, is_reused: bool, is_recomputed: bool) -> bool:
        """Return whether what leaves the pool under a key is saved; asked once each time. See PrefixEntry."""
        if self._kv_save != "reused":
            return self._kv_save != "none"
        return is_reused or (self._was_seen(key) and not is_recomputed)

    def save_all(self, pages: Pages, is_last: bool = False) -> bool:
        """Save those of some pages that are not here, in the next plan; none of them, and return False, if it has no room.

        is_last  they leave the pool: what is not saved now is dropped, and counted
        """
        missing = [(block_id, key) for block_id, key in pages if key not in self._slots]
        has_room = len(missing) <= self._max_saves - len(self._saves)
        num_saved = sum(self.save(block_id, key) for block_id, key in missing) if has_room else 0
        self.stats.num_not_saved += (len(missing) - num_saved) * is_last
        return num_saved == len(missing)

    def save(self, block_id: BlockId, key: int) -> bool:
        """Save the page of a block in the next plan; return whether there was room."""
        slot = self._take_slot() if len(self._saves) < self._max_saves else None
        if slot is None:
            return False
        self._saves[slot] = block_id
        self._enter(key, slot)
        return True

    def write_through(self, key: int, find: Callable[[], Pages]) -> None:
        """Save what has just got a key in the pool, where all is to be saved at once; find: returns the pages of what the pool
        still has when a plan has room for them."""
        if self._kv_save == "write_through" and key not in self._slots:
            self._written_later[key] = find
            self._write_through()

    def _write_through(self) -> None:
        """Save as much of what waits as one step may; what has left the pool was saved or given up then."""
        while self._written_later and len(self._saves) < self._max_saves:
            key, find = self._written_later.popitem(last=False)
            pages = [page for page in find() if page[1] not in self._slots]
            if self._saves and len(pages) > self._max_saves - len(self._saves):
                self._written_later[key] = find
                self._written_later.move_to_end(key, last=False)
                return
            if not self.save_all(pages):
                return

    def retain(self, key: int, block_id: BlockId, keep_s: float) -> bool:
        """Save the page of a block in the next plan, whatever else is saved, and keep it longer than others; return whether
        there was room."""
        if self._kv_save == "none":
            return True
        if key in self._slots:
            self.note_use(key, keep_s)
        elif not self.save(block_id, key):
            return False
        slot = self._slots[key]
        self._keep_s[slot] = max(keep_s, self._keep_s[slot])
        self._spared[slot] = self._num_taken + _SPARED_TURNS * self.num_slots
        return True

    def keep_s(self, slot: int) -> float:
        """Return how much longer than others the page in a slot is to be kept."""
        return self._keep_s[slot]

    def note_use(self, key: int, keep_s: float = 0.0) -> None:
        """Note that a page was hit in the pool or here, so that it stays in the disk tier, too."""
        if self.tracks_uses:
            self._uses[key] = max(keep_s, self._uses.get(key, 0.0))

    def take_uses(self) -> dict[int, float]:
        """Return the keys of `note_use` with how much longer each is to be kept, and forget them."""
        uses, self._uses = self._uses, {}
        return uses

    def _was_seen(self, key: int) -> bool:
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > _MAX_SEEN_KEYS:
            self._seen.popitem(last=False)
        return False

    def pin(self, slots: Sequence[int]) -> None:
        """Keep pages until `unpin`."""
        for slot in slots:
            self._num_pins[slot] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Allow pages to be replaced again; one without a key, whose reading has failed, frees its slot."""
        for slot in slots:
            if self._num_pins[slot] == 0:
                raise InvariantError(f"slot {slot} of the host tier is unpinned, but was not pinned")
            self._num_pins[slot] -= 1
            if self._num_pins[slot] == 0 and self._keys[slot] is None:
                self._free.append(slot)

    def load(self, slot: int, block_id: BlockId) -> None:
        """Load a page into a block in the next plan. The slot must be pinned until then."""
        if block_id in self._loads:  # its sequence lost it again
            self.unpin([self._loads[block_id]])
        self._loads[block_id] = slot
        key = self._keys[slot]
        if key is not None:
            self._slots.move_to_end(key)
        if slot in self._from_disk:
            self._from_disk.remove(slot)
            self.stats.num_disk_hits += 1
        elif slot in self._from_peer:
            self._from_peer.remove(slot)
            self.stats.num_peer_hits += 1
        else:
            self.stats.num_host_hits += 1
            if key is not None:
                self.note_use(key)
        self.pin([slot])

    def take_moves(self, step_id: int) -> PageMoves:
        """Return the page_saves and page_loads of a plan. Their slots are pinned until `end_moves`."""
        self._write_through()
        saves = tuple((block_id, slot) for slot, block_id in self._saves.items())
        loads = tuple((slot, block_id) for block_id, slot in self._loads.items())
        self._saves.clear()
        self._loads.clear()
        self.stats.num_saved += len(saves)
        self.stats.num_loaded += len(loads)
        self.pin([slot for _, slot in saves])  # those of loads are
        if saves or loads:  # what waited to be saved may have left the pool
            self._moving[step_id] = saves, loads
        self._num_loading.update(block_id for _, block_id in loads)
        return saves, loads

    def saved_slots(self, step_ids: Iterable[int]) -> list[int]:
        """Return the slots of the page_saves of these plans, before `end_moves`."""
        return [slot for step_id in step_ids for _, slot in self._moving.get(step_id, _NO_MOVES)[0]]

    def end_moves(self, step_id: int) -> PageMoves:
        """Record that the pages of a plan have been copied, or never will be; return its saves and loads. A plan without any,
        or one whose moves have ended, has none."""
        if step_id not in self._moving:
            return _NO_MOVES
        saves, loads = self._moving.pop(step_id)
        self.unpin(slot for _, slot in saves)
        self.unpin(slot for slot, _ in loads)
        self._num_loading -= Counter(block_id for _, block_id in loads)
        return saves, loads

    @property
    def has_moves(self) -> bool:
        """Whether the next plan saves or loads a page."""
        return bool(self._saves or self._loads or self._written_later)

    @property
    def is_moving(self) -> bool:
        """Whether pages of an earlier plan may still be on their way."""
        return bool(self._moving)

    def reserve(self, num_slots: int) -> list[int]:
        """Return up to num_slots slots without a page, pinned, to be filled from the disk tier or a peer."""
        slots: list[int] = []
        while len(slots) < num_slots and (slot := self._take_slot()) is not None:
            self._num_pins[slot] = 1
            slots.append(slot)
        return slots

    def install(self, slot: int, key: int, source: Literal["disk", "peer"] = "disk") -> None:
        """Enter the page that was read into a reserved slot, which stays pinned; if an equal page was saved meanwhile, that one
        stays."""
        if key not in self._slots:
            self._enter(key, slot)
            (self._from_disk if source == "disk" else self._from_peer).add(slot)

    def hold(self, request_id: RequestId, slots: list[int]) -> None:
        """Keep pinned slots for a request until it is admitted or has ended, see `let_go`."""
        self._held.setdefault(request_id, []).extend(slots)

    def let_go(self, request_id: RequestId) -> None:
        """Unpin what is held for a request."""
        if self._held:
            self.unpin(self._held.pop(request_id, ()))

    def drop_slots(self, slots: Iterable[int]) -> None:
        """Drop the pages in slots whose content is unknown, because the step that saved them failed."""
        for slot in slots:
            key = self._keys[slot]
            if key is not None:
                self._forget(key, slot)
                if self._num_pins[slot] == 0:
                    self._free.append(slot)

    def find_problem(self) -> str | None:
        """Return a description of an inconsistency, for check_invariants; O(slots)."""
        if any(self._keys[slot] != key for key, slot in self._slots.items()):
            return "finds a page in a slot that has another one"
        if sum(key is not None for key in self._keys) != len(self._slots):
            return "has a page in two slots"
        if any(self._keys[slot] is not None or self._num_pins[slot] for slot in self._free) or min(self._num_pins) < 0:
            return "has a free slot in use"
        num_lost = sum(k is None and p == 0 for k, p in zip(self._keys, self._num_pins, strict=True)) - len(self._free)
        return None if num_lost == 0 else f"has lost {num_lost} slots"

    @property
    def num_pinned(self) -> int:
        """Slots that are in use by a load, a reading or a writing."""
        return sum(num_pins > 0 for num_pins in self._num_pins)

    def _take_slot(self) -> int | None:
        """Return a slot without a page: a free one, or that of the page which was not used for the longest time."""
        self._num_taken += 1
        if self._free:
            return self._free.pop()
        # A slot that the next plan saves into may be taken again: then it has the later page only.
        spared: list[int] = []
        for key, slot in self._slots.items():
            if self._num_pins[slot] == 0:
                if self._spared.get(slot, 0) < self._num_taken:
                    break
                spared.append(key)
        else:
            if not spared:
                return None
            key = spared[0]
        for other in spared:
            self._slots.move_to_end(other)
        slot = self._slots[key]
        self._forget(key, slot)
        return slot

    def _enter(self, key: int, slot: int) -> None:
        self._slots[key] = slot
        self._keys[slot] = key

    def _forget(self, key: int, slot: int) -> None:
        del self._slots[key]
        self._keys[slot] = None
        self._from_disk.discard(slot)
        self._from_peer.discard(slot)
        self._spared.pop(slot, None)
        self._keep_s[slot] = 0.0
        self._saves.pop(slot, None)
