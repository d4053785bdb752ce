"""Check the header of a safetensors file: it is untrusted, and its numbers are used as memory offsets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from quire.base.errors import ModelFormatError

_MAX_HEADER_BYTES = 16 << 20
_MAX_TENSORS = 1_000_000
_MAX_DIMENSIONS = 16
_METADATA = "__metadata__"
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


def check_safetensors(file: Path) -> None:
    """Raise ModelFormatError unless the file is a safetensors file whose tensors fill its data without gap or overlap.

    Unknown fields of a tensor, sizes of 0 and unaligned data are accepted.
    """
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > file_bytes - 8:
                raise _damaged(
                    file, f"it has {file_bytes} bytes and says that {header_bytes} of them are a header after 8 bytes"
                )
            if header_bytes > _MAX_HEADER_BYTES:
                raise _damaged(file, f"its header of {header_bytes} bytes is longer than the {_MAX_HEADER_BYTES} that are read")
            raw = stream.read(header_bytes)
    except OSError as error:
        raise _damaged(file, str(error)) from error
    entries = _parse(raw, file)
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(file, f"{_METADATA} must map strings to strings")
    if len(entries) > _MAX_TENSORS:
        raise _damaged(file, f"it holds {len(entries)} tensors, more than {_MAX_TENSORS}")
    _check_coverage((_check_entry(name, entry, file) for name, entry in entries.items()), file_bytes - 8 - header_bytes, file)


def _damaged(file: Path, problem: str) -> ModelFormatError:
    return ModelFormatError(f"{file} is damaged or not a safetensors file ({problem}); download it again")


def _parse(raw: bytes, file: Path) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice in its header")
        return found

    if raw[:1] != b"{":
        raise _damaged(file, "its header does not start with '{'")
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"its header is no JSON: {error}") from error
    return entries


def _check_entry(name: str, entry: object, file: Path) -> tuple[int, int]:
    """Return the bytes [begin, end) of a tensor."""
    if not isinstance(entry, dict):
        raise _damaged(file, f"tensor {name[:80]!r} must be described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise _damaged(file, f"tensor {name[:80]!r} has dtype {str(dtype)[:40]!r}; known: {', '.join(_ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_size(size) for size in shape):
        raise _damaged(file, f"tensor {name[:80]!r} has shape {str(shape)[:80]}; at most {_MAX_DIMENSIONS} sizes are allowed")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise _damaged(file, f"tensor {name[:80]!r} has data_offsets {str(offsets)[:80]}; expected two integers")
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise _damaged(file, f"tensor {name[:80]!r} of {num_bytes} bytes has data_offsets {offsets}")
    return offsets[0], offsets[1]


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_coverage(spans: Iterable[tuple[int, int]], data_bytes: int, file: Path) -> None:
    stop = 0
    for begin, end in sorted(spans):
        if begin != stop:
            raise _damaged(file, f"its tensors {'overlap' if begin < stop else 'leave a gap'} at byte {min(begin, stop)}")
        stop = end
    if stop != data_bytes:
        raise _damaged(file, f"its tensors take {stop} bytes, but {data_bytes} are there")
