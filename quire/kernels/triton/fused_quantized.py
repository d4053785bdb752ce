"""Linear layers with quantised weights for steps with few tokens, fused with the operations before and after them in one launch."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from quire.kernels.triton.activation import ACTIVATION_KINDS
from quire.kernels.triton.fused_linear import Epilogue
from quire.kernels.triton.fused_quantized_kernels import multiply_few_codes, multiply_several_codes
from quire.kernels.triton.launching import Launch
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.pdl import has_dependent_launch
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight
from quire.kernels.triton.sizes import power_of_two


class CodesTile(NamedTuple):
    """rows of the weight; bytes of codes processed at once (0: by matrix units, a run for each warp)."""

    rows: int
    bytes: int
    num_warps: int
    num_stages: int
    fetched_bytes: int


def multiply_codes_launch(
    out: Tensor, x: Tensor, weight: DeviceQuantizedWeight, norm: Norm | None, epilogue: Epilogue | None, tile: CodesTile
) -> Launch:
    """Return the launch that writes epilogue(norm(x) @ weight^T) to out."""
    epilogue = epilogue or Epilogue()
    num_tokens = x.shape[0]
    num_rows, num_columns = weight.shape
    is_pdl = has_dependent_launch(x.device)
    spec = None if norm is None else norm.spec
    arguments = {
        "x_ptr": x,
        "codes_ptr": weight.codes,
        "scales_ptr": weight.scales,
        "offsets_ptr": weight.offsets,
        "norm_weight_ptr": None if norm is None else norm.weight,
        "bias_ptr": epilogue.bias,
        "out_ptr": out,
        "x_stride": x.stride(0),
        "num_tokens": num_tokens,
        "residual_scale": epilogue.residual_scale or 0.0,
    }
    row_bytes = weight.codes.shape[1]
    is_matrix = tile.bytes == 0
    block = min(tile.bytes, power_of_two(row_bytes, 16))
    fetched = 0 if row_bytes % 16 else max(0, min(row_bytes - block, tile.fetched_bytes // tile.rows // 16 * 16))
    constants = {
        "NUM_ROWS": num_rows,
        "NUM_COLUMNS": num_columns,
        "GROUP": weight.group_size,
        "SCALE_ROWS": weight.scale_rows,
        "IS_PACKED": weight.is_packed,
        "BASE": weight.base,
        "RUN": weight.run,
        "TOKENS": max(8, power_of_two(num_tokens)) if is_matrix else power_of_two(num_tokens),
        "BLOCK_N": tile.rows,
        **({"WARPS": tile.num_warps} if is_matrix else {"BLOCK": block}),
        "NUM_STAGES": tile.num_stages,
        "EPS": 0.0 if spec is None else spec.eps,
        "OFFSET": 0.0 if spec is None else float(spec.offset),
        **({} if is_matrix else {"CASTS_LATE": spec is not None and spec.late_cast}),
        "KIND": -1 if epilogue.activation is None else ACTIVATION_KINDS[epilogue.activation],
        "IS_GATED": epilogue.is_gated,
        "HAS_RESIDUAL": epilogue.residual_scale is not None,
        "IS_SCALED": epilogue.residual_scale not in (None, 1.0),
        "THREADS": 32 * tile.num_warps,
        "FETCHED_BYTES": fetched,
        "IS_PDL": is_pdl,
    }
    kernel = multiply_several_codes if is_matrix else multiply_few_codes
    grid = (triton.cdiv(num_rows, tile.rows),)
    return Launch(kernel, grid, arguments, constants, tile.num_warps, tile.num_stages, is_pdl=is_pdl)
