"""Peaks of the device, measured now, with which a run is compared."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.contracts.memory import ModelReport
from quire.kernels.peaks import SHORT, measure_peaks

_NUM_BYTES = 1 << 28
SCRATCH_BYTES = _NUM_BYTES + (16 << 20)
"""What measuring takes at most, for a moment."""
_SIZE = 4096
_TIMES = 3


def measure_device_peaks(report: ModelReport, device: torch.device) -> tuple[float, float]:
    """Return the bytes a second of reading 256 MiB, and the operations a second of a product in the model's dtype.

    Where the device is the CPU, in Triton's interpreter, they are the CPU's.
    """
    if device.type != "cuda":
        peaks = measure_peaks(report, SHORT)
        return peaks.bytes_per_s, peaks.flops_per_s
    torch.cuda.empty_cache()  # what steps left in pieces may be all that the KV pool left
    buffer = torch.ones(_NUM_BYTES // 4, device=device)
    bytes_per_s = _NUM_BYTES / _best_time(buffer.sum)
    del buffer
    a = torch.ones(_SIZE, _SIZE, dtype=getattr(torch, report.spec.dtype), device=device)
    out = torch.empty_like(a)
    return bytes_per_s, 2 * _SIZE**3 / _best_time(lambda: torch.mm(a, a, out=out))


def _best_time(run: Callable[[], object]) -> float:
    run()
    times: list[float] = []
    for _ in range(_TIMES):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1000)
    return min(times)
