"""The report as one self-contained HTML file: plots as inline SVG, each with its numbers as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from html import escape
from typing import Any

import numpy as np

from quire.bench.serving.metrics import DEFINITIONS, GOODPUT_RULE, SENDING, metric_of, metric_values, timeline, title_of
from quire.bench.serving.report import Report
from quire.bench.serving.svg import Plot, Series
from quire.bench.serving.sweep import SweepPoint, SweepResult

_MAX_POINTS = 2000
_MAX_TABLE_ROWS = 200
_NUM_BARS = 40
_NUM_BINS = 120
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6470;--paper:#fff;--line:#d5dae0;--c0:#0b62c4;--c1:#b3470c;
--c2:#1a7f4b;--c3:#8031a7}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#a3adb8;--paper:#14171a;--line:#343b43;--c0:#6cb2ff;--c1:#ff9a5c;
--c2:#5fd39a;--c3:#cf94f2}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:0 auto;padding:1rem}
h1,h2{line-height:1.2}.wide{overflow-x:auto}table{border-collapse:collapse}th,td{padding:.2rem .6rem;text-align:right;
border-bottom:1px solid var(--line)}th:first-child,td:first-child{text-align:left}caption{text-align:left;color:var(--soft)}
figure{margin:1rem 0}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:12px}
.grid{stroke:var(--line);stroke-width:1}
.line{fill:none;stroke-width:2}.s0{fill:var(--c0);stroke:var(--c0)}.s1{fill:var(--c1);stroke:var(--c1)}.s2{fill:var(--c2);
stroke:var(--c2)}.s3{fill:var(--c3);stroke:var(--c3)}.line.s0,.line.s1,.line.s2,.line.s3{fill:none}circle{fill-opacity:.6;
stroke:none}rect{stroke:none}.legend{list-style:none;display:flex;gap:1rem;flex-wrap:wrap;padding:0}.key{width:2rem;height:.5rem;
margin-right:.4rem;display:inline-block}.warnings{border-left:.3rem solid var(--c1);padding:.2rem 1rem}dt{font-weight:600}
summary{cursor:pointer}
"""


def render_html(report: Report) -> str:
    """Return the page."""
    figures = report.to_dict()
    title = f"Serving benchmark of {figures['model']}"
    sections = [
        _headline(figures),
        _latency_table(report),
        *(_distribution_section(report, name) for name in ("ttft", "tpot", "itl", "e2el")),
        _scatter_section(report),
        _timeline_section(report),
        _definitions(),
        _setup(figures),
    ]
    return _page(title, f"{_warnings(figures)}{''.join(sections)}")


def _page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f"{body}</main></body></html>\n"
    )


def render_sweep(result: SweepResult) -> str:
    """Return the page of a sweep: the speed of a user against that of all, and latencies by load."""
    points = result.points()
    figures = result.reports[0].to_dict()
    speeds = [(one.tokens_per_s_per_user, one.output_tokens_per_s) for one in points if one.tokens_per_s_per_user is not None]
    summary = "Output tokens per second of all users against those of one, for each run"
    title = "Speed of a user against throughput"
    axes = ("tokens per second and user", "tokens per second")
    frontier = Plot("frontier", title, summary, *axes, [Series("runs", speeds)])
    head = (result.sweep.kind, *(field.name for field in fields(SweepPoint)[1:]))
    table = _table("The runs", head, [astuple(one) for one in points])
    body = f"<section><h2>{title}</h2>{_figure(frontier, table)}</section>"
    body += _utilization_section(points)
    for name in ("median_ttft_ms", "p99_ttft_ms", "median_ttft_visible_ms", "median_tpot_ms"):
        values = [(one.value, getattr(one, name)) for one in points if getattr(one, name) is not None]
        plot = Plot(name, name, f"{name} by {result.sweep.kind}", result.sweep.kind, "milliseconds", [Series(name, values)])
        body += f"<section><h2>{name}</h2>{_figure(plot, _table(name, (result.sweep.kind, 'ms'), values))}</section>"
    return _page(f"Sweep of {figures['model']}", body + _definitions() + _setup(figures))


def _utilization_section(points: Sequence[SweepPoint]) -> str:
    """Return the plot of MBU and MFU against users; nothing where the peaks are not known."""
    found = [one for one in points if one.mbu_percent is not None]
    if not found:
        return ""
    names = (("MBU", "mbu_percent"), ("MFU", "mfu_percent"))
    series = [Series(title, [(one.mean_users, getattr(one, name) or 0.0) for one in found]) for title, name in names]
    title = "Utilization of bandwidth and arithmetic by users"
    plot = Plot("utilization", title, "MBU and MFU against the mean number of users", "users", "per cent of the peak", series)
    rows = [(one.mean_users, one.mbu_percent, one.mfu_percent) for one in found]
    return f"<section><h2>{title}</h2>{_figure(plot, _table(title, ('users', 'MBU %', 'MFU %'), rows))}</section>"


