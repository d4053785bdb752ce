"""Metrics of a run from its records' times. Tools define them differently: each definition has its own name here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.base.errors import ConfigError
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.runner import LoadResult

SENDING = "just before a connection is taken or opened, of the first attempt when there were several"
DEFINITIONS = {
    "ttft": "time to the first token: from sending to the first event with content (or, if none has any, with choices)",
    "ttft_first_event": "from sending to the first event that has choices, even empty ones",
    "ttft_visible": "time to the first visible token: from sending to the first event with text of the answer, after reasoning",
    "tpot": "time per output token after the first: (last event with content - first one) / (output tokens - 1)",
    "tpot_events": "(last event with choices - first one) / (output tokens - 1): counts a finish event that comes late",
    "tpot_with_ttft": "(last event with content - sending) / output tokens: includes the time to the first token",
    "itl": "gaps between successive events with content, of all requests pooled; an event may bring several tokens",
    "e2el": "end-to-end latency: from sending to the last event with choices",
    "e2el_body": "from sending to the end of the response's body",
    "client_queue_time": "from when a request was due to when it was sent: waiting for --max-concurrency, or a late client",
    "e2el_including_client_queue": "from when a request was due to the last event with choices",
}
GOODPUT_RULE = (
    "successful requests per second that keep every limit; a request without a value (one output token has no time per token) "
    "keeps that limit"
)
_TITLES = {
    "ttft": "Time to First Token",
    "ttft_first_event": "Time to First Event",
    "ttft_visible": "Time to First Visible Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "tpot_events": "Time per Output Token (between events)",
    "tpot_with_ttft": "Time per Output Token (incl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "e2el_body": "End-to-end Latency (to the end of the body)",
    "client_queue_time": "Client Queue Time",
    "e2el_including_client_queue": "End-to-end Latency (incl. client queue)",
}


def title_of(metric: str) -> str:
    """Return a metric's display name."""
    return _TITLES[metric]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, population standard deviation, limits and percentiles (linear between ranks) of `count` values in seconds."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    median: float
    percentiles: dict[float, float]


def distribution(values: Sequence[float], percentiles: Iterable[float]) -> Distribution | None:
    """Return the distribution of values, None if there are none."""
    if not len(values):
        return None
    array = np.asarray(values, dtype=np.float64)
    wanted = list(percentiles)
    found = np.percentile(array, [50.0, *wanted]).tolist()
    return Distribution(
        count=len(array),
        mean=float(array.mean()),
        std=float(array.std()),
        min=float(array.min()),
        max=float(array.max()),
        median=found[0],
        percentiles=dict(zip(wanted, found[1:], strict=True)),
    )


def _first(record: RequestRecord) -> float | None:
    return record.content_s[0] if record.content_s else record.first_choice_s


def _last(record: RequestRecord) -> float | None:
    return record.content_s[-1] if record.content_s else record.last_choice_s


def _gap(after: float | None, before: float | None, parts: int = 1) -> float | None:
    return None if after is None or before is None or parts < 1 else (after - before) / parts


_PER_REQUEST: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft": lambda record: _gap(_first(record), record.sent_s),
    "ttft_first_event": lambda record: _gap(record.first_choice_s, record.sent_s),
    "ttft_visible": lambda record: _gap(record.first_visible_s, record.sent_s),
    "tpot": lambda record: _gap(_last(record), _first(record), record.num_output_tokens - 1),
    "tpot_events": lambda record: _gap(record.last_choice_s, record.first_choice_s, record.num_output_tokens - 1),
    "tpot_with_ttft": lambda record: _gap(_last(record), record.sent_s, record.num_output_tokens),
    "e2el": lambda record: _gap(record.last_choice_s, record.sent_s),
    "e2el_body": lambda record: _gap(record.end_s, record.sent_s),
    "client_queue_time": lambda record: _gap(record.sent_s, record.scheduled_s),
    "e2el_including_client_queue": lambda record: _gap(record.last_choice_s, record.scheduled_s),
}


def metric_of(record: RequestRecord, metric: str) -> float | None:
    """Return one request's value in seconds, None if it has none. Not for itl, of which a request has many."""
    return _PER_REQUEST[metric](record)


