"""Products of Qwen3-8B with bf16 and narrow weights on a GPU, for bench/gpu.py: quire's kernels, cuBLAS and scaled_mm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_kernels import Shapes, time_runs
from torch import Tensor

from quire.contracts.model_spec import NormSpec
from quire.kernels.triton.float8 import float8_launches, quantize
from quire.kernels.triton.fused_linear import Epilogue
from quire.kernels.triton.fused_quantized import MOST_TOKENS, fused_quantized_launch
from quire.kernels.triton.hopper_attention import runs_on
from quire.kernels.triton.hopper_linear import MAX_SMALL_BATCH, large_batch_launches
from quire.kernels.triton.launching import run_all
from quire.kernels.triton.linear import dequantize, multiply_launches
from quire.kernels.triton.norm import Norm
from quire.kernels.triton.quantized_weights import DeviceQuantizedWeight, pack_float8, pack_integers
from quire.kernels.triton.tiles import LargeBatchTile

Row = dict[str, object]
_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_FP8_SPEEDUP = 2  # of the tensor cores
_WARM_BYTES = 160e6


def product_rows(device: torch.device, is_tiny: bool, peaks: tuple[float, float], until_s: float) -> Iterator[Row]:
    """Yield the time of each product, its share of the bound and its error against float32; is_tiny: run each once.

    peaks  bytes and bf16 operations a second
    """
    shapes = Shapes(device, is_tiny)
    hidden, inner = (128, 64) if is_tiny else (shapes.hidden, shapes.inner)
    sizes = {
        "qkv": (hidden + hidden // 2, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    if is_tiny:
        sizes = {"o": sizes["o"]}
    for num_tokens in (1, 65) if is_tiny else (1, 8, 64, 128, 256, 2048):
        for name, size in sizes.items():
            for kind in _BYTES:
                count = 1 if is_tiny else 1 + int(_WARM_BYTES / (_BYTES[kind] * size[0] * size[1]))
                weights = [make_weight(kind, size, shapes) for _ in range(count)]
                x = shapes.random(num_tokens, size[1])
                flops = 2 * num_tokens * size[0] * size[1] / (_FP8_SPEEDUP if kind == "fp8" and num_tokens > MOST_TOKENS else 1)
                bound_us = 1e6 * max(_BYTES[kind] * size[0] * size[1] / peaks[0], flops / peaks[1])
                for label, run in ways(kind, name, x, size):
                    if time.perf_counter() > until_s:
                        return
                    row: Row = {"section": "products", "name": f"{name} {kind} {num_tokens}, {label}"}
                    try:
                        row["difference"] = _difference(run(weights[0]), x, weights[0])
                        if not is_tiny:
                            us = time_runs([partial(run, weight) for weight in weights])[0]
                            row |= {"us": us, "share": bound_us / us}
                    except (RuntimeError, ValueError, AttributeError, TypeError) as error:  # a library does not take these
                        row["failed"] = str(error)[:200]
                    yield row


def make_weight(kind: str, size: tuple[int, int], shapes: Shapes) -> Tensor | DeviceQuantizedWeight:
    """Return a random weight of a kind of _BYTES."""
    weight = shapes.random(*size) / size[1] ** 0.5
    if kind == "bf16":
        return weight
    if kind == "fp8":
        scale = torch.full((-(-size[0] // 128), size[1] // 128), 0.001, device=shapes.device)
        return pack_float8((weight.float() * 1000).clamp(-448, 448).to(torch.float8_e4m3fn), scale, (128, 128))
    limit = 8 if kind == "int4" else 128
    unit = 2 / limit / size[1] ** 0.5
    codes = (weight.float() / unit).round().clamp(-limit, limit - 1).to(torch.int8)
    scale = torch.full((size[0], size[1] // 128), unit, device=shapes.device)
    return pack_integers(codes, scale, None, (-limit, limit - 1))


def ways(kind: str, name: str, x: Tensor, size: tuple[int, int]) -> Iterator[tuple[str, Callable[..., Tensor | None]]]:
    """Yield the ways to form a product, by name: functions of a weight, which return the product, or None if it is fused."""
    out = torch.empty(x.shape[0], size[0], dtype=x.dtype, device=x.device)
    if kind == "bf16":
        yield "cuBLAS", lambda weight: torch.mm(x, weight.t(), out=out)
        return

    def launched(launches_of: Callable[..., list]) -> Callable[..., Tensor]:
        def run(weight: DeviceQuantizedWeight) -> Tensor:
            run_all(launches_of(out, x, weight))
            return out

        return run

    if x.shape[0] <= MOST_TOKENS:
        norm = Norm(NormSpec("rms", 1e-6), torch.ones_like(x[0])) if name in ("qkv", "gate_up") else None
        epilogue = {"qkv": Epilogue(), "gate_up": Epilogue(activation="silu", is_gated=True)}.get(
            name, Epilogue(residual_scale=1.0)
        )
        fused = torch.zeros(x.shape[0], size[0] // 2 if name == "gate_up" else size[0], dtype=x.dtype, device=x.device)
        yield "fused", lambda weight: fused_quantized_launch(fused, x, weight, norm, epilogue).run()
    if x.shape[0] <= 256:
        yield "dequantised in the kernel", launched(multiply_launches)
    if kind == "int4" and x.shape[0] > MAX_SMALL_BATCH and runs_on(x.device):
        for tokens in (64, 128, 256):
            yield f"dequantised in registers, {tokens}", launched(partial(large_batch_launches, tile=LargeBatchTile(tokens, 3)))
    if x.shape[0] >= 64:
        yield "dequantised, cuBLAS", lambda weight: torch.mm(x, dequantize(weight, x.dtype).t(), out=out)
    if x.shape[0] >= 64 and kind == "fp8":
        yield "fp8 inputs", launched(float8_launches)
        if x.device.type == "cuda":
            yield "fp8 inputs, scaled_mm", lambda weight: _scaled_mm(x, weight)


def _scaled_mm(x: Tensor, weight: DeviceQuantizedWeight) -> Tensor:
    rows = quantize(x, 128)
    scales = rows.scales.t().contiguous().t()  # by groups of columns, as cuBLAS reads them
    return torch._scaled_mm(rows.codes, weight.codes.t(), scales, weight.scales.t(), out_dtype=x.dtype)


def _difference(found: Tensor | None, x: Tensor, weight: Tensor | DeviceQuantizedWeight) -> float | None:
    """Return the relative error of a product; None where it is fused with other operations."""
    if found is None:
        return None
    wide = weight.float() if isinstance(weight, Tensor) else dequantize(weight, torch.float32)
    expected = x.float() @ wide.t()
    return ((found.float() - expected).norm() / expected.norm()).item()