def _warnings(figures: dict[str, Any]) -> str:
    found = list(figures["warnings"])
    if figures["interrupted"]:
        found.insert(0, "the run was interrupted: these are the figures of what had ended until then")
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<section class="warnings"><h2>Warnings</h2><ul>{items}</ul></section>' if found else ""


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(_shown(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><caption>{escape(caption)}</caption><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
    return (
        f'<div class="wide" role="region" aria-label="{escape(caption)}" tabindex="0">{table}</div>'  # scrolls by keyboard too
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _headline(figures: dict[str, Any]) -> str:
    names = {
        "completed": "Successful requests",
        "failed": "Failed requests",
        "rejected": "Rejected requests (429, 503)",
        "duration": "Duration (s)",
        "total_input_tokens": "Input tokens",
        "total_output_tokens": "Output tokens",
        "request_throughput": "Requests per second",
        "request_goodput": "Good requests per second",
        "output_throughput": "Output tokens per second",
        "total_token_throughput": "Total tokens per second",
        "max_output_tokens_per_s": "Most output tokens in a second",
        "max_concurrent_requests": "Peak concurrent requests",
    }
    rows = [(name, figures[key]) for key, name in names.items() if figures[key] is not None]
    counted = ", ".join(f"{source} ({count})" for source, count in figures["token_count_source"].items())
    failures = [
        (f"{kind}: {entry['example']}" if entry["example"] else kind, entry["count"])
        for kind, entry in figures["failures"].items()
    ]
    failures += [(f"status {status}", count) for status, count in figures["rejections"].items()]
    table = _table(f"The run. Output tokens are counted by: {counted or 'nothing'}", ("Figure", "Value"), rows)
    errors = _table("What went wrong", ("Kind and an example", "Requests"), failures) if failures else ""
    return f"<section><h2>Summary</h2>{table}{errors}</section>"


def _latency_table(report: Report) -> str:
    shown = [percent for percent in report.percentiles if percent != 50]  # that is the median
    head = ("Metric (ms)", "Count", "Mean", "Std", "Min", "Median", *(f"P{p:g}" for p in shown), "Max")
    rows = []
    for name, found in report.distributions().items():
        if found is not None:
            values = (found.mean, found.std, found.min, found.median, *(found.percentiles[p] for p in shown), found.max)
            rows.append((name, found.count, *(value * 1000.0 for value in values)))
    return f"<section><h2>Latencies</h2>{_table('All metrics, as defined below', head, rows)}</section>"


def _figure(plot: Plot, table: str) -> str:
    return f"<figure>{plot.render()}<figcaption>{escape(plot.summary)}</figcaption>{_details(table)}</figure>"


def _details(table: str) -> str:
    return f"<details><summary>The same as a table</summary>{table}</details>"


def _distribution_section(report: Report, name: str) -> str:
    values = np.sort(np.array(metric_values(report.result.records, name))) * 1000.0
    title = title_of(name)
    if not len(values):
        return f"<section><h2>{escape(title)}</h2><p>No values.</p></section>"
    return f"<section><h2>{escape(title)}</h2>{_cumulative(values, name, title)}{_histogram(values, name, title)}</section>"


def _cumulative(values: np.ndarray, name: str, title: str) -> str:
    percents = np.linspace(0.0, 100.0, min(len(values), 201)) if len(values) > 1 else np.array([100.0])
    at = np.percentile(values, percents)
    points = [(0.0, 0.0), *zip(at.tolist(), percents.tolist(), strict=True)]
    median, tail = np.percentile(values, [50, 99])
    summary = f"{title}: half of {len(values)} values are at most {median:.2f} ms, 99% at most {tail:.2f} ms"
    plot = Plot(f"cdf-{name}", f"{title}, cumulative", summary, "milliseconds", "percent of values", [Series(title, points)])
    rows = [
        (f"{percent:g}", float(np.percentile(values, percent))) for percent in (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)
    ]
    return _figure(plot, _table(f"{title}, cumulative", ("Percent", "At most (ms)"), rows))


def _histogram(values: np.ndarray, name: str, title: str) -> str:
    counts, edges = np.histogram(values, bins=_NUM_BARS, range=(0.0, float(values.max()) or 1.0))
    points = [*zip(edges[:-1].tolist(), counts.astype(float).tolist(), strict=True), (float(edges[-1]), 0.0)]
    fullest = int(counts.argmax())
    summary = f"{title}: most values ({counts[fullest]}) lie from {edges[fullest]:.2f} to {edges[fullest + 1]:.2f} ms"
    plot = Plot(f"hist-{name}", f"{title}, histogram", summary, "milliseconds", "values", [Series(title, points, "bars")])
    rows = [(float(low), float(high), int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False) if count]
    return _figure(plot, _table(f"{title}, histogram", ("From (ms)", "To (ms)", "Values"), rows))


def _scatter_section(report: Report) -> str:
    found = [(record.num_input_tokens, metric_of(record, "ttft")) for record in report.result.records if record.outcome == "ok"]
    points = [(float(length), value * 1000.0) for length, value in found if value is not None]
    if not points:
        return "<section><h2>First token by prompt length</h2><p>No values.</p></section>"
    step = -(-len(points) // _MAX_POINTS)
    shown = f"{len(points)} requests" if step == 1 else f"one in {step} of {len(points)} requests"
    summary = f"Time to the first token of {shown}, against the tokens of their prompts"
    series = [Series("requests", points[::step], "points")]
    plot = Plot("ttft-by-length", "First token by prompt length", summary, "prompt tokens", "milliseconds", series)
    table = _table(summary + ", by length", ("Prompt tokens", "Requests", "Median (ms)", "Max (ms)"), _by_length(points))
    return f"<section><h2>First token by prompt length</h2>{_figure(plot, table)}</section>"


def _by_length(points: list[tuple[float, float]]) -> list[tuple[str, int, float, float]]:
    """Return rows of points in at most 20 ranges of length."""
    lengths = np.array([length for length, _ in points])
    values = np.array([value for _, value in points])
    edges = np.linspace(lengths.min(), lengths.max() + 1, min(20, int(np.ptp(lengths)) + 1) + 1)
    places = np.digitize(lengths, edges) - 1
    rows = []
    for place in np.unique(places).tolist():
        inside = values[places == place]
        low, high = int(lengths[places == place].min()), int(lengths[places == place].max())
        name = str(low) if low == high else f"{low} to {high}"
        rows.append((name, len(inside), float(np.median(inside)), float(inside.max())))
    return rows


def _timeline_section(report: Report) -> str:
    duration = report.result.duration_s
    course = timeline(report.result, max(duration / _NUM_BINS, 1e-3))
    starts = [index * course.bin_s for index in range(len(course.tokens_per_s))]
    edges = [*starts, starts[-1] + course.bin_s]
    rates = Series("output tokens per second", _as_steps(edges, course.tokens_per_s), "step")
    under_way = Series("requests under way", _as_steps(edges, course.concurrency), "step")
    rows = list(zip(starts, course.tokens_per_s, course.concurrency, strict=True))[:_MAX_TABLE_ROWS]
    head = ("From (s)", "Output tokens per second", "Requests under way, at most")
    table = _table(f"The run in steps of {course.bin_s:.3g} s", head, rows)
    peak = f"at most {max(course.tokens_per_s):.1f} tokens per second in steps of {course.bin_s:.3g} s"
    tokens = Plot(
        "tokens", "Output tokens over time", f"Output tokens over time, {peak}", "seconds", "tokens per second", [rates]
    )
    most = f"Requests under way over time, at most {max(course.concurrency)}"
    requests = Plot("requests", "Requests over time", most, "seconds", "requests", [under_way])
    return f"<section><h2>Over time</h2>{_figure(tokens, table)}{_figure(requests, table)}</section>"


def _as_steps(edges: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Return points that hold each value from its edge to the next one."""
    return list(zip(edges, (*values, values[-1]), strict=True))


def _definitions() -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in DEFINITIONS.items())
    rest = f"<dt>sending</dt><dd>{escape(SENDING)}</dd><dt>goodput</dt><dd>{escape(GOODPUT_RULE)}</dd>"
    return f"<section><h2>Definitions</h2><dl>{items}{rest}</dl></section>"


def _setup(figures: dict[str, Any]) -> str:
    names = ("backend", "base_url", "endpoint", "model", "tokenizer", "dataset", "arrival", "num_prompts", "max_concurrency")
    names += ("ignore_eos", "seed", "event_loop", "json_parser", "quire_version", "platform", "machine", "commit", "date")
    rows: list[tuple[str, Any]] = [(name, figures[name]) for name in names]
    for name, value in figures["client"].items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        rows += [(f"client: {name} {part}".rstrip(), number) for part, number in parts]
    return f"<section><h2>Setup and load generator</h2>{_table('What ran', ('Name', 'Value'), rows)}</section>"
