"""What the machine can do right now, and what a run needed: the two sides of a roofline share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import DTYPE_BYTES, MoeSpec
from quire.kernels.native import load_native

_PEAK_ROUNDS = 4_000_000
"""Rounds of products in registers: some tens of milliseconds."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured rates of this machine: bytes read per second, and floating point operations per second in a matmul."""

    bytes_per_s: float
    flops_per_s: float


def measure_roofline(report: ModelReport) -> Roofline:
    """Measure for about a second what the machine can do for a model: reads, and products in the numbers that it multiplies.

    With the native kernels these are theirs: plain reads, and products in registers, of bytes where the weights are quantised.
    With torch: a sum of a large tensor, and a matmul. Shared machines drift: measure right beside the run that is compared.
    """
    dtype = report.spec.dtype
    buffer = torch.ones(1 << 26, dtype=torch.float32)  # 256 MiB, far larger than any cache
    num_bytes, num_threads = buffer.numel() * 4, torch.get_num_threads()
    native = load_native()
    if native is None:
        a = torch.ones(2048, 2048, dtype=getattr(torch, dtype))
        return Roofline(num_bytes / _best_time(lambda: buffer.sum()), 2 * 2048**3 / _best_time(lambda: a @ a))
    kind = "u8" if is_quantized(report) else "bf16" if dtype == "bfloat16" else "f32"
    num_operations = native.peak(kind, num_threads, _PEAK_ROUNDS)
    return Roofline(
        num_bytes / _best_time(lambda: native.read_memory(buffer.data_ptr(), num_bytes, num_threads)),
        num_operations / _best_time(lambda: native.peak(kind, num_threads, _PEAK_ROUNDS)),
    )


def is_quantized(report: ModelReport) -> bool:
    """Whether most of a model's weights are run as integers."""
    dense = sum(math.prod(shape) for shape in report.parameters.values()) * DTYPE_BYTES[report.spec.dtype]
    return report.memory.weight_bytes < 0.75 * dense


def _best_time(run: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def active_parameters(report: ModelReport) -> int:
    """Parameters that one token is multiplied with: of a mixture only the experts of the token, and no embedding rows."""
    spec = report.spec
    total = 0
    for name, shape in report.parameters.items():
        share = 1.0
        if ".experts." in name:
            mlp = spec.layers[int(name.split(".")[1])].mlp
            assert isinstance(mlp, MoeSpec)
            share = mlp.top_k / mlp.num_experts
        if name == "pos.weight" or (name == "embed.weight" and not spec.is_tied):
            share = 0.0
        total += int(math.prod(shape) * share)
    return total


def needed_flops(report: ModelReport, num_prompt_tokens: int, num_output_tokens: int) -> float:
    """FLOPs of the weights' products: two per parameter and token; the head only where a token is sampled.

    Attention is left out, so that shares are, if anything, too low.
    """
    spec = report.spec
    head = spec.vocab_size * spec.hidden_size
    body = active_parameters(report) - head
    return 2.0 * (body * (num_prompt_tokens + num_output_tokens) + head * num_output_tokens)


def needed_bytes(report: ModelReport, num_steps: int) -> float:
    """Bytes of weights, as they are run, read when every step reads each active parameter once; KV is left out."""
    num_parameters = sum(math.prod(shape) for shape in report.parameters.values())
    return float(num_steps) * active_parameters(report) * report.memory.weight_bytes / num_parameters
