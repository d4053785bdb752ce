"""EngineLoad: the operations and bytes of the engine's steps, and their share of the machine's peaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from quire.serving.engine_client.messages import EngineInfo, StepReport

_TIME_CONSTANT_S = 10.0


@dataclass(frozen=True, slots=True)
class StepWork:
    """The operations and bytes of one step."""

    flops: float
    read_bytes: float
    written_bytes: float


def step_work(info: EngineInfo, report: StepReport) -> StepWork:
    """Return the minimum work of a step.

    flops          2 per active parameter and token; attention: 4 per element of the queries, of all heads, for each pair of a
                   new token and a token it attends to, which a window limits
    read_bytes     the active weights once, and the keys and values of every context once, as far as a window reaches
    written_bytes  keys and values of the new tokens
    """
    num_tokens = report.num_prefill_tokens + report.num_decode_tokens
    if num_tokens == 0:
        return StepWork(0.0, 0.0, 0.0)
    flops, read_bytes = 2.0 * info.num_active_parameters * num_tokens, float(info.weight_bytes)
    for kind, (num_read, num_pairs) in zip(info.attention, report.attended, strict=True):
        flops += 4.0 * kind.num_query_elements * num_pairs
        read_bytes += kind.kv_bytes_per_token * num_read
    return StepWork(flops, read_bytes, written_bytes=float(info.kv_bytes_per_token * num_tokens))


class EngineLoad:
    """Rates over the steps of about the last ten seconds, per second of step time; 0 if there was no step in that time.

    peak_flops_per_s, peak_bytes_per_s  of the machine, measured or given; None if unknown
    """

    def __init__(
        self,
        clock: Callable[[], float],
        peak_flops_per_s: float | None = None,
        peak_bytes_per_s: float | None = None,
    ) -> None:
        self._clock = clock
        self.peak_flops_per_s = peak_flops_per_s
        self.peak_bytes_per_s = peak_bytes_per_s
        self._flops = self._bytes = self._busy_s = 0.0
        self._last_s = -math.inf

    def observe(self, work: StepWork, report: StepReport) -> None:
        """Record one step."""
        end_s = report.started_s + report.duration_s
        decay = math.exp(-max(end_s - self._last_s, 0.0) / _TIME_CONSTANT_S)
        self._last_s = max(end_s, self._last_s)
        self._flops = self._flops * decay + work.flops
        self._bytes = self._bytes * decay + work.read_bytes
        self._busy_s = self._busy_s * decay + report.duration_s

    def flops_per_s(self) -> float:
        """Return operations per second of step time."""
        return self._rate(self._flops)

    def bytes_per_s(self) -> float:
        """Return bytes read per second of step time."""
        return self._rate(self._bytes)

    def mfu(self) -> float | None:
        """Return the share of the peak operations per second; None where that is unknown."""
        return self.flops_per_s() / self.peak_flops_per_s if self.peak_flops_per_s else None

    def mbu(self) -> float | None:
        """Return the share of the peak bytes per second; None where that is unknown."""
        return self.bytes_per_s() / self.peak_bytes_per_s if self.peak_bytes_per_s else None

    def _rate(self, total: float) -> float:
        is_idle = self._clock() - self._last_s > _TIME_CONSTANT_S
        return 0.0 if is_idle or self._busy_s <= 0 else total / self._busy_s
