"""Sum of the partial products of tensor-parallel ranks, optionally added to the residual stream."""

from __future__ import annotations

from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.adding_kernels import _add_parts
from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous
from quire.kernels.triton.sizes import ceil_divide

_BLOCK = 1024


def add_parts_launch(out: Tensor, parts: Tensor, residual_scale: float | None = None) -> Launch:
    """Return the launch that adds partial sums in f32, in the order of ranks: the same bits for any number of rows.

    out             [T, N] float, contiguous. Overwritten with the sum, rounded to its dtype
    parts           [R, T, N] in out's dtype, contiguous, R >= 1; not aliased with out
    residual_scale  out becomes out + residual_scale * sum instead, with each operation rounded to its dtype

    Raises InvariantError for shapes and dtypes that do not match.
    """
    check_contiguous("out", out, (None, None), *FLOATS)
    num_tokens, width = out.shape
    check_contiguous("parts", parts, (None, num_tokens, width), out.dtype)
    if len(parts) < 1:
        raise InvariantError("a sum has at least one part, got none")
    constants = {
        "WIDTH": width,
        "NUM_PARTS": len(parts),
        "HAS_RESIDUAL": residual_scale is not None,
        "IS_SCALED": residual_scale not in (None, 1.0),
        "BLOCK": _BLOCK,
    }
    arguments = {
        "parts_ptr": parts,
        "out_ptr": out,
        "num_tokens": num_tokens,
        "residual_scale": 0.0 if residual_scale is None else float(residual_scale),
    }
    return Launch(_add_parts, (num_tokens, ceil_divide(width, _BLOCK)), arguments, constants, num_warps=4, num_stages=1)
