"""Kernel of adding.py: partial sums of ranks are added."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, rounded


@triton.jit(do_not_specialize=["num_tokens", "residual_scale"])
def _add_parts(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    residual_scale: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write columns program_id(1) of token program_id(0); see add_parts_launch."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    total = tl.load(parts_ptr + token * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        place = (part * num_tokens.to(tl.int64) + token) * WIDTH
        total += tl.load(parts_ptr + place + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = rounded(total, DTYPE)
        if IS_SCALED:
            total = rounded(total * residual_scale, DTYPE)
        total = tl.load(out_ptr + token * WIDTH + columns, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(out_ptr + token * WIDTH + columns, cast_to(total, DTYPE), mask=mask)