def metric_values(records: Sequence[RequestRecord], metric: str) -> list[float]:
    """Return the values of a metric over the successful records, in seconds."""
    ok = [record for record in records if record.outcome == "ok"]
    if metric == "itl":
        return [gap for record in ok for gap in np.diff(np.array(record.content_s)).tolist()]
    return [value for record in ok if (value := metric_of(record, metric)) is not None]


@dataclass(frozen=True, slots=True)
class Goals:
    """Limits in seconds by metric (ttft, tpot, e2el) that a good request keeps."""

    limits_s: dict[str, float]

    @classmethod
    def parse(cls, items: Sequence[str]) -> Goals:
        """Return the goals of items like "ttft:200", in milliseconds. Raises ConfigError."""
        limits: dict[str, float] = {}
        for item in items:
            name, _, text = item.partition(":")
            try:
                limit = float(text)
            except ValueError:
                limit = -1.0
            if name not in ("ttft", "tpot", "e2el") or not limit >= 0:
                raise ConfigError(f"--goodput takes ttft:MS, tpot:MS and e2el:MS with milliseconds >= 0, got {item!r}")
            if name in limits:
                raise ConfigError(f"--goodput names {name} twice")
            limits[name] = limit / 1000.0
        return cls(limits)

    def is_met_by(self, record: RequestRecord) -> bool:
        """Return whether a record is a success within every limit."""
        if record.outcome != "ok":
            return False
        values = ((metric_of(record, name), limit) for name, limit in self.limits_s.items())
        return all(value is None or value <= limit for value, limit in values)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Output tokens and requests in flight over time, in bins of bin_s from the start of a run.

    tokens_per_s  in each bin, of all requests, including failed ones
    concurrency   maximum number of requests in flight within each bin
    """

    bin_s: float
    tokens_per_s: list[float]
    concurrency: list[int]


def timeline(result: LoadResult, bin_s: float) -> Timeline:
    """Return the timeline of a run. The last bin may be shorter than bin_s; its rate is still per bin_s."""
    num_bins = max(1, int(np.ceil(result.duration_s / bin_s)))
    tokens = np.zeros(num_bins)
    for record in result.records:
        if record.content_s:
            bins = ((np.array(record.content_s) - result.start_s) / bin_s).astype(int)
            np.add.at(tokens, np.clip(bins, 0, num_bins - 1), record.tokens_by_event())
    return Timeline(bin_s, (tokens / bin_s).tolist(), _concurrency(result, bin_s, num_bins))


def peak_throughput(result: LoadResult, window_s: float = 1.0) -> float:
    """Return the maximum output tokens per second within any window of window_s, or of the whole run if it is shorter."""
    window = min(window_s, result.duration_s)
    records = [record for record in result.records if record.content_s]
    if not records or window <= 0:
        return 0.0
    times = np.concatenate([np.array(record.content_s) for record in records])
    order = np.argsort(times, kind="stable")
    times = times[order]
    tokens = np.concatenate([record.tokens_by_event() for record in records])[order]
    totals = np.concatenate([[0.0], np.cumsum(tokens)])
    first = np.searchsorted(times, times - window, side="right")
    return float((totals[1:] - totals[first]).max() / window)


def _concurrency(result: LoadResult, bin_s: float, num_bins: int) -> list[int]:
    peaks = [0] * num_bins
    under_way, at = 0, 0
    for time, change in _steps(result):
        reached = min(max(int((time - result.start_s) / bin_s), 0), num_bins - 1)
        for index in range(at, reached + 1):
            peaks[index] = max(peaks[index], under_way)
        at = reached
        under_way += change
        peaks[reached] = max(peaks[reached], under_way)
    for index in range(at + 1, num_bins):
        peaks[index] = max(peaks[index], under_way)
    return peaks


def peak_concurrency(result: LoadResult) -> int:
    """Return the maximum number of requests in flight; one that ends as another starts does not count twice."""
    peak = under_way = 0
    for _, change in _steps(result):
        under_way += change
        peak = max(peak, under_way)
    return peak


def _steps(result: LoadResult) -> list[tuple[float, int]]:
    """Return (time, +1 or -1) for the end and start of every request that was sent, ends before starts at the same time."""
    steps = []
    for record in result.records:
        if record.sent_s is not None:
            end = result.end_s if record.end_s is None else record.end_s
            steps += [(record.sent_s, 1), (end, -1)]
    return sorted(steps)
