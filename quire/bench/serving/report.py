"""The report of a run: the same results as JSON and as a table for a terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quire.bench.serving.beside import InProcessRecord
from quire.bench.serving.caveats import find_warnings
from quire.bench.serving.metrics import (
    DEFINITIONS,
    GOODPUT_RULE,
    SENDING,
    Distribution,
    Goals,
    distribution,
    metric_values,
    peak_concurrency,
    peak_throughput,
    title_of,
)
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.runner import LoadResult
from quire.bench.serving.setup import Cost, Setup
from quire.bench.serving.utilization import Peaks, find_utilization

_MAX_EXAMPLE_CHARACTERS = 200
_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Report:
    """One run with all data of its report.

    percentile_metrics  printed in the table; the JSON has all
    percentiles         of 0 to 100
    peaks               the model and rates of what runs it, for MBU and MFU
    beside              the same run in one process; shows what the server adds
    """

    setup: Setup
    result: LoadResult
    cost: Cost
    goals: Goals
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
    beside: InProcessRecord | None = None
    peaks: Peaks | None = None

    def distributions(self) -> dict[str, Distribution | None]:
        """Return every metric's distribution over the successful requests."""
        return {name: distribution(metric_values(self.result.records, name), self.percentiles) for name in DEFINITIONS}

    def to_dict(self) -> dict[str, Any]:
        """Return all results; those that other tools report too are at the top level, times in milliseconds."""
        figures = {**asdict(self.setup), "interrupted": self.result.is_interrupted, **_counts(self.result)}
        if figures["request_rate"] == float("inf"):
            figures["request_rate"] = "inf"
        figures |= _rates(self.result, self.goals)
        used = find_utilization(self.result, self.peaks)
        figures |= {"mean_users": used.num_users, "mbu": used.mbu, "mfu": used.mfu}
        figures["peaks"] = None if self.peaks is None else self.peaks.source
        for name, found in self.distributions().items():
            figures |= _flat(name, found)
        cost = cost_figures(self.result, self.cost)
        differences = "" if self.beside is None else self.beside.differences(figures)
        if self.beside is not None and self.cost.cpu.server_s is not None and not differences:
            cost["beside_in_process"] = self.beside.added(figures, self.cost)
        figures |= {"client": cost, "definitions": DEFINITIONS | {"sending": SENDING, "goodput": GOODPUT_RULE}}
        figures["warnings"] = find_warnings(self.result, self.cost.lags_s, cost, self.setup)
        if differences:
            figures["warnings"].append(f"the record of --beside is of a different run, so nothing was compared: {differences}")
        return figures

    def to_json(self, is_detailed: bool = False) -> str:
        """Return the results as JSON, with a row for every request if is_detailed."""
        figures = self.to_dict()
        if is_detailed:
            figures["requests"] = [request_row(record, self.result.start_s) for record in self.result.records]
        return json.dumps(figures, indent=2, allow_nan=False)

    def describe(self) -> str:
        """Return the table for a terminal."""
        figures = self.to_dict()
        title = " Serving Benchmark Result (interrupted) " if self.result.is_interrupted else " Serving Benchmark Result "
        lines = [f"{title:=^{_WIDTH}}", *_headline_rows(figures)]
        for name in self.percentile_metrics:
            lines += [f"{title_of(name):-^{_WIDTH}}", *_metric_rows(name, figures, self.percentiles)]
        who = {"in-process": "Engine and load generator", "simulated": "Simulator"}.get(self.setup.backend, "Load generator")
        lines += [f"{who:-^{_WIDTH}}", *_cost_rows(figures["client"])]
        lines.append("=" * _WIDTH)
        lines += [f"warning: {warning}" for warning in figures["warnings"]]
        return "\n".join(lines)


