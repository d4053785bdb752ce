"""Device code of the sampler: the token of a row maximises logit / temperature + noise, after top_k, top_p and min_p.

All three cuts are lower bounds on the values: the largest value that top_k tokens reach, the largest that tokens with the share
top_p of their mass reach, and the best value plus log(min_p). Bounds are found by bisection on the bits of a float. Counts and
masses are integers, so the order of sums does not matter. Without cuts there are two launches (scan, choose); with cuts, two
more list the few tokens that can matter, which one program can read often:

  scan     per block: the best logit, whether there is a NaN, and for rows without cuts the best sum with noise
  weigh    per block: how many tokens, and what mass, lie above each of a few depths below the best
  collect  the tokens above the first depth that covers everything that top_k and top_p can keep, in ascending order
  choose   the cuts and the noise; if the list is too long it reads the whole row repeatedly instead
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.noise import fixed_point_exp, noise_of_run

LOWEST = tl.constexpr(-3.4028234663852886e38)
NUM_DEPTHS = tl.constexpr(16)
LIST_SIZE = tl.constexpr(4096)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def load_logits(
    logits_ptr: tl.tensor, mask_ptr: tl.tensor, tokens: tl.tensor, vocab_size: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the logits f32 of a row, -inf past its end and for masked tokens, and whether any is NaN."""
    inside = tokens < vocab_size
    logits = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    num_nan = tl.sum((logits != logits).to(tl.int32), 0)
    if mask_ptr is not None:
        words = tl.load(mask_ptr + tokens // 32, mask=inside, other=0)
        logits = tl.where(((words >> (tokens & 31)) & 1) != 0, logits, float("-inf"))
    return logits, num_nan > 0


@triton.jit
def load_key(seeds_ptr: tl.tensor, positions_ptr: tl.tensor, row: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32)


@triton.jit
def has_cuts(
    greedy_ptr: tl.tensor, top_ks_ptr: tl.tensor, top_ps_ptr: tl.tensor, log_min_ps_ptr: tl.tensor, row: tl.tensor
) -> tl.tensor:
    is_cut = (tl.load(top_ks_ptr + row) > 0) | (tl.load(top_ps_ptr + row) < 1) | (tl.load(log_min_ps_ptr + row) > _NEVER)
    return is_cut & (tl.load(greedy_ptr + row) == 0)


@triton.jit
def peak_of(peaks_ptr: tl.tensor, row: tl.tensor, num_blocks: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Return the best logit of a row, from those of its blocks."""
    blocks = tl.arange(0, BLOCKS)
    return tl.max(tl.load(peaks_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf")), 0)


@triton.jit(do_not_specialize=["noise_stream"])
def scan_rows(
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
    noise_stream: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    masks_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_CUTS: tl.constexpr,
) -> None:
    """Write for block program_id(1) of row program_id(0): peaks f32, nans i32, best scores f32, their tokens i32, all
    [R, num_blocks]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    mask_ptr = masks_ptr
    if masks_ptr is not None:
        mask_ptr = masks_ptr + row * masks_stride
    logits, has_nan = load_logits(logits_ptr + row * logits_stride, mask_ptr, tokens, vocab_size)
    out = row * num_blocks + block
    tl.store(peaks_ptr + out, tl.max(logits, 0))
    tl.store(nans_ptr + out, has_nan.to(tl.int32))
    if HAS_CUTS:  # noqa: SIM102  decided when compiled
        if has_cuts(greedy_ptr, top_ks_ptr, top_ps_ptr, log_min_ps_ptr, row):
            return
    scores = logits
    if tl.load(greedy_ptr + row) == 0:
        key_low, key_high, position = load_key(seeds_ptr, positions_ptr, row)
        noise = noise_of_run(block * BLOCK, key_low, key_high, position, noise_stream.to(tl.uint32), BLOCK)
        scores = logits * tl.load(inverses_ptr + row) + noise
    score, place = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(scores_ptr + out, score)
    tl.store(tokens_ptr + out, block * BLOCK + place)


@triton.jit
def depth_of(level: tl.tensor) -> tl.tensor:
    """Return the distance below the best value down to which a list of candidates reaches; infinite for the last level."""
    steps = (level + 1).to(tl.float32)
    return tl.where(level == NUM_DEPTHS - 1, float("inf"), steps * steps * 0.09375)


@triton.jit
def weigh_rows(
    logits_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    inverses_ptr: tl.tensor,
    greedy_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    log_min_ps_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    masks_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Write for block program_id(1) of row program_id(0): counts i32 and masses i64 [R, num_blocks, NUM_DEPTHS] down to each
    depth."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if has_cuts(greedy_ptr, top_ks_ptr, top_ps_ptr, log_min_ps_ptr, row):
        inverse = tl.load(inverses_ptr + row)
        peak = peak_of(peaks_ptr, row, num_blocks, BLOCKS) * inverse
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        mask_ptr = masks_ptr
        if masks_ptr is not None:
            mask_ptr = masks_ptr + row * masks_stride
        logits, _ = load_logits(logits_ptr + row * logits_stride, mask_ptr, tokens, vocab_size)
        values = logits * inverse
        units = fixed_point_exp(values - peak)
        levels = tl.arange(0, NUM_DEPTHS)
        floors = tl.maximum(peak - depth_of(levels), LOWEST)
        is_above = values[None, :] >= floors[:, None]
        out = (row * num_blocks + block) * NUM_DEPTHS + levels
        tl.store(counts_ptr + out, tl.sum(is_above.to(tl.int32), 1))
        tl.store(masses_ptr + out, tl.sum(tl.where(is_above, units[None, :], 0), 1))


@triton.jit
def nucleus_target(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return the mass that the nucleus must reach, i64: top_p f64 of the total, at least 1 and at most all."""
    target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(target, total), 1)


@triton.jit
def _find_level(
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    row: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first depth that covers all tokens that the cuts can keep, and the number of tokens down to it.

    The last depth covers all tokens, so there always is one.
    """
    levels = tl.arange(0, NUM_DEPTHS)
    blocks = tl.arange(0, BLOCKS)
    places = (row * num_blocks + blocks)[:, None] * NUM_DEPTHS + levels[None, :]
    inside = (blocks < num_blocks)[:, None] & (levels >= 0)[None, :]
    counts = tl.sum(tl.load(counts_ptr + places, mask=inside, other=0), 0)
    is_enough = levels == NUM_DEPTHS - 1
    if top_k > 0:
        is_enough = is_enough | (counts >= top_k)
    elif top_p < 1:
        masses = tl.sum(tl.load(masses_ptr + places, mask=inside, other=0), 0)
        total = tl.max(masses, 0)
        is_enough = is_enough | (masses >= nucleus_target(top_p, total))
    else:
        is_enough = is_enough | (depth_of(levels) >= -log_min_p)
    level = tl.min(tl.where(is_enough, levels, NUM_DEPTHS), 0)
    return level, tl.sum(tl.where(levels == level, counts, 0), 0)


@triton.jit
def collect_rows(
    logits_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    inverses_ptr: tl.tensor,
    greedy_ptr: tl.tensor,
    top_ks_ptr: tl.tensor,
    top_ps_ptr: tl.tensor,
    log_min_ps_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    list_values_ptr: tl.tensor,
    list_tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    masks_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Write values f32 and tokens i32 [R, LIST_SIZE] of block program_id(1), row program_id(0), and the lengths [R] i32."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if has_cuts(greedy_ptr, top_ks_ptr, top_ps_ptr, log_min_ps_ptr, row):
        top_k = tl.load(top_ks_ptr + row)
        top_p = tl.load(top_ps_ptr + row)
        log_min_p = tl.load(log_min_ps_ptr + row)
        level, length = _find_level(top_k, top_p, log_min_p, counts_ptr, masses_ptr, row, num_blocks, BLOCKS)
        if block == 0:
            tl.store(lengths_ptr + row, length)
        if length <= LIST_SIZE:
            blocks = tl.arange(0, BLOCKS)
            places = (row * num_blocks + blocks) * NUM_DEPTHS + level
            first = tl.sum(tl.load(counts_ptr + places, mask=blocks < block, other=0), 0)
            inverse = tl.load(inverses_ptr + row)
            peak = peak_of(peaks_ptr, row, num_blocks, BLOCKS) * inverse
            tokens = block * BLOCK + tl.arange(0, BLOCK)
            mask_ptr = masks_ptr
            if masks_ptr is not None:
                mask_ptr = masks_ptr + row * masks_stride
            logits, _ = load_logits(logits_ptr + row * logits_stride, mask_ptr, tokens, vocab_size)
            values = logits * inverse
            is_kept = values >= tl.maximum(peak - depth_of(level), LOWEST)
            to = row * LIST_SIZE + first + tl.cumsum(is_kept.to(tl.int32), 0) - 1
            tl.store(list_values_ptr + to, values, mask=is_kept)
            tl.store(list_tokens_ptr + to, tokens, mask=is_kept)
