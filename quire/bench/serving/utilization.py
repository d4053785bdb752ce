"""Utilization: what a run used of a device's bandwidth (MBU) and arithmetic (MFU), from counts of bytes and operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.bench.serving.records import RequestRecord
from quire.bench.serving.runner import LoadResult
from quire.planner.model_shape import ModelShape
from quire.planner.step_time import StepWork, step_bytes, step_flops


@dataclass(frozen=True, slots=True)
class Peaks:
    """A model and the rates of what runs it, all devices together.

    source  where the rates are from, for the report
    """

    shape: ModelShape
    precision: str
    kv_format: str
    bytes_per_s: float
    flops_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares of the peaks over a run; None where nothing was generated.

    num_users  requests in flight, the mean over the run
    mbu        bytes of weights and of K and V that decode steps read, over what could be read. A step is counted for each token
               of those that decode at the same time; prompts read weights, too, and are not counted
    mfu        operations of prompts (without cached tokens) and outputs, over what could be computed
    """

    num_users: float
    mbu: float | None
    mfu: float | None


def find_utilization(result: LoadResult, peaks: Peaks | None) -> Utilization:
    """Return the utilization of a run. peaks: None: only users are known."""
    duration_s = result.duration_s
    if duration_s <= 0:
        return Utilization(0.0, None, None)
    spans = [(one.sent_s, result.end_s if one.end_s is None else one.end_s) for one in result.records if one.sent_s is not None]
    num_users = sum(end - start for start, end in spans) / duration_s
    decoded = [one for one in result.records if one.outcome == "ok" and one.num_output_tokens > 1 and len(one.content_s) > 1]
    if peaks is None or not decoded:
        return Utilization(num_users, None, None)
    read = _decode_bytes(decoded, peaks) / duration_s
    computed = _flops([one for one in result.records if one.outcome == "ok"], peaks) / duration_s
    return Utilization(num_users, read / peaks.bytes_per_s, computed / peaks.flops_per_s)


def _decode_bytes(records: Sequence[RequestRecord], peaks: Peaks) -> float:
    """Return the bytes that decode steps have read: tokens after the first, divided by how many decode at once, are steps."""
    decoding_s = sum(one.content_s[-1] - one.content_s[0] for one in records)
    num_tokens = sum(one.num_output_tokens - 1 for one in records)
    busy_s = _union_s([(one.content_s[0], one.content_s[-1]) for one in records])
    batch = max(1.0, decoding_s / busy_s) if busy_s > 0 else 1.0
    weights = peaks.shape.read_bytes(peaks.precision, round(batch)) * num_tokens / batch
    cached = 0.0
    for one in records:
        context = one.num_input_tokens + one.num_output_tokens // 2
        work = StepWork.of_spans([(context, 1)], peaks.shape.windows, 1)
        cached += step_bytes(peaks.shape, work, peaks.precision, peaks.kv_format)[1] * (one.num_output_tokens - 1)
    return weights + cached


def _flops(records: Sequence[RequestRecord], peaks: Peaks) -> float:
    """Return the operations of prompts and outputs: each token but the last is an input of the model."""
    total = 0.0
    for one in records:
        start = one.usage_cached_tokens or 0
        count = max(1, one.num_input_tokens - start) + max(0, one.num_output_tokens - 1)
        work = StepWork.of_spans([(start, count)], peaks.shape.windows, max(1, one.num_output_tokens))
        total += sum(step_flops(peaks.shape, work))
    return total


def _union_s(spans: Sequence[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
