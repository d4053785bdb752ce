"""Device code of the sampler's last launch: the cuts as one lower bound on the values, and the best sum with noise above it."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.noise import fixed_point_exp, noise_of_run, noise_of_tokens
from quire.kernels.triton.sampling_kernels import (
    LIST_SIZE,
    LOWEST,
    has_cuts,
    load_key,
    load_logits,
    nucleus_target,
    peak_of,
)

# Values of quire.kernels.cpu.sampling.SampleStatus.
_NAN = tl.constexpr(1)
_INFINITE = tl.constexpr(2)
_NOTHING = tl.constexpr(3)
_OVERFLOW = tl.constexpr(4)
_UNDERFLOW = tl.constexpr(5)


@triton.jit
def _key_of(value: tl.tensor) -> tl.tensor:
    """Return an integer, i64, with the same order as f32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value_of(key: tl.tensor) -> tl.tensor:
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _floor_of_list(values: tl.tensor, weights: tl.tensor, target: tl.tensor, low: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """Return the largest t in [low, peak] for which the weights i64 of the values >= t sum to at least `target`."""
    low_key = _key_of(low)
    high_key = _key_of(peak) + 1
    for _ in range(32):
        middle = (low_key + high_key) >> 1
        is_enough = tl.sum(tl.where(values >= _value_of(middle), weights, 0), 0) >= target
        low_key = tl.where(is_enough, middle, low_key)
        high_key = tl.where(is_enough, high_key, middle)
    return _value_of(low_key)


@triton.jit
def _choose_of_list(
    values: tl.tensor,
    tokens: tl.tensor,
    peak: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    total: tl.tensor,
    key_low: tl.tensor,
    key_high: tl.tensor,
    position: tl.tensor,
    noise_stream: tl.tensor,
) -> tl.tensor:
    """Return the token; values are -inf past the end of the list. total: the mass of the whole row."""
    floor = LOWEST + peak * 0.0
    count = tl.sum((values >= LOWEST).to(tl.int32), 0)
    if (top_k > 0) & (top_k < count):
        floor = _floor_of_list(values, (values >= LOWEST).to(tl.int64), top_k.to(tl.int64), floor, peak)
    if top_p < 1:
        units = tl.where(values >= floor, fixed_point_exp(values - peak), 0)
        if top_k > 0:
            total = tl.sum(units, 0)
        floor = _floor_of_list(values, units, nucleus_target(top_p, total), floor, peak)
    floor = tl.maximum(floor, peak + log_min_p)
    scores = values + noise_of_tokens(tokens, key_low, key_high, position, noise_stream)
    scores = tl.where(values >= floor, scores, float("-inf"))
    best = tl.max(scores, 0)
    return tl.min(tl.where((scores == best) & (values >= floor), tokens, 0x7FFFFFFF), 0)


@triton.jit
def _sum_of_row(
    logits_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    vocab_size: tl.tensor,
    COUNTS: tl.constexpr,
) -> tl.tensor:
    """Return the number of values of a row that are at least floor, or their mass, i64."""
    total = tl.zeros([LIST_SIZE], tl.int64)
    for first in range(0, vocab_size, LIST_SIZE):
        logits, _ = load_logits(logits_ptr, mask_ptr, first + tl.arange(0, LIST_SIZE), vocab_size)
        values = logits * inverse
        if COUNTS:
            total += (values >= floor).to(tl.int64)
        else:
            total += tl.where(values >= floor, fixed_point_exp(values - peak), 0)
    return tl.sum(total, 0)


@triton.jit
def _floor_of_row(
    logits_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    target: tl.tensor,
    vocab_size: tl.tensor,
    COUNTS: tl.constexpr,
) -> tl.tensor:
    """Return the result of _floor_of_list for a whole row."""
    low_key = _key_of(low)
    high_key = _key_of(peak) + 1
    while low_key + 1 < high_key:
        middle = (low_key + high_key) >> 1
        floor = _value_of(middle)
        if _sum_of_row(logits_ptr, mask_ptr, inverse, peak, floor, vocab_size, COUNTS) >= target:
            low_key = middle
        else:
            high_key = middle
    return _value_of(low_key)


@triton.jit
def _choose_of_row(
    logits_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    inverse: tl.tensor,
    peak: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    key_low: tl.tensor,
    key_high: tl.tensor,
    position: tl.tensor,
    noise_stream: tl.tensor,
    vocab_size: tl.tensor,
) -> tl.tensor:
    """Return the token, reading the row repeatedly."""
    floor = LOWEST + peak * 0.0
    if top_k > 0:  # noqa: SIM102  both sides of an `and` would be computed
        if _sum_of_row(logits_ptr, mask_ptr, inverse, peak, floor, vocab_size, True) > top_k:
            floor = _floor_of_row(logits_ptr, mask_ptr, inverse, peak, floor, top_k.to(tl.int64), vocab_size, True)
    if top_p < 1:
        total = _sum_of_row(logits_ptr, mask_ptr, inverse, peak, floor, vocab_size, False)
        target = nucleus_target(top_p, total)
        floor = _floor_of_row(logits_ptr, mask_ptr, inverse, peak, floor, target, vocab_size, False)
    floor = tl.maximum(floor, peak + log_min_p)
    best = floor * 0.0 + float("-inf")
    token = top_k * 0
    for first in range(0, vocab_size, LIST_SIZE):
        logits, _ = load_logits(logits_ptr, mask_ptr, first + tl.arange(0, LIST_SIZE), vocab_size)
        values = logits * inverse
        scores = values + noise_of_run(first, key_low, key_high, position, noise_stream, LIST_SIZE)
        scores = tl.where(values >= floor, scores, float("-inf"))
        score, place = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(score > best, first + place, token)
        best = tl.maximum(best, score)
    return token


@triton.jit
def _status_of(best: tl.tensor, peak: tl.tensor, num_nan: tl.tensor, is_greedy: tl.tensor) -> tl.tensor:
    """Return a value of SampleStatus, i32; best: the best logit, peak: best / temperature."""
    status = tl.where(peak > -LOWEST, _OVERFLOW, tl.where(peak < LOWEST, _UNDERFLOW, 0))
    status = tl.where(is_greedy, 0, status)
    status = tl.where(best > -LOWEST, _INFINITE, tl.where(best < LOWEST, _NOTHING, status))
    return tl.where(num_nan > 0, _NAN, status)


@triton.jit(do_not_specialize=["noise_stream"])
def choose_rows(
    logits_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    inverses_ptr: tl.tensor,
    greedy_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    log_min_ps_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    nans_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    list_values_ptr: tl.tensor,
    list_tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    statuses_ptr: tl.tensor,
    noise_stream: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    masks_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS: tl.constexpr,
    NUM_DEPTHS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
) -> None:
    """Write the token i64, -1 if there is none, and the status i32 of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    at = row * num_blocks + blocks
    is_greedy = tl.load(greedy_ptr + row) != 0
    best = peak_of(peaks_ptr, row, num_blocks, BLOCKS)
    inverse = tl.load(inverses_ptr + row)
    peak = best * inverse
    status = _status_of(best, peak, tl.sum(tl.load(nans_ptr + at, mask=inside, other=0), 0), is_greedy)
    is_cut = tl.full([], 0, tl.int1)
    if HAS_CUTS:
        is_cut = has_cuts(greedy_ptr, top_ks_ptr, top_ps_ptr, log_min_ps_ptr, row)
    token = tl.full([], -1, tl.int32)
    if HAS_CUTS:  # noqa: SIM102  decided when compiled: without cuts there are no lists
        if is_cut & (status == 0):
            top_k = tl.load(top_ks_ptr + row)
            top_p = tl.load(top_ps_ptr + row)
            log_min_p = tl.load(log_min_ps_ptr + row)
            key_low, key_high, position = load_key(seeds_ptr, positions_ptr, row)
            length = tl.load(lengths_ptr + row)
            if length <= LIST_SIZE:
                places = tl.arange(0, LIST_SIZE)
                mask = places < length
                values = tl.load(list_values_ptr + row * LIST_SIZE + places, mask=mask, other=float("-inf"))
                tokens = tl.load(list_tokens_ptr + row * LIST_SIZE + places, mask=mask, other=0)
                total = tl.sum(tl.load(masses_ptr + at * NUM_DEPTHS + NUM_DEPTHS - 1, mask=inside, other=0), 0)
                token = _choose_of_list(
                    values,
                    tokens,
                    peak,
                    top_k,
                    top_p,
                    log_min_p,
                    total,
                    key_low,
                    key_high,
                    position,
                    noise_stream.to(tl.uint32),
                )
            else:
                mask_ptr = masks_ptr
                if masks_ptr is not None:
                    mask_ptr = masks_ptr + row * masks_stride
                token = _choose_of_row(
                    logits_ptr + row * logits_stride, mask_ptr, inverse, peak, top_k, top_p, log_min_p,
                    key_low, key_high, position, noise_stream.to(tl.uint32), vocab_size,
                )  # fmt: skip
    if (is_cut == 0) & (status == 0):
        scores = tl.load(scores_ptr + at, mask=inside, other=float("-inf"))
        tokens = tl.load(tokens_ptr + at, mask=inside, other=0)
        _, block = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.sum(tl.where(blocks == block, tokens, 0), 0)
    tl.store(out_ptr + row, token.to(tl.int64))
    tl.store(statuses_ptr + row, status)
