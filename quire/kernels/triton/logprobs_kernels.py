"""Device code of log probabilities: the blocks of rows, then the rows; see logprobs.logprob_launches."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_TOP = 32
"""Most likely tokens of a row at most."""
LOGPROB_WIDTH = 2 + 2 * MAX_TOP
"""Numbers of a row: the log probability, f32, and the rank, i32, of the token; the ids of the best tokens, i32; their log
probabilities, f32."""
_TOP, _WIDTH = tl.constexpr(MAX_TOP), tl.constexpr(LOGPROB_WIDTH)
_LOWEST_KEY = tl.constexpr(-0x7FFFFFFF00000000)


@triton.jit
def _chosen_logit(logits_ptr: tl.tensor, ids_ptr: tl.tensor, row: tl.tensor, logits_stride: tl.tensor) -> tl.tensor:
    token = tl.maximum(tl.load(ids_ptr + row), 0)
    return tl.load(logits_ptr + row * logits_stride + token).to(tl.float32)


@triton.jit
def scan_logprobs(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_tops_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    larger_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    logits_stride: tl.tensor,
    num_blocks: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write of block program_id(1) of row program_id(0), all [R, num_blocks]: peaks f32, sums f32 of the exponentials relative
    to these, larger i32, and keys [.., MAX_TOP] i64, descending."""
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(num_tops_ptr + row)
    if num_top >= 0:
        tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        logits = tl.load(logits_ptr + row * logits_stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        peak = tl.max(logits, 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        out = row * num_blocks + tl.program_id(1)
        tl.store(peaks_ptr + out, peak)
        tl.store(sums_ptr + out, tl.sum(tl.exp(logits - base), 0))
        chosen = _chosen_logit(logits_ptr, ids_ptr, row, logits_stride)
        tl.store(larger_ptr + out, tl.sum((logits > chosen).to(tl.int32), 0))
        bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # both zeros are equal
        order = tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -0x7FFFFFFE).to(tl.int64)  # NaN: above _LOWEST_KEY
        keys = tl.where(inside, (order << 32) + (tokens ^ 0x7FFFFFFF).to(tl.int64), _LOWEST_KEY)
        for place in range(num_top):
            best = tl.max(keys, 0)
            tl.store(keys_ptr + out * _TOP + place, best)
            keys = tl.where(keys == best, _LOWEST_KEY, keys)


@triton.jit
def gather_logprobs(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_tops_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    larger_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    out_ptr: tl.tensor,
    logits_stride: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """Write row program_id(0) of out [R, LOGPROB_WIDTH]."""
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(num_tops_ptr + row)
    if num_top >= 0:
        blocks = tl.arange(0, BLOCKS)
        at, inside = row * num_blocks + blocks, blocks < num_blocks
        peaks = tl.load(peaks_ptr + at, mask=inside, other=float("-inf"))
        peak = tl.max(peaks, 0)
        total = tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0) * tl.exp(peaks - peak), 0)
        log_total = tl.log(total)
        chosen = _chosen_logit(logits_ptr, ids_ptr, row, logits_stride)
        out = out_ptr + row * _WIDTH
        tl.store(out, ((chosen - peak) - log_total).to(tl.int32, bitcast=True))
        tl.store(out + 1, 1 + tl.sum(tl.load(larger_ptr + at, mask=inside, other=0), 0))
        places = tl.arange(0, BLOCKS * _TOP)
        is_key = (places // _TOP < num_blocks) & (places % _TOP < num_top)
        keys = tl.load(keys_ptr + row * num_blocks * _TOP + places, mask=is_key, other=_LOWEST_KEY)
        for place in range(num_top):
            best = tl.max(keys, 0)
            keys = tl.where(keys == best, _LOWEST_KEY, keys)
            token = best.to(tl.int32) ^ 0x7FFFFFFF
            logit = tl.load(logits_ptr + row * logits_stride + token).to(tl.float32)
            tl.store(out + 2 + place, token)
            tl.store(out + 2 + _TOP + place, ((logit - peak) - log_total).to(tl.int32, bitcast=True))
