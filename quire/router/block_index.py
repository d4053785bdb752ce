"""BlockIndex: which KV blocks one engine holds, as its events say."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from quire.router.kv_events import BlockHash, Event, Medium, Removed, Stored

_KEY_BYTES = 8
_TOKEN_BYTES = array("i").itemsize
_PLAIN, _SEPARATE = b"plain", b"separate"


def chain_keys(token_ids: Sequence[int], block_size: int, *, is_separate: bool = False, parent: int | None = None) -> list[int]:
    """Return a key for each whole block of tokens that depends on all before it, too.

    Engines hash blocks each in its own way, so the router names them by their tokens.
    is_separate  the blocks of a salt, an adapter or an image; which one it is is not known, so all count as one
    parent       the key of the block before the first; None at the start of a prompt
    """
    last = (_SEPARATE if is_separate else _PLAIN) if parent is None else parent.to_bytes(_KEY_BYTES)
    keys: list[int] = []
    data = array("i", token_ids).tobytes()
    num_bytes = block_size * _TOKEN_BYTES
    for start in range(0, len(data) - num_bytes + 1, num_bytes):
        last = blake2b(data[start : start + num_bytes], digest_size=_KEY_BYTES, key=last).digest()
        keys.append(int.from_bytes(last))
    return keys


@dataclass(slots=True)
class _Block:
    key: int
    is_separate: bool
    media: set[Medium] = field(default_factory=set[Medium])


class BlockIndex:
    """The blocks of one engine by its own hashes, and their keys.

    num_unknown_parents  blocks that were left out, because the block before them is not known: its event was lost
    """

    def __init__(self) -> None:
        self.block_size: int | None = None
        self.num_unknown_parents = 0
        self.has_separate = False
        self._blocks: dict[BlockHash, _Block] = {}
        self._keys: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            self._remove(event)
        else:
            self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._keys.clear()

    def num_cached(self, keys: Sequence[int]) -> int:
        """Return how many blocks from the first on are held."""
        num = 0
        for key in keys:
            if key not in self._keys:
                break
            num += 1
        return num

    def _store(self, event: Stored) -> None:
        is_separate, parent = event.has_extra, None
        if event.parent is not None:
            before = self._blocks.get(event.parent)
            if before is None:
                self.num_unknown_parents += len(event.hashes)
                return
            parent, is_separate = before.key, before.is_separate or is_separate
        self.block_size = event.block_size
        self.has_separate = self.has_separate or is_separate
        keys = chain_keys(event.token_ids, event.block_size, is_separate=is_separate, parent=parent)
        for block_hash, key in zip(event.hashes, keys, strict=True):
            block = self._blocks.get(block_hash)
            if block is None:
                block = self._blocks[block_hash] = _Block(key, is_separate)
                self._keys[key] += 1
            block.media.add(event.medium)

    def _remove(self, event: Removed) -> None:
        for block_hash in event.hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            if event.medium[0] is None:  # publishers that name no medium have only one
                block.media.clear()
            block.media.discard(event.medium)
            if block.media:
                continue
            del self._blocks[block_hash]
            self._keys[block.key] -= 1
            if not self._keys[block.key]:
                del self._keys[block.key]
