"""PrefixIndex: finds the blocks that already hold the KV of a prefix.

The key of a block is the hash of the previous block's key and of its own tokens. The chain starts at a root that
covers everything else that changes the KV or separates requests (the cache salt). A hash alone is never trusted:
a hit also needs the same root, the same tokens, and the same parent entry, by identity and not by its key.

Blocks are not de-duplicated: the first publisher of a content is indexed, and later holders of the same content keep their own
block. So the block ids of a sequence never change and block tables only grow (except for copy on write).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from quire.base.ids import BlockId


@dataclass(frozen=True, slots=True)
class BlockContent:
    """The content of one full block of a sequence: its tokens, and a key that covers all earlier ones."""

    key: int
    root: str
    token_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """A published block. Compared by identity, so that it is never confused with a later entry with the same key.

    parent   the entry of the block before it; None for the first block
    place    the home of the block, see BlockLayout; 0 without homes
    is_live  True until its block is reused; an entry whose parent is not live can no longer be found
    is_reused  another sequence has hit it, or it was loaded from a tier; known only with tiers
    is_recomputed  the sequence that has published it had been preempted, so it may not be the first time that it did
    is_saved   its page was saved while the engine was idle; is_state_saved: the same of its checkpoint
    """

    content: BlockContent
    parent: PrefixEntry | None
    block_id: BlockId
    place: int = 0
    is_live: bool = True
    is_reused: bool = False
    is_recomputed: bool = False
    is_saved: bool = False
    is_state_saved: bool = False

    def holds(self, parent: PrefixEntry | None, content: BlockContent) -> bool:
        """Return whether this is `content` after `parent`."""
        mine = self.content
        return self.parent is parent and mine.root == content.root and mine.token_ids == content.token_ids

    @property
    def is_orphan(self) -> bool:
        """Whether the block before it has been reused."""
        return self.parent is not None and not self.parent.is_live


class PrefixIndex:
    """The published blocks by key and by block id; at most one block per key at each place, and one key per block.

    on_drop(id) is called when a published block is forgotten.
    num_places  homes, each with a prefix cache of its own; chains do not cross places
    changes  (entry, whether it was published or dropped) in order, for who takes them away; None: they are not recorded. A
             content at several places is published with the first and dropped with the last of them
    """

    def __init__(self, on_drop: Callable[[BlockId], None] | None = None, num_places: int = 1) -> None:
        self._on_drop = on_drop
        self.changes: list[tuple[PrefixEntry, bool]] | None = None
        self._entries: list[dict[int, PrefixEntry]] = [{} for _ in range(num_places)]  # by key, of each place
        self._entry_by_block: dict[BlockId, PrefixEntry] = {}

    def __len__(self) -> int:
        return len(self._entry_by_block)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._entry_by_block

    def iter_entries(self) -> Iterator[tuple[int, BlockId, PrefixEntry]]:
        """Yield (key, block id, entry) of every published block."""
        for block_id, entry in self._entry_by_block.items():
            yield entry.content.key, block_id, entry

    def entry_of(self, block_id: BlockId) -> PrefixEntry | None:
        """Return the entry of a block; None if it is not published."""
        return self._entry_by_block.get(block_id)

    def find(self, key: int, place: int = 0) -> PrefixEntry | None:
        """Return the entry under a key, unverified."""
        return self._entries[place].get(key)

    def match(self, contents: Iterable[BlockContent], place: int = 0) -> list[PrefixEntry]:
        """Return the entries of the longest published chain at the start of `contents`, which begins at a sequence's first
        block."""
        matched: list[PrefixEntry] = []
        parent: PrefixEntry | None = None
        entries = self._entries[place]
        for content in contents:
            entry = entries.get(content.key)
            if entry is None or not entry.holds(parent, content):
                break
            matched.append(entry)
            parent = entry
        return matched

    def publish(
        self, parent: PrefixEntry | None, content: BlockContent, block_id: BlockId, place: int = 0
    ) -> PrefixEntry | None:
        """Add a block whose KV is complete, and return the entry of its content.

        This is the entry of an earlier publisher if there is one. None if another content has the same key, which stays.
        A published block may be published again, with the same content.
        """
        entries = self._entries[place]
        found = entries.get(content.key)
        if found is not None:
            if found.holds(parent, content):
                return found
            if not found.is_orphan:
                return None
            self.drop(found.block_id)
        entry = PrefixEntry(content, parent, block_id, place)
        is_first = not self._is_anywhere(content.key)
        entries[content.key] = entry
        self._entry_by_block[block_id] = entry
        if self.changes is not None and is_first:
            self.changes.append((entry, True))
        return entry

    def _is_anywhere(self, key: int) -> bool:
        return any(key in entries for entries in self._entries)

    def move(self, entry: PrefixEntry, block_id: BlockId) -> None:
        """Let a live entry name another block with the same content, which is not published."""
        del self._entry_by_block[entry.block_id]
        entry.block_id = block_id
        self._entry_by_block[block_id] = entry

    def drop(self, block_id: BlockId) -> None:
        """Drop a block, if it is published, because its content is about to change."""
        entry = self._entry_by_block.pop(block_id, None)
        if entry is not None:
            del self._entries[entry.place][entry.content.key]
            entry.is_live = False
            if self.changes is not None and not self._is_anywhere(entry.content.key):
                self.changes.append((entry, False))
            if self._on_drop is not None:
                self._on_drop(block_id)
