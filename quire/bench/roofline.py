"""What the machine can do right now, and what a run needed: the two sides of a roofline share."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import DTYPE_BYTES, MoeSpec


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured rates of this machine: bytes read per second, and floating point operations per second in a matmul."""

    bytes_per_s: float
    flops_per_s: float


def measure_roofline(dtype: str) -> Roofline:
    """Measure for about a second. Shared machines drift: measure right beside the run that it is compared with."""
    buffer = torch.ones(1 << 26, dtype=torch.float32)  # 256 MiB, far larger than any cache
    bytes_per_s = buffer.numel() * 4 / _best_time(lambda: buffer.sum())
    a = torch.ones(2048, 2048, dtype=getattr(torch, dtype))
    flops_per_s = 2 * 2048**3 / _best_time(lambda: a @ a)
    return Roofline(bytes_per_s, flops_per_s)


def _best_time(run: object) -> float:
    assert callable(run)
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
    """Bytes of weights read when every step reads each active parameter once; KV is left out."""
    return float(num_steps) * active_parameters(report) * DTYPE_BYTES[report.spec.dtype]
