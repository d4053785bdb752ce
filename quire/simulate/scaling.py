"""DemandMeter: what the autoscaler is told of a simulated cluster, as a server's metrics would say it."""

from __future__ import annotations

from collections import deque

from quire.router.autoscale import Demand

_MEAN_S = 45.0
_RECENT_S = 5.0
_LEAST_S = 5.0


class _Rate:
    """Amounts by time, and their sums over the last seconds."""

    def __init__(self) -> None:
        self._amounts: deque[tuple[float, float]] = deque()

    def add(self, now: float, amount: float) -> None:
        self._amounts.append((now, amount))

    def per_s(self, now: float, span_s: float) -> float:
        """Return the mean of the last span_s seconds, or of all since the start where that is less."""
        while self._amounts and self._amounts[0][0] < now - _MEAN_S:
            self._amounts.popleft()
        total = sum(amount for at_s, amount in self._amounts if at_s >= now - span_s)
        return total / min(span_s, max(now, _LEAST_S))


class DemandMeter:
    """What clients want of one role.

    window_s  over which attainment is counted
    """

    def __init__(self, window_s: float) -> None:
        self._prompts, self._outputs = _Rate(), _Rate()
        self._window_s = window_s
        self._results: deque[tuple[float, bool]] = deque()

    def note_prompt(self, now: float, num_tokens: int) -> None:
        """Note a request, also one that is refused."""
        self._prompts.add(now, num_tokens)

    def note_output(self, now: float, num_tokens: int) -> None:
        """Note output tokens."""
        self._outputs.add(now, num_tokens)

    def note_result(self, now: float, is_met: bool) -> None:
        """Note whether a request was within the role's objective."""
        self._results.append((now, is_met))

    def read(self, now: float, queued_tokens: float, num_late: int) -> Demand:
        """Return the demand. num_late: requests without a result that are late already."""
        while self._results and self._results[0][0] < now - self._window_s:
            self._results.popleft()
        num_results = len(self._results) + num_late
        mean = self._prompts.per_s(now, _MEAN_S)
        recent = self._prompts.per_s(now, _RECENT_S)
        return Demand(
            prompt_tokens_per_s=mean,
            output_tokens_per_s=self._outputs.per_s(now, _MEAN_S),
            recent_share=recent / mean if mean > 0 else 1.0,
            queued_tokens=queued_tokens,
            attainment=sum(is_met for _, is_met in self._results) / num_results if num_results else None,
        )
