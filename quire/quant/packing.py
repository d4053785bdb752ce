"""Unpack integer codes from words, and build weights of them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.quant.stored_parts import StoredParts
from quire.quant.weight import QuantizedWeight

_WORD_BITS = 32


def words_for(num_codes: int, bits: int) -> int:
    """Return the number of 32-bit words that hold a stream of codes."""
    return -(-num_codes * bits // _WORD_BITS)


def unpack_codes(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """Return the codes of bit streams: code i is bits [i * bits, (i + 1) * bits) of its row, lowest first.

    words    [R, words_for(num_codes, bits)] int32
    bits     1 to 8
    Returns  [R, num_codes] uint8, contiguous
    """
    words = words.contiguous()
    if 8 % bits == 0:
        octets = words.view(torch.uint8)
        if bits < 8:
            mask = (1 << bits) - 1
            octets = torch.stack([(octets >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(1)
        return octets[:, :num_codes].contiguous()
    return _unpack_stream(words, bits, num_codes)


def _unpack_stream(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """Unpack codes that cross bytes: 32 of them lie in `bits` words."""
    num_blocks = -(-num_codes // _WORD_BITS)
    padded = torch.zeros(len(words), num_blocks * bits, dtype=torch.int64)
    padded[:, : words.shape[1]] = words
    padded = (padded & 0xFFFFFFFF).view(len(words), num_blocks, bits)
    codes = torch.empty(len(words), num_blocks, _WORD_BITS, dtype=torch.uint8)
    for index in range(_WORD_BITS):
        word, shift = divmod(index * bits, _WORD_BITS)
        code = padded[:, :, word] >> shift
        if shift + bits > _WORD_BITS:
            code = code | (padded[:, :, word + 1] << (_WORD_BITS - shift))
        codes[:, :, index] = code & ((1 << bits) - 1)
    return codes.flatten(1)[:, :num_codes].contiguous()


def affine_weight(
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    bits: int,
    columns: Tensor | None = None,
    is_token_quantized: bool = False,
) -> QuantizedWeight:
    """Return the weight scale * (codes - zeros).

    codes    [O, K] uint8 below 2**bits, the columns in the order of `columns`
    scale    [O, G] f32
    zeros    [O, G] integers, or None: all are 2**(bits - 1)
    """
    middle = 1 << (bits - 1)
    offset = None
    if zeros is not None and bool((zeros != middle).any()):
        offset = scale * (middle - zeros.to(torch.int32)).float()
    return QuantizedWeight(
        # Unsigned arithmetic wraps, and the result is read as int8.
        (codes - middle).view(torch.int8),
        scale,
        offset,
        signed_levels(bits),
        columns,
        is_token_quantized,
    )


def signed_levels(bits: int) -> tuple[int, ...] | None:
    """Return the values of a signed code, or None if it needs a byte."""
    return tuple(range(-(1 << (bits - 1)), 1 << (bits - 1))) if bits <= 4 else None


def order_columns(parts: StoredParts, part: str, groups: Tensor, num_groups: int) -> Tensor | None:
    """Return the permutation [K] int64 that makes the columns of each group consecutive, or None if they are already.

    groups  [K] integers: the group of each input column

    Raises ModelFormatError if a group is not in [0, num_groups) or groups have different numbers of columns.
    """
    groups = groups.long()
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= num_groups:
        raise parts.damaged(part, f"holds groups from {low} to {high}, expected 0 to {num_groups - 1}")
    group_size = len(groups) // num_groups
    counts = torch.bincount(groups, minlength=num_groups)
    if bool((counts != group_size).any()):
        group = int((counts != group_size).nonzero()[0])
        raise parts.damaged(part, f"gives group {group} {int(counts[group])} columns, expected {group_size}")
    if bool((groups[1:] >= groups[:-1]).all()):
        return None
    return groups.argsort(stable=True)
