"""A sweep: the same load at several concurrencies or rates, with the speed of one user against that of all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from quire.base.errors import ConfigError
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.report import Report

Kind = Literal["concurrency", "rate"]
_COLUMNS = (
    ("users", "mean_users"),
    ("tok/s/user", "tokens_per_s_per_user"),
    ("out tok/s", "output_tokens_per_s"),
    ("in tok/s", "input_tokens_per_s"),
    ("req/min", "requests_per_minute"),
    ("good/min", "good_requests_per_minute"),
    ("TTFT p50 ms", "median_ttft_ms"),
    ("TTFT p99 ms", "p99_ttft_ms"),
    ("TTFT visible", "median_ttft_visible_ms"),
    ("TPOT p50 ms", "median_tpot_ms"),
    ("MBU %", "mbu_percent"),
    ("MFU %", "mfu_percent"),
    ("failed", "num_failed"),
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is varied: requests in flight, or requests per second; values ascending."""

    kind: Kind
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Return the sweep of a text like "concurrency:1,4,16". Raises ConfigError."""
        kind, _, items = text.partition(":")
        try:
            values = tuple(float(item) for item in items.split(","))
        except ValueError:
            values = ()
        is_whole = kind != "concurrency" or all(value == round(value) for value in values if math.isfinite(value))
        if (
            kind not in ("concurrency", "rate")
            or not values
            or not all(value > 0 and math.isfinite(value) for value in values)
            or not is_whole
            or sorted(set(values)) != list(values)
        ):
            raise ConfigError(
                "--sweep takes concurrency:N,N,... (integers) or rate:R,R,... (requests per second), above 0 and ascending, "
                f"got {text!r}"
            )
        return cls("concurrency" if kind == "concurrency" else "rate", values)

    def check(self, arrivals: Arrivals) -> None:
        """Raise ConfigError for arrivals that say what the sweep varies."""
        if not math.isinf(arrivals.request_rate):
            raise ConfigError(f"--request-rate must be left out with --sweep, got {arrivals.request_rate:g}")
        if self.kind == "concurrency" and arrivals.max_concurrency is not None:
            raise ConfigError(f"--max-concurrency must be left out with --sweep concurrency, got {arrivals.max_concurrency}")
        if arrivals.process != "auto":
            raise ConfigError(f"--arrival must be auto with --sweep, got {arrivals.process!r}")

    def arrivals(self, base: Arrivals, value: float) -> Arrivals:
        """Return the arrivals of one run: a closed loop, or Poisson arrivals (also of a trace, whose lengths are used)."""
        if self.kind == "concurrency":
            return replace(base, process="poisson", request_rate=math.inf, max_concurrency=round(value))
        return replace(base, process="poisson", request_rate=value)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a sweep; None where nothing succeeded, for goodput without limits, and for MBU and MFU without peaks.

    mean_users             requests in flight, the mean over the run
    tokens_per_s_per_user  1 over the mean time per output token
    """

    value: float
    tokens_per_s_per_user: float | None
    output_tokens_per_s: float
    input_tokens_per_s: float
    requests_per_minute: float
    good_requests_per_minute: float | None
    median_ttft_ms: float | None
    p99_ttft_ms: float | None
    median_tpot_ms: float | None
    num_failed: int
    mean_users: float
    median_ttft_visible_ms: float | None
    mbu_percent: float | None
    mfu_percent: float | None

    @classmethod
    def of(cls, value: float, figures: dict[str, Any]) -> SweepPoint:
        """Return the point of a report's figures."""
        tpot = figures["mean_tpot_ms"]
        goodput = figures["request_goodput"]
        return cls(
            value,
            1000.0 / tpot if tpot else None,
            figures["output_throughput"],
            figures["total_token_throughput"] - figures["output_throughput"],
            60.0 * figures["request_throughput"],
            None if goodput is None else 60.0 * goodput,
            figures["median_ttft_ms"],
            figures.get("p99_ttft_ms"),
            figures["median_tpot_ms"],
            figures["failed"] + figures["rejected"],
            figures["mean_users"],
            figures["median_ttft_visible_ms"],
            *(None if figures[name] is None else 100.0 * figures[name] for name in ("mbu", "mfu")),
        )


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The runs of a sweep in order; fewer than its values where it was interrupted."""

    sweep: Sweep
    reports: tuple[Report, ...]

    @property
    def is_interrupted(self) -> bool:
        """Whether it was ended by Ctrl-C."""
        return any(report.result.is_interrupted for report in self.reports)

    def points(self) -> list[SweepPoint]:
        """Return the point of each run."""
        pairs = zip(self.sweep.values, self.reports, strict=False)
        return [SweepPoint.of(value, report.to_dict()) for value, report in pairs]

    def to_json(self) -> str:
        """Return the points and the reports as JSON."""
        figures = {
            "sweep": asdict(self.sweep),
            "interrupted": self.is_interrupted,
            "points": [asdict(point) for point in self.points()],
            "runs": [report.to_dict() for report in self.reports],
        }
        return json.dumps(figures, indent=2)

    def describe(self) -> str:
        """Return a table with a row for each run."""
        return describe_points(self.sweep.kind, self.points())


def describe_points(kind: str, points: Sequence[SweepPoint]) -> str:
    """Return a table of points."""
    rows = [(kind, *(title for title, _ in _COLUMNS))]
    rows += [(f"{point.value:g}", *(_cell(getattr(point, name)) for _, name in _COLUMNS)) for point in points]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def run_sweep(
    sweep: Sweep,
    base: Arrivals,
    run: Callable[[Arrivals, int], Report],
    on_point: Callable[[SweepPoint], None] | None = None,
) -> SweepResult:
    """Return the runs of a sweep, up to one that was interrupted. Raises ConfigError.

    run  makes a run with these arrivals; its second argument numbers the runs, so that each may have prompts of its own: a
         prefix cache would know those of the run before
    """
    sweep.check(base)
    reports: list[Report] = []
    for number, value in enumerate(sweep.values):
        reports.append(run(sweep.arrivals(base, value), number))
        if on_point is not None:
            on_point(SweepPoint.of(value, reports[-1].to_dict()))
        if reports[-1].result.is_interrupted:
            break
    return SweepResult(sweep, tuple(reports))
