"""The plan as one self-contained HTML page, with a roofline chart and the frontier of latency and throughput as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from quire.planner.plan import Plan, replica_of
from quire.planner.report import describe_plan
from quire.planner.step_time import StepWork, step_bytes, step_flops

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 20, 52
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6470;--paper:#fff;--line:#d5dae0;--c0:#0b62c4;--c1:#b3470c;--c2:#1a7f4b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#a3adb8;--paper:#14171a;--line:#343b43;--c0:#6cb2ff;--c1:#ff9a5c;
--c2:#5fd39a}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:0 auto;padding:1rem}
pre{overflow-x:auto;font-size:13px}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:12px}
.grid{stroke:var(--line)}.roof{fill:none;stroke:var(--c0);stroke-width:2}.decode{fill:var(--c1)}.prefill{fill:var(--c2)}
.front{fill:none;stroke:var(--c1);stroke-width:2}table{border-collapse:collapse}th,td{padding:.2rem .6rem;text-align:right;
border-bottom:1px solid var(--line)}th:first-child,td:first-child{text-align:left}
"""


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """One kind of step: its operations per byte, and the operations per second that its predicted time gives."""

    name: str
    is_prefill: bool
    intensity: float
    flops_per_s: float


def roofline_points(plan: Plan) -> list[RooflinePoint]:
    """Return decode steps by batch and context, and prompts by length, of one replica of the best layout (or the first)."""
    question = plan.question
    layout = (plan.best or plan.layouts[0]).layout
    replica, _ = replica_of(question, layout)
    shape, found = question.shape, []
    context = max(1, round(question.lengths.mean_input + question.lengths.mean_output / 2))
    cases = [(f"decode, batch {batch}", [(context, 1)] * batch, batch) for batch in (1, 8, 64, 256)]
    longest = min(question.limits.max_num_batched_tokens, question.limits.max_model_len)
    cases += [
        (f"prompt of {length}", [(0, length)], 1) for length in dict.fromkeys((min(128, longest), min(1024, longest), longest))
    ]
    for name, spans, num_sampled in cases:
        work = StepWork.of_spans(spans, shape.windows, num_sampled)
        flops = sum(step_flops(shape, work))
        num_bytes = sum(step_bytes(shape, work, question.precision, question.kv_format))
        found.append(RooflinePoint(name, spans[0][0] == 0, flops / num_bytes, flops / replica.times.mean_s(work)))
    return found


def render_plan(plan: Plan) -> str:
    """Return the page."""
    title = f"Plan for {plan.question.shape.name} on {plan.question.num_devices} x {plan.question.hardware.label}"
    points = roofline_points(plan)
    sections = [
        f"<pre>{escape(describe_plan(plan))}</pre>",
        f"<h2>Roofline</h2>{_roofline_chart(plan, points)}{_point_table(points)}",
        f"<h2>Latency against throughput</h2>{_frontier_chart(plan)}",
        f"<h2>Sources</h2>{_sources(plan)}",
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>{''.join(sections)}"
        "</main></body></html>\n"
    )


@dataclass(frozen=True, slots=True)
class _LogAxes:
    """Two logarithmic axes. low and high are exponents of ten."""

    x_low: int
    x_high: int
    y_low: int
    y_high: int

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> _LogAxes:
        def span(values: Sequence[float]) -> tuple[int, int]:
            low = math.floor(math.log10(min(values)))
            return low, max(low + 1, math.ceil(math.log10(max(values))))

        return cls(*span(xs), *span(ys))

    def x(self, value: float) -> float:
        return _LEFT + (math.log10(value) - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def render(self, x_name: str, y_name: str) -> str:
        parts = []
        for power in range(self.x_low, self.x_high + 1):
            x = self.x(10.0**power)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{10.0**power:g}</text>')
        for power in range(self.y_low, self.y_high + 1):
            y = self.y(10.0**power)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
        parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_name)}</text>')
        middle = _HEIGHT / 2
        parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>')
        return "".join(parts)


def _roofline_chart(plan: Plan, points: Sequence[RooflinePoint]) -> str:
    question = plan.question
    num_devices = (plan.best or plan.layouts[0]).layout.num_devices
    peak = question.hardware.flops_of(question.precision) * num_devices
    bandwidth = question.hardware.bytes_per_s * num_devices
    ridge = peak / bandwidth
    intensities = [*(point.intensity for point in points), ridge, 0.3 * ridge, 3 * ridge]
    axes = _LogAxes.around(intensities, [*(point.flops_per_s for point in points), peak])
    left, right = 10.0**axes.x_low, 10.0**axes.x_high
    start = max(left, 10.0**axes.y_low / bandwidth)
    roof = [(start, start * bandwidth), (ridge, peak), (right, peak)]
    path = "M" + "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in roof)
    marks = "".join(
        f'<circle class="{"prefill" if point.is_prefill else "decode"}" cx="{axes.x(point.intensity):.1f}" '
        f'cy="{axes.y(point.flops_per_s):.1f}" r="4"><title>{escape(point.name)}</title></circle>'
        for point in points
    )
    summary = (
        f"Roofline of {question.hardware.name}: memory-bound below {ridge:.0f} FLOP per byte, compute-bound above. Decode "
        "steps and prompts of the model are marked."
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="roofline-desc">'
        f'<desc id="roofline-desc">{escape(summary)}</desc>{axes.render("FLOP per byte", "FLOP per second")}'
        f'<path class="roof" d="{path}"/>{marks}</svg><p>{escape(summary)}</p>'
    )


def _point_table(points: Sequence[RooflinePoint]) -> str:
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{one.intensity:.1f}</td><td>{one.flops_per_s / 1e12:.2f}</td></tr>"
        for one in points
    )
    return f"<table><tr><th>Step</th><th>FLOP per byte</th><th>TFLOP/s (predicted)</th></tr>{rows}</table>"


def frontier(plan: Plan) -> list[tuple[int, float, float]]:
    """Return (batch, output tokens/s per user, output tokens/s of a replica) by batch, as far as the memory allows."""
    best = plan.best
    if best is None:
        return []
    replica, _ = replica_of(plan.question, best.layout)
    batches = [1 << power for power in range(20) if 1 << power <= best.batch_by_memory]
    batches = sorted({*batches, best.batch_by_memory, best.batch_by_objective})
    found = [replica.operate(batch, plan.question.lengths, plan.question.hit_share) for batch in batches]
    return [(one.num_sequences, 1.0 / one.step_s, one.output_tokens_per_s) for one in found]


def _frontier_chart(plan: Plan) -> str:
    found = frontier(plan)
    if not found:
        return "<p>No layout can be used.</p>"
    axes = _LogAxes.around([per_user for _, per_user, _ in found], [total for _, _, total in found])
    path = "M" + "L".join(f"{axes.x(per_user):.1f} {axes.y(total):.1f}" for _, per_user, total in found)
    rows = "".join(f"<tr><td>{batch}</td><td>{user:.1f}</td><td>{total:,.0f}</td></tr>" for batch, user, total in found)
    summary = "Output tokens per second of a replica against those of one user, by batch."
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="front-desc"><desc id="front-desc">{summary}</desc>'
        f'{axes.render("tokens per second and user", "tokens per second")}<path class="front" d="{path}"/></svg>'
        f"<table><tr><th>Batch</th><th>Tokens/s per user</th><th>Tokens/s</th></tr>{rows}</table>"
    )


def _sources(plan: Plan) -> str:
    items = "".join(
        f"<li>{escape(name)}: {escape(source)}</li>" for name, source in sorted(plan.question.hardware.source.items())
    )
    return f"<ul>{items}</ul>"
