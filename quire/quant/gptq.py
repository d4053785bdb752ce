"""GPTQ (Frantar et al., 2022): codes packed along the inputs, zero points along the outputs, and the group of each input."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import ModelFormatError
from quire.quant.config import GptqConfig, GptqScheme
from quire.quant.packing import affine_weight, order_columns, unpack_codes, words_for
from quire.quant.stored_parts import FLOATS, INTEGERS, StoredParts
from quire.quant.weight import CodeForm, QuantizedWeight, StoredWeight

PARTS = ("qweight", "qzeros", "scales", "g_idx")


def read_gptq(parts: StoredParts, config: GptqConfig) -> StoredWeight:
    """Return the weight of a module; it is unpacked when it is loaded. Raises ModelFormatError."""
    scheme = config.find_scheme(parts.module)
    if scheme is None:
        raise ModelFormatError(f"{parts.module} is stored quantised although `dynamic` of the quantisation config excludes it")
    bits = scheme.bits
    qweight = parts.take("qweight", (torch.int32,), (None, None))
    num_words, num_rows = qweight.shape
    if num_words * 32 % bits or num_rows * bits % 32:
        raise parts.wrong("qweight", f"whose codes of {bits} bits fill words of 32 bits both ways")
    num_columns = num_words * 32 // bits
    num_groups = parts.num_groups(num_columns, scheme.group_size)
    parts.take("qzeros", (torch.int32,), (num_groups, words_for(num_rows, bits)))
    parts.take("scales", FLOATS, (num_groups, num_rows))
    if "g_idx" in parts:
        parts.take("g_idx", INTEGERS, (num_columns,))
    elif config.is_ordered and scheme.group_size is not None:
        raise ModelFormatError(
            f"{parts.module}.g_idx is missing although desc_act of the quantisation config is true: which columns share a "
            "scale cannot be determined; get the checkpoint again, or a version with desc_act false"
        )
    form = "gptq_v2" if scheme.is_v2 else "gptq"  # most weights of the first format are symmetric, without offsets
    codes = CodeForm.of(bits, num_columns // max(1, num_groups), has_offset=True, has_order="g_idx" in parts)
    return parts.integers((num_rows, num_columns), codes, lambda: _load(parts, scheme, num_rows, num_columns, num_groups), form)


def _load(parts: StoredParts, scheme: GptqScheme, num_rows: int, num_columns: int, num_groups: int) -> QuantizedWeight:
    qweight = parts.take("qweight", (torch.int32,), (None, num_rows))
    qzeros = parts.take("qzeros", (torch.int32,), (num_groups, None))
    scales = parts.take("scales", FLOATS, (num_groups, num_rows))
    columns = None
    if "g_idx" in parts:
        columns = order_columns(parts, "g_idx", parts.take("g_idx", INTEGERS, (num_columns,)), num_groups)
    codes = unpack_codes(qweight.t(), scheme.bits, num_columns)
    if columns is not None:
        codes = codes[:, columns]
    zeros = None if _is_symmetric(parts, qzeros, scheme, num_rows) else _unpack_zeros(qzeros, scheme, num_rows).t()
    scale = parts.scale("scales", scales).t().contiguous()
    return affine_weight(codes, scale, zeros, scheme.bits, columns)


def _is_symmetric(parts: StoredParts, words: Tensor, scheme: GptqScheme, num_rows: int) -> bool:
    """Return whether all zero points are known to be the middle, from the config and the stored values.

    The stored values of a symmetric weight show how its writer stores zero points: GPTQModel 5 wrote files of the format "gptq"
    with actual zero points. Raises ModelFormatError if the two contradict each other and the format is ambiguous.
    """
    if not scheme.is_symmetric:
        return False
    stored = unpack_codes(words, scheme.bits, num_rows)
    low, high = int(stored.min()), int(stored.max())
    middle = 1 << (scheme.bits - 1)
    if low == high and low in (middle - 1, middle):
        return True
    if scheme.is_v2:
        return False
    raise ModelFormatError(
        f"{parts.module}.qzeros holds {low} to {high}, but sym of the quantisation config is true (also where it is absent), "
        f"and zero points of symmetric weights are stored as all {middle - 1} or all {middle}: whether these are stored minus "
        "one cannot be determined; get the checkpoint again, or a version with checkpoint_format 'gptq_v2'"
    )


def _unpack_zeros(words: Tensor, scheme: GptqScheme, num_rows: int) -> Tensor:
    """Return the zero points [G, O]. The first format stores them minus one.

    Its writers subtract one from every field of a word at once, so a zero point of 0 borrows from the next field; adding to the
    word reverts exactly that. 3-bit codes cross words and are subtracted separately.
    """
    bits = scheme.bits
    if scheme.is_v2:
        return unpack_codes(words, bits, num_rows)
    if bits == 3:
        return (unpack_codes(words, bits, num_rows) + 1) & 7
    ones = sum(1 << shift for shift in range(0, 32, bits))
    raised = (words.long() + ones) & 0xFFFFFFFF
    # int64 is little-endian too: its lower half is the word.
    return unpack_codes(raised.view(torch.int32)[:, ::2], bits, num_rows)
