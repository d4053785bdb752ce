"""Linear layers with quantised weights for steps with few tokens, fused with the operations around them in one launch.

As fused_linear.py for plain weights. One token is multiplied by ordinary arithmetic, several by tensor cores.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.fused_linear import Epilogue, check_fusion, fusion_constants
from quire.kernels.triton.fused_quantized_kernels import fused_quantized_gemm, fused_quantized_gemv
from quire.kernels.triton.launching import Launch, check_tensor
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.pdl import has_dependent_launch
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.sizes import power_of_two
from quire.kernels.triton.tiles import FusedQuantizedTile, fused_quantized_tile

MOST_TOKENS = 8
"""Maximum number of tokens of such a product. With 16 an H200 took longer than separate kernels: each program norms all."""

_NARROW_FLOATS = (torch.bfloat16, torch.float16)


def reason_not_to_fuse_weight(weight: DeviceQuantizedWeight, dtype: torch.dtype) -> str | None:
    """Return why products of inputs of that dtype with a quantised weight cannot be fused; None if they can be."""
    if dtype not in _NARROW_FLOATS:
        return "quantised weights and inputs in float32"
    if weight.columns is not None:
        return "quantised weights whose columns are reordered"
    return None


def fused_quantized_launch(
    out: Tensor,
    x: Tensor,
    weight: DeviceQuantizedWeight,
    norm: Norm | None = None,
    epilogue: Epilogue | None = None,
) -> Launch:
    """Return the launch that writes epilogue(norm(x) @ weight^T) to out, summed in f32.

    out     [T, O] with contiguous rows, [T, O / 2] if gated; not x
    x       [T, K] bfloat16 or float16 with contiguous rows, 1 <= T <= MOST_TOKENS
    weight  [O, K]: gate before up
    norm    RMSNorm of the rows of x, as `normalize`; None: none

    Rows are independent; a row alone may differ from the same one beside others by rounding.
    Raises InvariantError for shapes and dtypes that do not match, UnsupportedError for other activations.
    """
    epilogue = epilogue or Epilogue()
    _check(out, x, weight, norm, epilogue)
    num_tokens = x.shape[0]
    num_rows, num_columns = weight.shape
    row_bytes = weight.codes.shape[1]
    tile = fused_quantized_tile(num_tokens, num_rows, row_bytes, weight.is_packed, norm is not None)
    is_pdl = has_dependent_launch(x.device)
    arguments = {
        "x_ptr": x,
        "codes_ptr": weight.readable_codes,
        "scales_ptr": weight.scales,
        "offsets_ptr": weight.offsets,
        "norm_weight_ptr": None if norm is None else norm.weight,
        "bias_ptr": epilogue.bias,
        "out_ptr": out,
        "x_stride": x.stride(0),
        "out_stride": out.stride(0),
        "num_tokens": num_tokens,
        "residual_scale": epilogue.residual_scale or 0.0,
    }
    block = min(tile.bytes, power_of_two(row_bytes, 16))
    constants = {
        "NUM_ROWS": num_rows,
        "NUM_COLUMNS": num_columns,
        "GROUP": weight.group_size,
        "SCALE_ROWS": weight.scale_rows,
        "IS_PACKED": weight.is_packed,
        "BASE": weight.base,
        "RUN": weight.run,
        "TOKENS": power_of_two(num_tokens) if tile.bytes else MOST_TOKENS,
        "BLOCK_N": tile.rows,
        **({"BLOCK": block} if tile.bytes else {"WARPS": tile.num_warps}),
        "NUM_STAGES": tile.num_stages,
        **fusion_constants(norm, epilogue),
        "THREADS": 32 * tile.num_warps,
        "FETCHED_BYTES": _fetched_bytes(weight, tile, block),
        "IS_PDL": is_pdl,
    }
    kernel = fused_quantized_gemv if tile.bytes else fused_quantized_gemm
    grid = (triton.cdiv(num_rows, tile.rows),)
    return Launch(kernel, grid, arguments, constants, tile.num_warps, tile.num_stages, is_pdl=is_pdl)


def _fetched_bytes(weight: DeviceQuantizedWeight, tile: FusedQuantizedTile, block: int) -> int:
    """Return the bytes of each row to prefetch after its first tile; 0 if rows are no multiples of 16 bytes."""
    row_bytes = weight.codes.shape[1]
    if row_bytes % 16 or weight.codes.storage_offset() % 16 or tile.rows > 32 * tile.num_warps:
        return 0
    return max(0, min(row_bytes - block, tile.fetched_bytes // tile.rows // 16 * 16))


def _check(out: Tensor, x: Tensor, weight: DeviceQuantizedWeight, norm: Norm | None, epilogue: Epilogue) -> None:
    num_rows, num_columns = weight.shape
    check_tensor("x", x, (None, num_columns), *_NARROW_FLOATS)
    num_tokens = x.shape[0]
    if not 1 <= num_tokens <= MOST_TOKENS:
        raise InvariantError(f"a step of few tokens has 1 to {MOST_TOKENS}, got {num_tokens}")
    if weight.columns is not None:
        raise InvariantError("fused products take columns in order")
    check_fusion(x, num_rows, norm, epilogue)
    check_tensor("out", out, (num_tokens, num_rows // 2 if epilogue.is_gated else num_rows), x.dtype)
