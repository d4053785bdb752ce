"""RMSNorm and LayerNorm, with the preceding addition to the residual stream, in one pass over each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import NormSpec
from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous, check_tensor
from quire.kernels.triton.norm_kernels import _add_and_normalize
from quire.kernels.triton.sizes import power_of_two


class Norm(NamedTuple):
    """A normalisation of rows [N]; weight and bias [N] in the dtype of the rows, or None; a bias only for kind "layer"."""

    spec: NormSpec
    weight: Tensor | None = None
    bias: Tensor | None = None


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Return the rows of x [T, N] normalised, as kernels/reference/norm.py does."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_and_normalize_launch(out, None, x, None, norm).run()
    return out


def normalize_unweighted(x: Tensor, spec: NormSpec) -> Tensor:
    """Return what that of kernels/reference/norm.py does. Unlike with torch's sums, a row's bits depend on no other row."""
    return normalize(x.float().flatten(0, -2), Norm(NormSpec(spec.kind, spec.eps))).view(x.shape)


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
    check_tensor("x", x, (None, width), *FLOATS)
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
