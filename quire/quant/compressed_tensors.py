"""compressed-tensors: packed integers, plain int8, and float8, by the scheme of the module's group."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.quant.compressed_config import CompressedScheme, CompressedTensorsConfig
from quire.quant.float4 import read_mxfp4, read_nvfp4
from quire.quant.fp8 import read_fp8_blocks
from quire.quant.packing import affine_weight, order_columns, signed_levels, unpack_codes, words_for
from quire.quant.stored_parts import FLOATS, INTEGERS, StoredParts
from quire.quant.weight import CodeForm, QuantizedWeight, StoredWeight

PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
_FLOAT4_READERS = {"nvfp4-pack-quantized": read_nvfp4, "mxfp4-pack-quantized": read_mxfp4}
_PARTS_BESIDE_SCALE = {
    "pack-quantized": ("weight_packed", "weight_shape", "weight_g_idx"),
    "int-quantized": ("weight",),
    "float-quantized": ("weight",),
    "nvfp4-pack-quantized": ("weight_packed", "weight_global_scale"),
    "mxfp4-pack-quantized": ("weight_packed",),
}
_ZERO_POINTS = (torch.int8, torch.int32, torch.int64)


def read_compressed(parts: StoredParts, config: CompressedTensorsConfig) -> StoredWeight:
    """Return the weight of a module; it is unpacked when it is loaded. Raises ModelFormatError."""
    scheme = config.find_scheme(parts.module)
    if scheme is None:
        raise ModelFormatError(
            f"{parts.module} is stored quantised, but the quantisation config ignores it or has no group for it; "
            "the checkpoint contradicts itself"
        )
    _check_parts(parts, scheme)
    if scheme.layout == "pack-quantized":
        return _read_packed(parts, scheme)
    if scheme.layout == "int-quantized":
        return _read_int8(parts, scheme)
    if scheme.layout in _FLOAT4_READERS:
        return _FLOAT4_READERS[scheme.layout](parts)
    num_rows, num_columns = parts.take("weight", (torch.float8_e4m3fn,), (None, None)).shape
    if scheme.strategy == "tensor":
        return read_fp8_blocks(parts, "weight_scale", (max(1, num_rows), max(1, num_columns)))
    if scheme.block is not None:
        return read_fp8_blocks(parts, "weight_scale", scheme.block)
    num_groups = parts.num_groups(num_columns, scheme.group_size)
    return read_fp8_blocks(parts, "weight_scale", (1, max(1, num_columns // max(1, num_groups))))


def _check_parts(parts: StoredParts, scheme: CompressedScheme) -> None:
    allowed = {"weight_scale", *_PARTS_BESIDE_SCALE[scheme.layout]}
    if not scheme.is_symmetric and scheme.layout in ("pack-quantized", "int-quantized"):
        allowed.add("weight_zero_point")
    for part in parts.names():
        if part not in allowed:
            kind = "symmetric" if scheme.is_symmetric else "asymmetric"
            raise parts.wrong(part, f"of {', '.join(sorted(allowed))} for a {kind} module in {scheme.layout}")
    if scheme.is_ordered and "weight_g_idx" not in parts:
        raise _unknown_order(parts, "is missing")


def _unknown_order(parts: StoredParts, problem: str) -> ModelFormatError:
    return ModelFormatError(
        f"{parts.module}.weight_g_idx {problem} although actorder of the quantisation config is 'group': which columns "
        "share a scale cannot be determined; get the checkpoint again, or a version with actorder 'weight' or null"
    )


def _scale_shapes(scheme: CompressedScheme, num_rows: int, num_groups: int) -> tuple[tuple[int, ...], ...]:
    if scheme.strategy == "tensor":
        return (), (1,), (1, 1)
    return ((num_rows, num_groups), (num_rows,)) if num_groups == 1 else ((num_rows, num_groups),)


def _per_row(values: Tensor, num_rows: int, num_groups: int) -> Tensor:
    """Return [O, G] from stored values: one for the tensor, one per row, or one per group."""
    return (values.view(1, 1) if values.numel() == 1 else values.view(num_rows, num_groups)).expand(num_rows, num_groups)


def _read_packed(parts: StoredParts, scheme: CompressedScheme) -> StoredWeight:
    shape = parts.take("weight_shape", INTEGERS, (2,))
    num_rows, num_columns = (int(size) for size in shape)
    if not 0 < num_rows < 1 << 31 or not 0 < num_columns < 1 << 31:
        raise parts.damaged("weight_shape", f"says [{num_rows}, {num_columns}], expected two positive sizes below 2**31")
    num_words = words_for(num_columns, scheme.bits)
    num_groups = parts.num_groups(num_columns, scheme.group_size)
    parts.take("weight_packed", (torch.int32,), (num_rows, num_words))
    parts.take("weight_scale", FLOATS, *_scale_shapes(scheme, num_rows, num_groups))
    if not scheme.is_symmetric:
        num_columns_of_zeros = 1 if scheme.strategy == "tensor" else num_groups
        zero_rows = words_for(1 if scheme.strategy == "tensor" else num_rows, scheme.bits)
        parts.take("weight_zero_point", (torch.int32,), (zero_rows, num_columns_of_zeros))
    if "weight_g_idx" in parts:
        parts.take("weight_g_idx", INTEGERS, (num_columns,))
    group_size, has_order = num_columns // max(1, num_groups), "weight_g_idx" in parts
    codes = CodeForm.of(scheme.bits, group_size, not scheme.is_symmetric, has_order, scheme.is_token_quantized)
    return parts.integers((num_rows, num_columns), codes, lambda: load_packed(parts, scheme, num_rows, num_columns, num_groups))


def load_packed(
    parts: StoredParts, scheme: CompressedScheme, num_rows: int, num_columns: int, num_groups: int
) -> QuantizedWeight:
    columns = None
    if "weight_g_idx" in parts:
        groups = parts.take("weight_g_idx", INTEGERS, (num_columns,))
        # A table that holds only -1 was never filled: the columns are in order.
        if not bool((groups == -1).all()):
            columns = order_columns(parts, "weight_g_idx", groups, num_groups)
        elif scheme.is_ordered:
            raise _unknown_order(parts, "holds -1 everywhere")
    packed = parts.take("weight_packed", (torch.int32,), (num_rows, None))
    codes = unpack_codes(packed, scheme.bits, num_columns)
    if columns is not None:
        codes = codes[:, columns]
    shapes = _scale_shapes(scheme, num_rows, num_groups)
    stored = parts.scale("weight_scale", parts.take("weight_scale", FLOATS, *shapes))
    scale = _per_row(stored, num_rows, num_groups).contiguous()
    zeros = None
    if not scheme.is_symmetric:
        words = parts.take("weight_zero_point", (torch.int32,), (None, None)).t()
        unpacked = unpack_codes(words, scheme.bits, 1 if scheme.strategy == "tensor" else num_rows).t()
        zeros = _per_row(unpacked.contiguous(), num_rows, num_groups)
    return affine_weight(codes, scale, zeros, scheme.bits, columns, scheme.is_token_quantized)


def _read_int8(parts: StoredParts, scheme: CompressedScheme) -> StoredWeight:
    num_rows, num_columns = parts.take("weight", (torch.int8,), (None, None)).shape
    num_groups = parts.num_groups(num_columns, scheme.group_size)
    shapes = _scale_shapes(scheme, num_rows, num_groups)
    scale_shape = tuple(parts.take("weight_scale", FLOATS, *shapes).shape)
    if not scheme.is_symmetric:
        parts.take("weight_zero_point", _ZERO_POINTS, scale_shape)
    group_size, is_token = num_columns // max(1, num_groups), scheme.is_token_quantized
    codes = CodeForm.of(scheme.bits, group_size, not scheme.is_symmetric, is_token=is_token)
    return parts.integers((num_rows, num_columns), codes, lambda: _load_int8(parts, scheme, num_rows, num_columns, num_groups))


def _load_int8(
    parts: StoredParts, scheme: CompressedScheme, num_rows: int, num_columns: int, num_groups: int
) -> QuantizedWeight:
    codes = parts.take("weight", (torch.int8,), (num_rows, num_columns))
    levels = signed_levels(scheme.bits)
    low, high = -(1 << (scheme.bits - 1)), (1 << (scheme.bits - 1)) - 1
    if scheme.bits < 8 and (int(codes.min()) < low or int(codes.max()) > high):
        raise parts.damaged("weight", f"holds {int(codes.min())} to {int(codes.max())}, expected {low} to {high}")
    shapes = _scale_shapes(scheme, num_rows, num_groups)
    stored = parts.scale("weight_scale", parts.take("weight_scale", FLOATS, *shapes))
    scale = _per_row(stored, num_rows, num_groups).contiguous()
    offset = None
    if not scheme.is_symmetric:
        zeros = parts.take("weight_zero_point", _ZERO_POINTS, tuple(stored.shape))
        if int(zeros.min()) < low or int(zeros.max()) > high:
            raise parts.damaged("weight_zero_point", f"holds values outside {low} to {high}")
        offset = scale * -_per_row(zeros.float(), num_rows, num_groups) if bool(zeros.any()) else None
    return QuantizedWeight(codes, scale, offset, levels, None, scheme.is_token_quantized)
