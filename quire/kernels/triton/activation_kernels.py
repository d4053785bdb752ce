"""Kernels of activation.py: activations of feed-forward blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.arithmetic import cast_to, rounded


@triton.jit
def activated(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return silu, gelu, gelu_tanh, relu or relu2 of x, f32."""
    if KIND == 0:
        x = x * tl.sigmoid(x)
    elif KIND == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        # 1 + tanh(u) = 2 * sigmoid(2 * u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x = tl.maximum(x, 0.0)
        if KIND == 4:
            x = x * x
    return x


@triton.jit
def _activate(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    y = activated(tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32), KIND)
    if up_ptr is not None:
        up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
        y = rounded(y, gate_ptr.dtype.element_ty) * up
    tl.store(out_ptr + row * WIDTH + columns, cast_to(y, out_ptr.dtype.element_ty), mask=mask)
