"""Small plots as inline SVG: lines, steps, bars and points over two linear axes, in the page's colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Literal

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 48
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind. points: (x, y) in the units of the axes, finite; series differ by dash and colour."""

    name: str
    points: Sequence[tuple[float, float]]
    mark: Literal["line", "step", "points", "bars"] = "line"


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with axis names. summary: a sentence that describes it, for accessibility."""

    identity: str
    title: str
    summary: str
    x_name: str
    y_name: str
    series: Sequence[Series] = field(default_factory=tuple)

    def render(self) -> str:
        """Return the <svg> element."""
        points = [point for series in self.series for point in series.points]
        axes = _Axes(
            nice_ticks(0.0, max((x for x, _ in points), default=1.0)), nice_ticks(0.0, max((y for _, y in points), default=1.0))
        )
        name = self.identity
        parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc">',
            f'<title id="{name}-title">{escape(self.title)}</title><desc id="{name}-desc">{escape(self.summary)}</desc>',
            axes.render(self.x_name, self.y_name),
        ]
        parts += [_draw(series, number, axes) for number, series in enumerate(self.series)]
        return "".join([*parts, "</svg>", _legend(self.series)])


def nice_ticks(low: float, high: float, number: int = 6) -> list[float]:
    """Return about `number` round values that cover [low, high], evenly spaced by 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        span = 1.0
    raw = span / max(1, number - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil((low + span) / step - 1e-9))
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class _Axes:
    x_ticks: list[float]
    y_ticks: list[float]

    def x(self, value: float) -> float:
        share = (value - self.x_ticks[0]) / (self.x_ticks[-1] - self.x_ticks[0])
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_ticks[0]) / (self.y_ticks[-1] - self.y_ticks[0])
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def render(self, x_name: str, y_name: str) -> str:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        parts = []
        for tick in self.x_ticks:
            x = self.x(tick)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        middle = (_TOP + bottom) / 2
        parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
        parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>')
        return "".join(parts)


def _draw(series: Series, number: int, axes: _Axes) -> str:
    if not series.points:
        return ""
    colour = f"s{number % 4}"
    places = [(axes.x(x), axes.y(y)) for x, y in series.points]
    if series.mark == "points":
        return "".join(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places)
    if series.mark == "bars":
        return _bars(places, colour)
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for x, y in places[1:]:
        path += f"H{x:.1f}V{y:.1f}" if series.mark == "step" else f"L{x:.1f} {y:.1f}"
    return f'<path class="line {colour}" d="{path}"{_dash(number)}/>'


def _dash(number: int) -> str:
    dash = _DASHES[number % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _bars(places: list[tuple[float, float]], colour: str) -> str:
    """Draw bars from each x to the next; the last point only ends the last bar."""
    floor = _HEIGHT - _BOTTOM
    return "".join(
        f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{max(after - x - 1, 0.5):.1f}" '
        f'height="{max(floor - y, 0):.1f}"/>'
        for (x, y), (after, _) in pairwise(places)
    )


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = []
    for number, one in enumerate(series):
        path = f'<path class="line s{number % 4}" d="M0 4H32"{_dash(number)}/>'
        key = f'<svg class="key" viewBox="0 0 32 8" aria-hidden="true">{path}</svg>'
        items.append(f"<li>{key}{escape(one.name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'
