"""decode_batch: KV events as vLLM, SGLang and quire publish them, arrays or maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec

BlockHash = bytes | int
"""Engines name blocks by bytes or by integers, each in its own way."""
Medium = tuple[str | None, int]
"""Where a block lies: the name of the medium, and the number of the group of layers in hybrid models."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    "group_idx",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


class KvEventError(ValueError):
    """A message that is no batch of KV events."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that were stored, each after the one before it.

    parent     the block before the first; None at the start of a prompt
    token_ids  of all blocks together
    has_extra  what is not in the tokens separates the blocks from others: a salt, an adapter, an image
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: Medium
    has_extra: bool


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that a medium holds no more."""

    hashes: tuple[BlockHash, ...]
    medium: Medium


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block is held any more."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one message. time_s: when it was made, by the publisher's clock."""

    time_s: float
    events: tuple[Event, ...]


class _StoredFields(msgspec.Struct):
    block_hashes: list[BlockHash]
    token_ids: list[TokenId]
    block_size: int
    parent_block_hash: BlockHash | None = None
    medium: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class _RemovedFields(msgspec.Struct):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


def decode_batch(payload: bytes) -> Batch:
    """Return what a message says. Kinds of events that are not known are left out. Raises KvEventError."""
    try:
        found = msgspec.msgpack.decode(payload)
        if not isinstance(found, list) or len(cast("list[Any]", found)) < 2:
            raise KvEventError("it is not an array of a time and events")
        parts = cast("list[Any]", found)
        time_s = msgspec.convert(parts[0], float, strict=False)
        raw = msgspec.convert(parts[1], list[list[Any] | dict[str, Any]])
        events = [event for one in raw if (event := _event(one)) is not None]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KvEventError(str(error)) from None
    return Batch(time_s, tuple(events))


def _event(raw: list[Any] | dict[str, Any]) -> Event | None:
    kind = raw.get("type") if isinstance(raw, dict) else raw[0] if raw else None
    if kind == "BlockStored":
        return _stored(msgspec.convert(_fields(raw, _STORED_FIELDS), _StoredFields))
    if kind == "BlockRemoved":
        fields = msgspec.convert(_fields(raw, _REMOVED_FIELDS), _RemovedFields)
        return Removed(tuple(fields.block_hashes), (fields.medium, fields.group_idx or 0))
    if kind == "AllBlocksCleared":
        return Cleared()
    if not isinstance(kind, str):
        raise KvEventError("an event does not say its kind")
    return None


def _fields(raw: list[Any] | dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else dict(zip(names, raw[1:], strict=False))


def _stored(fields: _StoredFields) -> Stored:
    size, num_blocks = fields.block_size, len(fields.block_hashes)
    if size < 1 or len(fields.token_ids) != size * num_blocks:
        raise KvEventError(f"{num_blocks} blocks of {size} tokens have {len(fields.token_ids)}")
    has_extra = any(fields.extra_keys or ()) or fields.lora_name is not None or fields.lora_id is not None
    return Stored(
        tuple(fields.block_hashes),
        fields.parent_block_hash,
        tuple(fields.token_ids),
        size,
        (fields.medium, fields.group_idx or 0),
        has_extra,
    )
