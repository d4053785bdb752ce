"""Pack parameters for the native kernels: once, at load, into the layouts of kernels/cpu/csrc/weight.h."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.base.cpu_caches import largest_cache_bytes
from quire.base.logging import get_logger
from quire.kernels.cpu.pages import SpentPages, is_file_view
from quire.parallel.step_pacer import StepPacer
from quire.quant.float8 import Float8Weight
from quire.quant.parameters import DenseOrQuantized
from quire.quant.weight import QuantizedWeight, StoredWeight

logger = get_logger(__name__)

_CONVERTED_WEIGHTS = 1 << 22
"""Number of weights that are converted to another dtype at once, if the stored dtype differs from the packed one."""

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_INPUT_GROUP = 256
"""Inputs that share a scale when they are quantised, unless the checkpoint says so or groups of the weight are larger."""

_STEP = 4
"""Columns of one byte are packed in groups of this many."""
_MAX_COLUMNS = 60000
"""Maximum columns of an integer weight, whose sums must be exact."""

_MAX_OFFSET = 32768.0
"""The largest offset of a group, in units of its row's scale."""

NativeWeight = Any
"""`_native.Weight`: an extension type, which no type checker sees."""


class WeightPacker:
    """Packs weights [N, K] for one model.

    native   the extension module
    dtype    torch.bfloat16, float16 or float32: how weights that are not quantised are kept
    is_short compress bfloat16 to 12 bits without loss if few weights are exceptions: fewer bytes to read, more arithmetic
    num_threads  that pack; None: all of the process
    pacer    bounds what is read and written next to a step; None: nothing does
    """

    def __init__(
        self,
        native: ModuleType,
        dtype: torch.dtype,
        is_short: bool = False,
        num_threads: int | None = None,
        pacer: StepPacer | None = None,
    ) -> None:
        self._num_threads, self._pacer = num_threads, pacer
        self._native = native
        self._dtype = dtype
        self._is_short = is_short
        self.num_bytes = 0
        self._has_warned = False

    def _threads(self) -> int:
        return self._num_threads or torch.get_num_threads()

    @property
    def is_near(self) -> bool:
        """Whether the packed weights may stay in a cache: they take at most half of the largest one, which is shared."""
        return 2 * self.num_bytes <= largest_cache_bytes()

    def pack(
        self,
        weight: DenseOrQuantized,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        may_be_short: bool = True,
        is_exact: bool = False,
    ) -> NativeWeight:
        """Return the packed weight; `bias` [N] is added to its outputs. Pages of a mapped file are released during packing.

        dtype         of a weight that is not packed as integers, if it differs from the model's
        may_be_short  False: plain bfloat16, for weights that run as a pair and must have the same format
        is_exact      a dense weight is converted to `dtype` without rounding to the model's dtype first
        """
        weight = self.fitting(weight, dtype)
        if isinstance(weight, QuantizedWeight):
            packed = self._pack_codes(weight, bias)
        elif isinstance(weight, Float8Weight):
            packed = self._pack_float8(weight, bias)
        else:
            packed = self._pack_dense(weight, bias, dtype or self._dtype, may_be_short, is_exact)
        self.num_bytes += packed.num_bytes
        return packed

    def fitting(self, weight: DenseOrQuantized, dtype: torch.dtype | None = None) -> DenseOrQuantized:
        """Return a weight, made dense if no native layout can hold its stored form; dtype as in `pack`.

        Call with whole weights: with parts of the rows, ranks could decide differently.
        """
        if isinstance(weight, QuantizedWeight) and not _is_packable(weight):
            self._warn_once("quantised")
            return weight.dequantize(self._dtype)
        if isinstance(weight, Float8Weight) and (dtype is not None or not self._is_float8_packable(weight)):
            if dtype is None:
                self._warn_once("float8")
            return weight.dequantize(dtype or self._dtype)
        return weight

    def _warn_once(self, kind: str) -> None:
        if not self._has_warned:
            logger.warning("some %s weights do not fit the native layouts and are kept in %s", kind, self._dtype)
        self._has_warned = True

    def _pack_dense(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, may_be_short: bool, is_exact: bool = False
    ) -> NativeWeight:
        num_rows, num_columns = weight.shape
        is_view = weight.dtype == dtype == self._dtype and weight.is_contiguous()
        step = num_rows if is_view else max(16, _CONVERTED_WEIGHTS // num_columns // 16 * 16)
        step = min(step, self._paced_rows(num_rows, num_columns * (weight.element_size() + dtype.itemsize)))
        spent = SpentPages()
        # Only pages of a mapped file are reloaded when they are read again; releasing other memory would zero it.
        is_mapped = is_view and is_file_view(weight)
        packed: NativeWeight = None
        for first in range(0, num_rows, step):
            rows = weight[first : first + step]
            self.take(len(rows) * num_columns * (weight.element_size() + dtype.itemsize))
            rows = (rows if is_exact else rows.to(self._dtype)).to(dtype).contiguous()
            packed = packed or self._native.Weight(self._format(rows, may_be_short), num_rows, num_columns)
            packed.pack(
                rows.data_ptr(),
                num_columns,
                first,
                len(rows),
                is_mapped=is_mapped,
                num_threads=self._threads(),
            )
            if not is_view:
                spent.add((weight[first : first + step],))
        self._set_extras(packed, bias=bias)
        return packed

    def _format(self, rows: Tensor, may_be_short: bool) -> str:
        """Return the format of a dense weight, given its first rows."""
        count, num_columns = rows.shape
        is_short = may_be_short and self._is_short and rows.dtype == torch.bfloat16
        if is_short and self._native.suits_bf12(rows.data_ptr(), num_columns, count, num_columns):
            return "bf12"
        return _FORMATS[rows.dtype]

    def _is_float8_packable(self, weight: Float8Weight) -> bool:
        """Whether the kernels support the weight: blocks of whole steps, and scales that f32 represents exactly."""
        is_whole = _are_whole_blocks(weight.shape[1], weight.block[1])
        return is_whole and bool(torch.isfinite(weight.scale * self._native.float8_divisor()).all())

    def _pack_float8(self, weight: Float8Weight, bias: Tensor | None) -> NativeWeight:
        num_rows, num_columns = weight.shape
        block = weight.block[1] if weight.block[1] < num_columns else 0
        # Inputs have the same form as for an unquantised weight.
        name = "f8" if self._dtype == torch.bfloat16 else "f8_wide"
        packed = self._native.Weight(name, num_rows, num_columns, block)
        codes = weight.codes.view(torch.uint8).contiguous()
        self._pack_bytes(packed, codes)
        scale = weight.by_row().scale * self._native.float8_divisor()
        self._set_extras(packed, bias=bias, **{"block_scale" if block else "column_scale": scale if block else scale[:, 0]})
        return packed

    def _pack_codes(self, weight: QuantizedWeight, bias: Tensor | None) -> NativeWeight:
        num_rows, num_columns = weight.shape
        num_groups = weight.scale.shape[1]
        is_nibble = weight.levels is not None and (weight.group_size % 8 == 0 or num_groups == 1)
        group, input_group = _groups(weight)
        packed = self._native.Weight("u4" if is_nibble else "u8", num_rows, num_columns, group, input_group)
        levels = torch.tensor(weight.levels if is_nibble else (), dtype=torch.int8)
        codes = weight.codes.contiguous()
        self._pack_bytes(packed, codes, levels)
        column_scale = weight.scale.abs().amax(1)
        if weight.offset is not None:
            # Offsets must stay within the range of f16, even with small or zero scales.
            column_scale = torch.maximum(column_scale, weight.offset.abs().amax(1) / _MAX_OFFSET)
        divisor = torch.where(column_scale > 0, column_scale, torch.ones_like(column_scale))[:, None]
        needs_scales = num_groups > 1 or weight.offset is not None
        self._set_extras(
            packed,
            scales=(weight.scale / divisor).half() if needs_scales else None,
            offsets=None if weight.offset is None else (weight.offset / divisor).half(),
            column_scale=weight.scale[:, 0] if not needs_scales else column_scale,
            bias=bias,
            columns=weight.columns,
        )
        return packed

    def _pack_bytes(self, packed: NativeWeight, codes: Tensor, levels: Tensor | None = None) -> None:
        """Pack codes [N, K] of one byte; levels: i8, of codes of four bits."""
        num_rows, num_columns = codes.shape
        step = self._paced_rows(num_rows, 2 * num_columns)
        given = {} if levels is None else {"levels": levels.data_ptr(), "num_levels": len(levels)}
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            self.take(2 * count * num_columns)
            packed.pack(codes[first].data_ptr(), num_columns, first, count, num_threads=self._threads(), **given)

    def _paced_rows(self, num_rows: int, row_bytes: int) -> int:
        """Return how many rows are packed at once, whole panels of 16, where each reads and writes row_bytes."""
        return num_rows if self._pacer is None else max(16, self._pacer.bytes_per_step // row_bytes // 16 * 16)

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may be read and written."""
        if self._pacer is not None:
            self._pacer.take(num_bytes)

    def _set_extras(
        self,
        packed: NativeWeight,
        scales: Tensor | None = None,
        offsets: Tensor | None = None,
        column_scale: Tensor | None = None,
        bias: Tensor | None = None,
        columns: Tensor | None = None,
        block_scale: Tensor | None = None,
    ) -> None:
        tensors = (
            None if scales is None else _panels(scales),
            None if offsets is None else _panels(offsets),
            None if column_scale is None else _padded(column_scale.float()),
            None if bias is None else _padded(bias.float()),
            None if columns is None else columns.to(torch.int32).contiguous(),
            None if block_scale is None else _panels(block_scale),
        )
        packed.set_extras(*(0 if tensor is None else tensor.data_ptr() for tensor in tensors))


def packed_bytes_of(weight: StoredWeight, float_bytes: int) -> int:
    """Return the packed size of a stored weight, or slightly more: offsets that turn out to be unnecessary are counted.

    float_bytes  bytes of the model's dtype, to which weights are converted that the kernels do not support
    """
    (num_rows, num_columns), codes = weight.shape, weight.codes
    dense, padded_rows = num_rows * num_columns * float_bytes, -(-num_rows // 16) * 16
    if codes is None:
        return dense
    num_groups = -(-num_columns // codes.group_size)
    if codes.kind == "float8":
        return padded_rows * (num_columns + 4 * num_groups) if _are_whole_blocks(num_columns, codes.group_size) else dense
    if not _has_whole_steps(num_columns, codes.group_size):
        return dense
    is_nibble = codes.kind == "nibbles" and (codes.group_size % 8 == 0 or num_groups == 1)
    code_bytes = -(-num_columns // 8) * (4 if is_nibble else 8)
    scale_bytes = 2 * num_groups * (codes.has_offset + (codes.has_offset or num_groups > 1))
    return padded_rows * (code_bytes + scale_bytes + 4) + 4 * num_columns * codes.has_order


def is_made_exact(dtype: str) -> bool:
    """Return whether integer weights are dequantised because the checkpoint declares no quantised inputs. The kernels multiply
    integers by integers, which rounds inputs to int8; in float32 they do so only if the checkpoint declares it.

    dtype  of the model
    """
    return dtype == "float32"


def is_stored_made_exact(weight: StoredWeight, dtype: str) -> bool:
    """Return whether a stored weight is dequantised for that reason."""
    codes = weight.codes
    return codes is not None and codes.kind != "float8" and not codes.is_token_quantized and is_made_exact(dtype)


def _has_whole_steps(num_columns: int, group_size: int) -> bool:
    return num_columns <= _MAX_COLUMNS and (group_size % _STEP == 0 or group_size >= num_columns)


def _are_whole_blocks(num_columns: int, wide: int) -> bool:
    return num_columns % _STEP == 0 and (wide % _STEP == 0 or wide >= num_columns)


InputForm = tuple[int, tuple[int, ...] | None, bool, bool, bytes]
"""The common properties of weights that read the same packed inputs."""


def input_form(weight: DenseOrQuantized) -> InputForm | None:
    """Return the form in which a packed weight reads its inputs; None: not quantised."""
    if not isinstance(weight, QuantizedWeight) or not _is_packable(weight):
        return None
    order = b"" if weight.columns is None else weight.columns.numpy().tobytes()
    return weight.group_size, weight.levels, weight.offset is None, weight.is_token_quantized, order


def _is_packable(weight: QuantizedWeight) -> bool:
    """Whether the kernels support the weight: groups of whole 4-byte steps, and scales that f16 can represent relative to their
    row's."""
    if not _has_whole_steps(weight.shape[1], weight.group_size):
        return False
    values = weight.scale if weight.offset is None else torch.cat((weight.scale, weight.offset), 1)
    return bool(torch.isfinite(values).all())


def _groups(weight: QuantizedWeight) -> tuple[int, int]:
    """Return the group sizes of the weight's scales and of the quantised input's scales."""
    num_columns, group = weight.shape[1], weight.group_size
    if weight.is_token_quantized:
        return group, num_columns
    if group == num_columns and weight.offset is None:
        # A scale per row is applied at the end; inputs are still quantised in groups.
        return min(_INPUT_GROUP, num_columns), min(_INPUT_GROUP, num_columns)
    return group, max(group, _INPUT_GROUP // group * group)


def _padded(values: Tensor) -> Tensor:
    """Return [N, ...] with N padded to a multiple of 16 by zeros."""
    extra = -len(values) % 16
    padding = values.new_zeros((extra, *values.shape[1:]))
    return torch.cat((values, padding)).contiguous()


def _panels(values: Tensor) -> Tensor:
    """Return [N, G] as [N / 16, G, 16]."""
    padded = _padded(values)
    return padded.view(-1, 16, values.shape[1]).transpose(1, 2).contiguous()
