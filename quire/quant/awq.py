"""AWQ (Lin et al., 2023) in the "gemm" layout: 4-bit codes and zero points packed along the outputs, interleaved."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.quant.config import AwqConfig
from quire.quant.packing import affine_weight, unpack_codes
from quire.quant.stored_parts import FLOATS, StoredParts
from quire.quant.weight import CodeForm, QuantizedWeight, StoredWeight

PARTS = ("qweight", "qzeros", "scales")
_BITS = 4
_CODES_PER_WORD = 8
_SLOT_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(parts: StoredParts, config: AwqConfig) -> StoredWeight:
    """Return the weight of a module; it is unpacked when it is loaded. Raises ModelFormatError."""
    qweight = parts.take("qweight", (torch.int32,), (None, None))
    num_columns, num_words = qweight.shape
    num_rows = num_words * _CODES_PER_WORD
    num_groups = parts.num_groups(num_columns, config.group_size)
    parts.take("scales", FLOATS, (num_groups, num_rows))
    if config.has_zero_point or "qzeros" in parts:
        parts.take("qzeros", (torch.int32,), (num_groups, num_words))
    codes = CodeForm.of(_BITS, num_columns // max(1, num_groups), config.has_zero_point)
    return parts.integers((num_rows, num_columns), codes, lambda: _load(parts, config, num_columns, num_groups))


def _load(parts: StoredParts, config: AwqConfig, num_columns: int, num_groups: int) -> QuantizedWeight:
    codes = _unpack(parts.take("qweight", (torch.int32,), (num_columns, None)))
    zeros = _unpack(parts.take("qzeros", (torch.int32,), (num_groups, None))) if "qzeros" in parts else None
    if zeros is not None and not config.has_zero_point:
        _check_symmetric(parts, zeros)
        zeros = None
    scale = parts.scale("scales", parts.take("scales", FLOATS, (num_groups, None))).t().contiguous()
    return affine_weight(codes, scale, zeros, _BITS)


def _check_symmetric(parts: StoredParts, zeros: Tensor) -> None:
    """Refuse zero points of a weight that has none according to the config, except the middle, which some writers store."""
    low, high, middle = int(zeros.min()), int(zeros.max()), 1 << (_BITS - 1)
    if low != middle or high != middle:
        raise ModelFormatError(
            f"{parts.module}.qzeros holds {low} to {high}, but zero_point of the quantisation config is false, where all are "
            f"{middle}: which of the two is right is unknown; get the checkpoint again, or a version with zero_point true"
        )


def _unpack(words: Tensor) -> Tensor:
    """Return [O, N] of words [N, O / 8]."""
    num_words = words.shape[1]
    slots = unpack_codes(words, _BITS, num_words * _CODES_PER_WORD).view(len(words), num_words, _CODES_PER_WORD)
    return slots[:, :, list(_SLOT_OF_COLUMN)].flatten(1).t().contiguous()
