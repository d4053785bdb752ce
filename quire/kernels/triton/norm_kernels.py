"""Kernels of norm.py: RMSNorm and LayerNorm, with the preceding addition to the residual stream."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, rounded


@triton.jit
def scale_normalized(
    wide: tl.tensor, weight: tl.tensor, OFFSET: tl.constexpr, CASTS_LATE: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """Return normalised values times weight + OFFSET, f32, to be rounded to DTYPE: the last operation of RMSNorm."""
    if not CASTS_LATE:
        wide = rounded(wide, DTYPE)
        weight = rounded(weight + OFFSET, DTYPE)
    else:
        weight = weight + OFFSET
    return wide * weight


@triton.jit
def _normalize_row(
    x: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    CASTS_LATE: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_CENTERED:
        x = tl.where(mask, x - tl.sum(x, 0) / WIDTH, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    if weight_ptr is not None:
        if IS_CENTERED:
            x = x * (rounded(weight + OFFSET, DTYPE) if OFFSET != 0 else weight)
        else:
            x = scale_normalized(x, weight, OFFSET, CASTS_LATE, DTYPE)
    if bias_ptr is not None:
        x = x + tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return rounded(x, DTYPE)


@triton.jit
def _add_and_normalize(
    x_ptr: tl.tensor,
    branch_ptr: tl.tensor,
    total_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    branch_stride: tl.tensor,
    residual_scale: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    branch_weight_ptr: tl.tensor,
    branch_bias_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SCALED: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    CASTS_LATE: tl.constexpr,
    BRANCH_EPS: tl.constexpr,
    BRANCH_OFFSET: tl.constexpr,
    BRANCH_IS_CENTERED: tl.constexpr,
    BRANCH_CASTS_LATE: tl.constexpr,
) -> None:
    """Compute one row; see add_and_normalize_launch."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + row * branch_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if branch_weight_ptr is not None:
            branch = _normalize_row(
                branch, branch_weight_ptr, branch_bias_ptr, columns, mask,
                WIDTH, BRANCH_EPS, BRANCH_OFFSET, BRANCH_IS_CENTERED, BRANCH_CASTS_LATE, DTYPE,
            )  # fmt: skip
        if IS_SCALED:
            branch = rounded(branch * residual_scale, DTYPE)
        x = rounded(x + branch, DTYPE)
        tl.store(total_ptr + row * WIDTH + columns, cast_to(x, DTYPE), mask=mask)
    if out_ptr is not None:
        y = _normalize_row(
            x, weight_ptr, bias_ptr, columns, mask, WIDTH, EPS, OFFSET, IS_CENTERED, CASTS_LATE, DTYPE
        )  # fmt: skip
        tl.store(out_ptr + row * WIDTH + columns, cast_to(y, DTYPE), mask=mask)
