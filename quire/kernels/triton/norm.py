"""RMSNorm and LayerNorm, with the preceding addition to the residual stream, in one pass over each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import NormSpec
from quire.kernels.triton.arithmetic import cast_to, rounded
from quire.kernels.triton.launching import Launch, check_contiguous, check_tensor
from quire.kernels.triton.sizes import power_of_two

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Norm(NamedTuple):
    """A normalisation of rows [N]; weight and bias [N] in the dtype of the rows, a bias only for kind "layer"."""

    spec: NormSpec
    weight: Tensor
    bias: Tensor | None = None


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Return the rows of x [T, N] normalised, as kernels/reference/norm.py does."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_and_normalize_launch(out, None, x, None, norm).run()
    return out


def add_and_normalize(
    x: Tensor, branch: Tensor, norm: Norm | None, branch_norm: Norm | None = None, residual_scale: float = 1.0
) -> Tensor:
    """Add a branch to the residual stream in place and return the normalised sum; without a norm, the stream itself.

    x               [T, N], becomes x + residual_scale * branch_norm(branch); every operation is rounded to x's dtype
    branch          [T, N] in x's dtype; branch_norm None: added as it is
    Returns         [T, N] in x's dtype; rows are independent
    """
    out = None if norm is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_and_normalize_launch(out, x, x, branch, norm, branch_norm, residual_scale).run()
    return x if out is None else out


def add_and_normalize_launch(
    out: Tensor | None,
    total: Tensor | None,
    x: Tensor,
    branch: Tensor | None,
    norm: Norm | None,
    branch_norm: Norm | None = None,
    residual_scale: float = 1.0,
) -> Launch:
    """Return the launch that writes total = x + residual_scale * branch_norm(branch) and out = norm(total).

    out, total  [T, N] contiguous, or None: not needed; total may be x
    branch      None: total is x, and is not written
    """
    width = x.shape[-1]
    check_tensor("x", x, (None, width), *_FLOATS)
    for name, tensor in (("out", out), ("total", total)):
        if tensor is not None:
            check_contiguous(name, tensor, tuple(x.shape), x.dtype)
    if branch is not None:
        check_tensor("branch", branch, tuple(x.shape), x.dtype)
    if (branch is None) != (total is None) or (norm is None) != (out is None):
        raise InvariantError("a sum has a branch and a place, a normalised sum a norm and a place")
    arguments = {
        "x_ptr": x,
        "branch_ptr": branch,
        "total_ptr": total,
        "out_ptr": out,
        "x_stride": x.stride(0),
        "branch_stride": 0 if branch is None else branch.stride(0),
        "residual_scale": float(residual_scale),
        **_norm_arguments("", norm, x),
        **_norm_arguments("branch_", branch_norm, x),
    }
    constants = {
        "WIDTH": width,
        "BLOCK": power_of_two(width),
        "IS_SCALED": residual_scale != 1.0,
        **_norm_constants("", norm),
        **_norm_constants("BRANCH_", branch_norm),
    }
    num_warps = 4 if width <= 4096 else 8 if width <= 8192 else 16
    return Launch(_add_and_normalize, (x.shape[0],), arguments, constants, num_warps, num_stages=1)


def _norm_arguments(prefix: str, norm: Norm | None, x: Tensor) -> dict[str, Tensor | None]:
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    for tensor in (weight, bias):
        if tensor is not None:
            check_contiguous(f"{prefix}weight or bias", tensor, (x.shape[-1],), x.dtype)
    return {f"{prefix}weight_ptr": weight, f"{prefix}bias_ptr": bias}


def _norm_constants(prefix: str, norm: Norm | None) -> dict[str, object]:
    spec = NormSpec("rms", 0.0) if norm is None else norm.spec
    return {
        f"{prefix}EPS": spec.eps,
        f"{prefix}OFFSET": float(spec.offset),
        f"{prefix}IS_CENTERED": spec.kind == "layer",
        f"{prefix}CASTS_LATE": spec.late_cast,
    }


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
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_CENTERED:
        if OFFSET != 0:
            weight = rounded(weight + OFFSET, DTYPE)
        x = tl.where(mask, x - tl.sum(x, 0) / WIDTH, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS) * weight
        if bias_ptr is not None:
            x = x + tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
        x = scale_normalized(x, weight, OFFSET, CASTS_LATE, DTYPE)
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
