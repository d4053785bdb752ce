"""Definition of the sampling noise: Gumbel(0, 1) values keyed by (seed, position, token id, stream).

The noise of a token is a pure function of its key and no generator has state, so a request samples the same tokens in any
batch, before and after a preemption, with and without speculation. Every port (C++, Triton) must give the same bits. The
complete algorithm:

1. Words. Philox4x32-10 (Salmon et al., SC'11; Random123) with all numbers unsigned 32-bit:

     key     = (seed & 0xffffffff, seed >> 32)                      seed: unsigned 64-bit
     counter = (token_id >> 2, position, stream, 0)
     word    = output[token_id & 3]                                 one call serves four adjacent tokens

   One round: p0 = 0xD2511F53 * c0 and p1 = 0xCD9E8D57 * c2 (64-bit products), then
     (c0, c1, c2, c3) = (hi(p1) ^ c1 ^ k0, lo(p1), hi(p0) ^ c3 ^ k1, lo(p0)).
   Ten rounds; before each but the first, k0 += 0x9E3779B9 and k1 += 0xBB67AE85 (mod 2**32).

2. Gumbel of a word w. Every operation is one IEEE f32 operation rounded to nearest even, in the order of the brackets;
   only +, - and *; a multiply and an add are never fused (C++: -ffp-contract=off, Triton: enable_fp_fusion=False).

     v = min((f32(w) + 0.5) * 2**-32, 1 - 2**-24)                   uniform; smallest 2**-33
     E = -log1p(-v):  v <= V_DIRECT:  E = -P(-v, 0)                 keeps the full relative precision of a tiny v
                      otherwise:      E = -LN(1 - v)
     G = -LN(E)                                                     -2.82 <= G <= 22.88

   LN(x), x > 0 and normal, splits x = m * 2**e with sqrt(1/2) <= m < sqrt(2) (up to one ulp) on its bits as int32:
     e = (bits(x) - 0x3F3504F3) >> 23    (arithmetic shift)
     m = as_f32(bits(x) - (e << 23))
     LN(x) = P(m - 1, f32(e))            m - 1 is exact

   P(f, e) = ln((1 + f) * 2**e), the polynomial of Cephes logf:
     z = f * f
     y = C0;  y = (y * f) + Ci for C1 ... C8, in order;  y = (y * f) * z
     y = y + (e * -2.12194440e-4);  y = y - (z * 0.5);  r = f + y;  r = r + (e * 0.693359375)

   All constants are rounded to f32 first. With e = 0 the products with e are zeros, so a port may skip them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STREAM_TARGET = 0

MIN_GUMBEL = -2.812
"""Lower bound of the noise: the value at v = 1 - 2**-24, rounded outwards."""
MAX_GUMBEL = 22.874
"""Upper bound of the noise: the value at w = 0, rounded outwards."""

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10

_SQRT_HALF_BITS = 0x3F3504F3
_V_DIRECT = 0.29289323091506958  # 1 - sqrt(1/2), a f32 value
_V_MAX = 1.0 - 2.0**-24
_LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_LN2_LOW, _LN2_HIGH = -2.12194440e-4, 0.693359375

# Elements per pass. The temporaries fit the caches of a core, and the size is below torch's threshold for parallel loops (many
# tiny parallel loops cost more than they save, far more on a busy machine). The C++ kernel parallelises over rows.
_CHUNK_ELEMENTS = 1 << 15


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of Philox4x32-10.

    counter  four int64 tensors; key: two. All values are in [0, 2**32), and all shapes broadcast with each other
    Returns  int64 tensors of values in [0, 2**32); their shapes broadcast to the common shape
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # The int64 products wrap modulo 2**64, which keeps all 64 bits correct; the masks drop the sign of the shifts.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ c1 ^ k0) & _MASK32
        c2 = ((product_0 >> 32) ^ c3 ^ k1) & _MASK32
        c1, c3 = product_1 & _MASK32, product_0 & _MASK32
        k0, k1 = (k0 + _WEYL_0) & _MASK32, (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def gumbel_from_words(words: Tensor) -> Tensor:
    """Return the f32 Gumbel noise of each 32-bit word; int64 in [0, 2**32), any shape."""
    uniform = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_V_MAX)
    rest = 1.0 - uniform
    fraction, exponent = _split(rest)
    direct = uniform <= _V_DIRECT
    fraction = torch.where(direct, -uniform, fraction)
    exponent = exponent.masked_fill_(direct, 0.0)
    exponential = _log_polynomial(fraction, exponent).neg_()
    return _log_polynomial(*_split(exponential)).neg_()


def gumbel_noise(
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    stream: int = STREAM_TARGET,
    device: torch.device | None = None,
) -> Tensor:
    """Return the noise of the whole vocabulary for every row.

    seeds      [R] one per row, taken modulo 2**64
    positions  [R] position that the token will have in its sequence, [0, 2**32)
    Returns    [R, vocab_size] f32; column i is the noise of token i
    """
    noise = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=device)
    key_low, key_high, position = (column[:, None] for column in key_columns(seeds, positions, device))
    for first_row, last_row, first, last in _tiles(len(seeds), vocab_size):
        rows = slice(first_row, last_row)
        quads = torch.arange(first >> 2, (last + 3) >> 2, device=device)[None, :]
        stream_word = torch.full((1, 1), stream, device=device)
        counter = (quads, position[rows], stream_word, torch.zeros_like(stream_word))
        words = torch.stack(philox4x32(counter, (key_low[rows], key_high[rows])), dim=-1)
        noise[rows, first:last] = gumbel_from_words(words.flatten(1))[:, : last - first]
    return noise


def gumbel_noise_at(seeds: Sequence[int], positions: Sequence[int], token_ids: Tensor, stream: int = STREAM_TARGET) -> Tensor:
    """Return the noise of given tokens: gumbel_noise(...).gather(1, token_ids), without computing the others.

    seeds, positions  [R] as in gumbel_noise
    token_ids         [R, C] int64, any order, repetitions allowed
    Returns           [R, C] f32
    """
    keys = key_columns(seeds, positions, token_ids.device)
    row_ids = torch.arange(len(seeds), device=token_ids.device)[:, None].expand_as(token_ids)
    return gumbel_noise_flat(keys, row_ids.reshape(-1), token_ids.reshape(-1), stream).view(token_ids.shape)


def gumbel_noise_flat(
    keys: tuple[Tensor, Tensor, Tensor], row_ids: Tensor, token_ids: Tensor, stream: int = STREAM_TARGET
) -> Tensor:
    """Return the noise of (row, token) pairs, for rows that keep different numbers of candidates.

    keys       key_columns(seeds, positions) of the rows
    row_ids    [N] int64, index into the key columns
    token_ids  [N] int64
    Returns    [N] f32
    """
    noise = torch.empty(token_ids.shape, dtype=torch.float32, device=token_ids.device)
    stream_word = torch.full((1,), stream, device=token_ids.device)
    zero = torch.zeros_like(stream_word)
    for first in range(0, token_ids.numel(), _CHUNK_ELEMENTS):
        part = slice(first, first + _CHUNK_ELEMENTS)
        ids = token_ids[part]
        key_low, key_high, position = (column[row_ids[part]] for column in keys)
        words = torch.stack(philox4x32((ids >> 2, position, stream_word, zero), (key_low, key_high)), dim=-1)
        noise[part] = gumbel_from_words(words.gather(1, (ids & 3)[:, None])[:, 0])
    return noise


def key_columns(
    seeds: Sequence[int], positions: Sequence[int], device: torch.device | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (low word of the seed, high word, position), each [R] int64 in [0, 2**32)."""
    words = [[seed & _MASK32 for seed in seeds], [(seed >> 32) & _MASK32 for seed in seeds]]
    low, high, position = torch.tensor([*words, [p & _MASK32 for p in positions]], dtype=torch.int64, device=device)
    return low, high, position