def _counts(result: LoadResult) -> dict[str, Any]:
    records = result.records
    outcomes = Counter(record.outcome for record in records)
    ok = [record for record in records if record.outcome == "ok"]
    failures: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.outcome == "failed":
            entry = failures.setdefault(record.error_kind, {"count": 0, "example": record.message})
            entry["count"] += 1
    rejections = Counter(str(record.status) for record in records if record.outcome == "rejected")
    cached = [record.usage_cached_tokens for record in ok if record.usage_cached_tokens is not None]
    return {
        "duration": result.duration_s,
        "completed": outcomes["ok"],
        "failed": outcomes["failed"],
        "rejected": outcomes["rejected"],
        "aborted": outcomes["aborted"],
        "not_sent": outcomes["waiting"],
        "failures": failures,
        "rejections": dict(sorted(rejections.items())),
        "num_retries": sum(record.num_retries for record in records),
        "total_input_tokens": sum(record.num_input_tokens for record in ok),
        "total_output_tokens": sum(record.num_output_tokens for record in ok),
        "total_cached_tokens": sum(cached) if cached else None,
        "token_count_source": dict(sorted(Counter(record.token_source for record in ok).items())),
        "num_events": sum(record.num_events for record in records),
    }


def _rates(result: LoadResult, goals: Goals) -> dict[str, Any]:
    records, duration = result.records, result.duration_s
    ok = [record for record in records if record.outcome == "ok"]
    num_output = sum(record.num_output_tokens for record in ok)
    num_total = num_output + sum(record.num_input_tokens for record in ok)
    num_good = sum(goals.is_met_by(record) for record in records) if goals.limits_s else None
    per_s = 1.0 / duration if duration > 0 else 0.0
    return {
        "request_throughput": len(ok) * per_s,
        "request_goodput": None if num_good is None else num_good * per_s,
        "num_good_requests": num_good,
        "goodput_limits_ms": {name: limit * 1000.0 for name, limit in goals.limits_s.items()},
        "output_throughput": num_output * per_s,
        "total_token_throughput": num_total * per_s,
        "max_output_tokens_per_s": peak_throughput(result),
        "max_concurrent_requests": peak_concurrency(result),
    }


def _flat(name: str, found: Distribution | None) -> dict[str, float | None]:
    if found is None:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "min", "max")}
    kinds = {"mean": found.mean, "median": found.median, "std": found.std, "min": found.min, "max": found.max}
    kinds |= {f"p{percent:g}": value for percent, value in found.percentiles.items()}
    return {f"{kind}_{name}_ms": value * 1000.0 for kind, value in kinds.items()}


def cost_figures(result: LoadResult, cost: Cost) -> dict[str, Any]:
    """Return the CPU time of the load generator and, if known, of the server, per request, event and token."""
    num_sent = sum(record.sent_s is not None for record in result.records)
    num_events = sum(record.num_events for record in result.records)
    num_tokens = sum(record.num_output_tokens for record in result.records)
    lags = np.array(cost.lags_s or (0.0,)) * 1000.0
    figures: dict[str, Any] = {
        "cpu_share": cost.cpu.client_s / result.duration_s if result.duration_s > 0 else 0.0,
        "loop_lag_ms": {
            "p50": float(np.percentile(lags, 50)),
            "p99": float(np.percentile(lags, 99)),
            "max": float(lags.max()),
            "count": len(cost.lags_s),
        },
        "num_connections": cost.num_connections,
    }
    if cost.server_lag is not None:
        figures["server_loop_lag_ms"] = cost.server_lag.figures()
    if cost.engine_steps is not None:
        figures["engine_steps"] = cost.engine_steps
    times = (("cpu", cost.cpu.client_s), ("server_cpu", cost.cpu.server_s), ("front_end_cpu", cost.cpu.front_end_s))
    for who, seconds in times:
        if seconds is not None:
            figures[f"{who}_s"] = seconds
            figures[f"{who}_ms_per_request"] = _share(seconds * 1e3, num_sent)
            figures[f"{who}_us_per_event"] = _share(seconds * 1e6, num_events)
            figures[f"{who}_us_per_token"] = _share(seconds * 1e6, num_tokens)
    return figures


def _share(amount: float, count: int) -> float | None:
    return amount / count if count else None


def request_row(record: RequestRecord, start_s: float) -> dict[str, Any]:
    """Return one request for the detailed JSON; times in seconds from the run's start."""

    def since(time: float | None) -> float | None:
        return None if time is None else round(time - start_s, 6)

    return {
        "index": record.index,
        "outcome": record.outcome,
        "status": record.status,
        "error": f"{record.error_kind}: {record.message}" if record.error_kind else None,
        "finish_reason": record.finish_reason,
        "num_retries": record.num_retries,
        "input_tokens": record.num_input_tokens,
        "output_tokens": record.num_output_tokens,
        "wanted_tokens": record.num_wanted_tokens,
        "scheduled_s": since(record.scheduled_s),
        "sent_s": since(record.sent_s),
        "first_choice_s": since(record.first_choice_s),
        "last_choice_s": since(record.last_choice_s),
        "end_s": since(record.end_s),
        "content_s": [since(time) for time in record.content_s],
    }


