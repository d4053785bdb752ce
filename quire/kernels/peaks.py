"""Measure the machine's current peak rates, to which the speed of a run is compared."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.contracts.memory import ModelReport
from quire.kernels.native import load_native

LONG, SHORT = 1.0, 0.05


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured rates of this machine: bytes read per second, and floating point operations per second in a matmul."""

    bytes_per_s: float
    flops_per_s: float


def measure_peaks(report: ModelReport, effort: float = LONG, num_threads: int | None = None) -> Peaks:
    """Measure the machine's peak rates for a model: memory reads, and products in the dtype that the model multiplies in.

    With the native kernels both are measured by these: plain reads, and products in registers, of bytes if the weights are
    quantised. With torch: a sum of a large tensor, and a matmul. The speed of shared machines drifts, so measure directly
    before or after the run to compare.

    effort       LONG takes about a second and 256 MiB; SHORT a twentieth of the time and half of the memory
    num_threads  of all processes that run the model; None: the number of torch's threads in this one
    """
    dtype = report.spec.dtype
    buffer = torch.ones(1 << (26 if effort >= LONG else 25), dtype=torch.float32)  # much larger than any cache
    num_bytes, num_threads = buffer.numel() * 4, num_threads or torch.get_num_threads()
    num_times = 5 if effort >= LONG else 2
    native = load_native()
    if native is None:
        size = 2048 if effort >= LONG else 512
        a = torch.ones(size, size, dtype=getattr(torch, dtype))
        return Peaks(num_bytes / _best_time(buffer.sum, num_times), 2 * size**3 / _best_time(lambda: a @ a, num_times))
    kind = "u8" if report.is_quantized else "bf16" if dtype == "bfloat16" else "f32"
    num_rounds = int(4_000_000 * effort)  # tens of milliseconds at LONG
    num_operations = native.peak(kind, num_threads, num_rounds)
    return Peaks(
        num_bytes / _best_time(lambda: native.read_memory(buffer.data_ptr(), num_bytes, num_threads), num_times),
        num_operations / _best_time(lambda: native.peak(kind, num_threads, num_rounds), num_times),
    )


def _best_time(run: Callable[[], object], num_times: int) -> float:
    best = math.inf
    for _ in range(num_times):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best
