"""Linear layers for steps with few tokens, fused with the operations before and after them in one launch.

Before: RMSNorm of the inputs. After: bias, activation with the product of gate and up, or the addition to the residual stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.base.errors import InvariantError, UnsupportedError
from quire.contracts.model_spec import Activation
from quire.kernels.triton.activation import ACTIVATION_KINDS
from quire.kernels.triton.fused_linear_kernels import fused_linear
from quire.kernels.triton.launching import FLOATS, Launch, check_contiguous, check_tensor
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.pdl import has_dependent_launch
from quire.kernels.triton.sizes import power_of_two
from quire.kernels.triton.tiles import fused_linear_tile

FEW_TOKENS = 16
"""Maximum number of tokens of such a step: those of one matrix instruction. Every program reads the inputs of all."""

_FETCHED_BYTES = 16 << 10
"""Weights that a program prefetches in addition to its first tile: those of all programs fit the L2 cache."""


class Epilogue(NamedTuple):
    """Operations on the product y [T, O], each rounded to its dtype.

    bias            [O], added before y is rounded
    activation      activation(y), or None
    is_gated        the first half of y is the gate of the second: activation(y[:, :O / 2]) * y[:, O / 2:]
    residual_scale  out + residual_scale * y is written to out; None: y is
    """

    bias: Tensor | None = None
    activation: Activation | None = None
    is_gated: bool = False
    residual_scale: float | None = None


def fused_linear_launch(
    out: Tensor, x: Tensor, weight: Tensor, norm: Norm | None = None, epilogue: Epilogue | None = None
) -> Launch:
    """Return the launch that writes epilogue(norm(x) @ weight^T) to out.

    The bits of a row do not depend on the rows beside it. Sums of 1, of 2 to 8 and of 9 to 16 rows may have another order.

    out     [T, O] contiguous, [T, O / 2] if gated; not x
    x       [T, K] float with contiguous rows, 1 <= T <= FEW_TOKENS
    weight  [O, K] in x's dtype, contiguous: gate before up
    norm    RMSNorm of the rows of x, as `normalize`; None: none

    Raises InvariantError for shapes and dtypes that do not match, UnsupportedError for other activations.
    """
    epilogue = epilogue or Epilogue()
    _check(out, x, weight, norm, epilogue)
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    padded = 1 if num_tokens == 1 else power_of_two(num_tokens, 8)
    tile = fused_linear_tile(num_rows, num_columns, x.dtype, padded)
    is_pdl = has_dependent_launch(x.device)
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "norm_weight_ptr": None if norm is None else norm.weight,
        "bias_ptr": epilogue.bias,
        "out_ptr": out,
        "x_stride": x.stride(0),
        "num_tokens": num_tokens,
        "residual_scale": epilogue.residual_scale or 0.0,
    }
    constants = {
        "NUM_ROWS": num_rows,
        "NUM_COLUMNS": num_columns,
        "TOKENS": padded,
        "BLOCK_N": tile.rows,
        "BLOCK_K": tile.columns,
        "SPLITS": tile.splits,
        "EARLY": tile.early,
        "NUM_STAGES": tile.num_stages,
        **fusion_constants(norm, epilogue),
        "THREADS": 32 * tile.num_warps,
        "FETCHED_BYTES": _fetched_bytes(weight, tile.rows, tile.early * tile.columns),
        "IS_PDL": is_pdl,
    }
    grid = (triton.cdiv(num_rows, tile.rows),)
    # Products of 16-bit floats are exact in f32, so a fused multiply-add rounds as often. Those of f32 are not, and which ones
    # the compiler fuses depends on the number of tokens: so would the bits of a row.
    is_fused = x.dtype != torch.float32
    return Launch(fused_linear, grid, arguments, constants, tile.num_warps, tile.num_stages, is_fused, is_pdl)


def fusion_constants(norm: Norm | None, epilogue: Epilogue) -> dict[str, object]:
    """Return what the norm before a product and the operations after it are to its kernel."""
    spec = None if norm is None else norm.spec
    return {
        "EPS": 0.0 if spec is None else spec.eps,
        "OFFSET": 0.0 if spec is None else float(spec.offset),
        "CASTS_LATE": spec is not None and spec.late_cast,
        "KIND": -1 if epilogue.activation is None else ACTIVATION_KINDS[epilogue.activation],
        "IS_GATED": epilogue.is_gated,
        "HAS_RESIDUAL": epilogue.residual_scale is not None,
        "IS_SCALED": epilogue.residual_scale not in (None, 1.0),
    }


def check_fusion(x: Tensor, num_rows: int, norm: Norm | None, epilogue: Epilogue) -> None:
    """Raise InvariantError unless norm and epilogue fit inputs x [T, K] and a weight of num_rows rows, UnsupportedError for
    other activations."""
    if epilogue.activation is not None and epilogue.activation not in ACTIVATION_KINDS:
        raise UnsupportedError(f"activation must be one of {', '.join(ACTIVATION_KINDS)}, got {epilogue.activation!r}")
    if epilogue.is_gated and (epilogue.activation is None or num_rows % 2):
        raise InvariantError(f"a gate has an activation and half of the rows, got {num_rows}")
    if epilogue.bias is not None:
        check_contiguous("bias", epilogue.bias, (num_rows,), x.dtype)
    if norm is not None:
        check_contiguous("weight of the norm", norm.weight, (x.shape[1],), x.dtype)
        if norm.spec.kind != "rms" or norm.bias is not None:
            raise InvariantError(f"only RMSNorm of the inputs is supported, got {norm.spec}")


def _fetched_bytes(weight: Tensor, rows: int, columns: int) -> int:
    """Return the bytes of each row to prefetch after its first columns; 0 if rows are no multiples of 16 bytes."""
    row_bytes = weight.shape[1] * weight.itemsize
    if row_bytes % 16 or weight.storage_offset() * weight.itemsize % 16:
        return 0
    return max(0, min(row_bytes - columns * weight.itemsize, _FETCHED_BYTES // rows))


def _check(out: Tensor, x: Tensor, weight: Tensor, norm: Norm | None, epilogue: Epilogue) -> None:
    check_tensor("x", x, (None, None), *FLOATS)
    check_contiguous("weight", weight, (None, x.shape[1]), x.dtype)
    num_tokens, num_rows = x.shape[0], weight.shape[0]
    if not 1 <= num_tokens <= FEW_TOKENS:
        raise InvariantError(f"a step of few tokens has 1 to {FEW_TOKENS}, got {num_tokens}")
    check_fusion(x, num_rows, norm, epilogue)
    check_contiguous("out", out, (num_tokens, num_rows // 2 if epilogue.is_gated else num_rows), x.dtype)
