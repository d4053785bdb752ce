"""bitsandbytes: 4-bit codes of a table in blocks of the flattened weight (Dettmers et al., 2023), or int8 by row."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.quant.fields import JsonFields, is_finite_number
from quire.quant.float8 import exact_quotient
from quire.quant.stored_parts import StoredParts
from quire.quant.weight import CodeForm, QuantizedWeight, StoredWeight

_STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
PARTS = (
    *("SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *_STATES.values(),
)
_MAX_JSON_BYTES = 4096
_NUM_LEVELS, _NUM_NESTED_LEVELS = 16, 256
_F32, _U8 = (torch.float32,), (torch.uint8,)


@dataclass(frozen=True, slots=True)
class _State:
    """The JSON state of a 4-bit weight.

    block, nested_block  values that share a scale, and scales that share a nested scale; nested_block None: scales are f32
    """

    shape: tuple[int, int]
    block: int
    nested_block: int | None
    nested_offset: float


def read_bitsandbytes(parts: StoredParts) -> StoredWeight:
    """Return the weight of a module: int8 codes, or a float tensor if it is 4-bit. Raises ModelFormatError."""
    if "SCB" in parts:
        return _read_int8(parts)
    return _read_4bit(parts)


def _read_int8(parts: StoredParts) -> StoredWeight:
    num_rows, num_columns = parts.take("weight", (torch.int8,), (None, None)).shape
    parts.take("SCB", _F32, (num_rows,))
    others = [part for part in parts.names() if part not in ("weight", "SCB", "weight_format")]
    if others:
        raise parts.wrong(others[0], "only without SCB")

    def load() -> QuantizedWeight:
        # A format other than 0 is a device-specific layout of rows and columns.
        if "weight_format" in parts and int(parts.take("weight_format", (*_U8, torch.int64), (), (1,))) != 0:
            raise parts.damaged("weight_format", "is not 0 (rows of int8), the only one that is supported")
        codes = parts.take("weight", (torch.int8,), (num_rows, num_columns))
        scale = parts.scale("SCB", parts.take("SCB", _F32, (num_rows,)))
        return QuantizedWeight(codes, exact_quotient(scale, 127).view(num_rows, 1))

    return parts.integers((num_rows, num_columns), CodeForm.of(8, num_columns), load)


def _read_4bit(parts: StoredParts) -> StoredWeight:
    state = _read_state(parts)
    num_values = math.prod(state.shape)
    num_bytes, num_blocks = -(-num_values // 2), -(-num_values // state.block)
    parts.take("weight", _U8, (num_bytes, 1), (1, num_bytes), (num_bytes,))
    parts.take("weight.quant_map", _F32, (_NUM_LEVELS,))
    if state.nested_block is None:
        parts.take("weight.absmax", _F32, (num_blocks,))
    else:
        parts.take("weight.absmax", _U8, (num_blocks,))
        parts.take("weight.nested_absmax", _F32, (-(-num_blocks // state.nested_block),))
        parts.take("weight.nested_quant_map", _F32, (_NUM_NESTED_LEVELS,))
    return parts.floats(state.shape, lambda: _load_4bit(parts, state))


def _load_4bit(parts: StoredParts, state: _State) -> Tensor:
    """Return [O, K] f32. The first value of a byte is in its high half."""
    octets = parts.take("weight", _U8, (None, None), (None,)).flatten()
    table = parts.scale("weight.quant_map", parts.take("weight.quant_map", _F32, (_NUM_LEVELS,)))
    # Two values at once, with a table indexed by bytes.
    pairs = torch.stack([table.repeat_interleave(_NUM_LEVELS), table.repeat(_NUM_LEVELS)], 1)
    num_values = math.prod(state.shape)
    values = pairs[octets.int()].flatten()[:num_values]
    scale = _absmax(parts, state)
    num_whole = num_values // state.block * state.block
    values[:num_whole].view(-1, state.block).mul_(scale[: num_whole // state.block, None])
    if num_whole < num_values:
        values[num_whole:] *= scale[-1]
    return values.view(state.shape)


def _absmax(parts: StoredParts, state: _State) -> Tensor:
    """Return the scales of the blocks, f32."""
    if state.nested_block is None:
        return parts.scale("weight.absmax", parts.take("weight.absmax", _F32, (None,)))
    codes = parts.take("weight.absmax", _U8, (None,))
    table = parts.take("weight.nested_quant_map", _F32, (_NUM_NESTED_LEVELS,))
    nested = parts.scale("weight.nested_absmax", parts.take("weight.nested_absmax", _F32, (None,)))
    outer = nested.repeat_interleave(state.nested_block)[: len(codes)]
    return parts.scale("weight.nested_quant_map", table)[codes.int()] * outer + state.nested_offset


def _read_state(parts: StoredParts) -> _State:
    present = [(kind, part) for kind, part in _STATES.items() if part in parts]
    if len(present) != 1:
        raise ModelFormatError(
            f"{parts.module} must have exactly one of {', '.join(_STATES.values())} (or SCB, for int8), got "
            f"{[part for _, part in present] or parts.names()}"
        )
    kind, part = present[0]
    stored = parts.take(part, _U8, (None,))
    if stored.numel() > _MAX_JSON_BYTES:
        raise parts.damaged(part, f"has {stored.numel()} bytes of JSON, expected at most {_MAX_JSON_BYTES}")
    try:
        values = json.loads(bytes(stored.tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise parts.damaged(part, f"cannot be read as JSON ({error})") from error
    fields = JsonFields(values, f"{parts.module}.{part}")
    if fields.string("quant_type", default=kind) != kind:
        raise fields.wrong("quant_type", kind)
    shape = fields.raw("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and 0 < size < 1 << 31 for size in shape):
        raise fields.wrong("shape", "two positive sizes below 2**31")
    block = fields.integer("blocksize", minimum=1, maximum=1 << 16)
    nested_block, nested_offset = None, 0.0
    if fields.has("nested_blocksize"):
        nested_block = fields.integer("nested_blocksize", minimum=1, maximum=1 << 16)
        offset = fields.raw("nested_offset")
        if not is_finite_number(offset):
            raise fields.wrong("nested_offset", "a finite number")
        nested_offset = float(offset)
    return _State((shape[0], shape[1]), block, nested_block, nested_offset)