def _headline_rows(figures: dict[str, Any]) -> list[str]:
    rate = figures["request_rate"]
    outcomes = [_row("Successful requests:", figures["completed"]), _row("Failed requests:", figures["failed"])]
    for kind, entry in figures["failures"].items():
        outcomes += [_row(f"  {kind}:", entry["count"]), f"    {_on_one_line(entry['example'])}"]
    rows: list[tuple[str, Any]] = [
        ("Rejected requests:", figures["rejected"]),
        *((f"  status {status}:", count) for status, count in figures["rejections"].items()),
        ("Retries:", figures["num_retries"] or None),
        ("Aborted requests:", figures["aborted"] or None),
        ("Requests not sent:", figures["not_sent"] or None),
        ("Maximum request concurrency:", figures["max_concurrency"]),
        ("Request rate configured (RPS):", None if rate == "inf" else rate),
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("  counted by:", ", ".join(figures["token_count_source"]) or None),
        ("Request throughput (req/s):", figures["request_throughput"]),
        ("Request goodput (req/s):", figures["request_goodput"]),
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", figures["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
        ("Model bandwidth utilization, MBU (%):", None if figures["mbu"] is None else 100.0 * figures["mbu"]),
        ("Model FLOPs utilization, MFU (%):", None if figures["mfu"] is None else 100.0 * figures["mfu"]),
        ("  of:", figures["peaks"]),
    ]
    return outcomes + [_row(label, value) for label, value in rows if value is not None]


def _on_one_line(text: str) -> str:
    """Return the beginning of a server's message, safe for a terminal."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:_MAX_EXAMPLE_CHARACTERS]


def _metric_rows(name: str, figures: dict[str, Any], percentiles: Sequence[float]) -> list[str]:
    shown = [percent for percent in percentiles if percent != 50]  # that is the median
    kinds = [("Mean", "mean"), ("Median", "median"), *((f"P{percent:g}", f"p{percent:g}") for percent in shown)]
    label = name.upper() if name in ("ttft", "tpot", "itl", "e2el") else name
    return [_row(f"{title} {label} (ms):", figures.get(f"{kind}_{name}_ms")) for title, kind in kinds]


def _cost_rows(cost: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, Any]] = [
        ("CPU time per request (ms):", cost["cpu_ms_per_request"]),
        ("CPU time per streamed event (us):", cost["cpu_us_per_event"]),
        ("CPU time per output token (us):", cost["cpu_us_per_token"]),
        ("CPU share of one core:", cost["cpu_share"]),
        ("Event loop lag, P99 (ms):", cost["loop_lag_ms"]["p99"]),
        ("Event loop lag, max (ms):", cost["loop_lag_ms"]["max"]),
    ]
    if "server_cpu_s" in cost:
        rows.append(("Server CPU time per request (ms):", cost["server_cpu_ms_per_request"]))
        rows.append(("Server CPU time per output token (us):", cost["server_cpu_us_per_token"]))
    if "front_end_cpu_s" in cost:
        rows.append(("  of it, without the engine's process:", cost["front_end_cpu_us_per_token"]))
    if "beside_in_process" in cost:
        rows.append(("  of it, not taken in one process:", cost["beside_in_process"]["added_cpu_us_per_token"]))
        rows.append(("  the same per request (ms):", cost["beside_in_process"]["added_cpu_ms_per_request"]))
        rows.append(("    by the HTTP process:", cost.get("front_end_cpu_ms_per_request")))
        rows.append(("    by the engine's process:", cost["beside_in_process"]["added_engine_cpu_ms_per_request"]))
        rows.append(("Steps of the engine, here:", cost.get("engine_steps")))
        rows.append(("  in one process:", cost["beside_in_process"]["in_process_engine_steps"]))
    if "server_loop_lag_ms" in cost:
        rows.append(("Server event loop lag, P99 at most (ms):", cost["server_loop_lag_ms"]["p99_at_most"]))
    return [_row(label, value) for label, value in rows]


def _row(label: str, value: Any) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<42} {shown}"