def _tiles(num_rows: int, vocab_size: int) -> list[tuple[int, int, int, int]]:
    """Return tiles (first row, last row, first token, last token), half-open, that cover [num_rows, vocab_size]."""
    width = min(vocab_size, _CHUNK_ELEMENTS)
    height = max(1, _CHUNK_ELEMENTS // max(width, 1))
    return [
        (row, min(row + height, num_rows), first, min(first + width, vocab_size))
        for row in range(0, num_rows, height)
        for first in range(0, vocab_size, max(width, 1))
    ]


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (m - 1, e) in f32 with x = m * 2**e; x f32, positive, normal."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    return mantissa - 1.0, exponent.to(torch.float32)


def _log_polynomial(fraction: Tensor, exponent: Tensor) -> Tensor:
    """Return ln((1 + fraction) * 2**exponent) in f32: P of the module's docstring. In-place operations, never fused."""
    square = fraction * fraction
    y = torch.full_like(fraction, _LOG_COEFFICIENTS[0])
    for coefficient in _LOG_COEFFICIENTS[1:]:
        y.mul_(fraction).add_(coefficient)
    y.mul_(fraction).mul_(square)
    y.add_(exponent * _LN2_LOW)
    y.sub_(square.mul_(0.5))
    return y.add_(fraction).add_(exponent * _LN2_HIGH)
