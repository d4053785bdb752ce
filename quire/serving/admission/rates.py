"""ServiceRates: the engine's throughput, measured from its steps."""

from __future__ import annotations

import math

from quire.serving.admission.ticket import OUTPUT_TOKEN_WEIGHT
from quire.serving.engine_client.messages import StepReport


class ServiceRates:
    """Prefill and decode tokens per second of a busy engine: exponentially weighted means over `time_constant_s`.

    The time of a mixed step is divided by tokens, with OUTPUT_TOKEN_WEIGHT for an output token, so that the times of a mixed
    load add up. Only steps of a saturated engine count, because a step of one sequence does not show the throughput of a full
    batch. Before the first such step the rates are unknown, and work is assumed to take no time.
    """

    def __init__(self, time_constant_s: float = 30.0) -> None:
        self._time_constant_s = time_constant_s
        self._prefill_tokens = self._prefill_s = 0.0
        self._decode_tokens = self._decode_s = 0.0
        self._last_end_s = -math.inf
        self._last_step_id: int | None = None

    def observe(self, report: StepReport, is_saturated: bool) -> None:
        """Record one step; for consecutive steps the time between them counts too."""
        end_s = report.started_s + report.duration_s
        follows = self._last_step_id is not None and report.step_id == self._last_step_id + 1
        elapsed_s = max(report.duration_s, end_s - self._last_end_s) if follows else report.duration_s
        decay = math.exp(-max(end_s - self._last_end_s, 0.0) / self._time_constant_s)
        # The next step is timed from the end of this one only while the engine stays saturated, so idle time does not count.
        self._last_step_id = report.step_id if is_saturated else None
        self._last_end_s = max(end_s, self._last_end_s)
        if not is_saturated or elapsed_s <= 0:
            return
        weighted = report.num_prefill_tokens + OUTPUT_TOKEN_WEIGHT * report.num_decode_tokens
        if weighted == 0:
            return
        prefill_s = elapsed_s * report.num_prefill_tokens / weighted
        self._prefill_tokens = self._prefill_tokens * decay + report.num_prefill_tokens
        self._prefill_s = self._prefill_s * decay + prefill_s
        self._decode_tokens = self._decode_tokens * decay + report.num_decode_tokens
        self._decode_s = self._decode_s * decay + elapsed_s - prefill_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Return prompt tokens per second, derived from decoding until a prompt was measured; None before any measurement."""
        if self._prefill_s > 0:
            return self._prefill_tokens / self._prefill_s
        return OUTPUT_TOKEN_WEIGHT * self._decode_tokens / self._decode_s if self._decode_s > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Return output tokens per second, derived from prefill until decoding was measured; None before any measurement."""
        if self._decode_s > 0:
            return self._decode_tokens / self._decode_s
        return self._prefill_tokens / self._prefill_s / OUTPUT_TOKEN_WEIGHT if self._prefill_s > 0 else None

    def seconds_of(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        """Return how long the engine needs for this work, 0 while its rates are unknown."""
        prefill, decode = self.prefill_tokens_per_s, self.decode_tokens_per_s
        if not prefill or not decode:
            return 0.0
        return num_prompt_tokens / prefill + num_output_tokens / decode
