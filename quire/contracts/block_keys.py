"""Keys of KV blocks: the hash of what a full block holds and of all that comes before it, the same in every process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

_KEY_BYTES = 16


def root_key(root: str) -> int:
    """Return the key from which the chains under `root` start."""
    return int.from_bytes(blake2b(root.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest())


def block_key(parent_key: int, token_ids: Sequence[int]) -> int:
    """Return the 128-bit key of a full block that follows the block of parent_key."""
    content = parent_key.to_bytes(_KEY_BYTES) + array("q", token_ids).tobytes()
    return int.from_bytes(blake2b(content, digest_size=_KEY_BYTES).digest())


def state_page_keys(key: int, num_pages: int) -> list[int]:
    """Return the keys of the pages that hold the recurrent state after the block of a key."""
    return [key ^ mask for mask in _state_masks(num_pages)]


@cache
def _state_masks(num_pages: int) -> list[int]:
    return [root_key(f"page {index} of a recurrent state") for index in range(num_pages)]


def block_keys(root: str, token_ids: Sequence[int], block_size: int) -> list[int]:
    """Return the keys of the whole blocks that a sequence of tokens under `root` begins with."""
    keys: list[int] = []
    key = root_key(root)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        key = block_key(key, token_ids[start : start + block_size])
        keys.append(key)
    return keys
