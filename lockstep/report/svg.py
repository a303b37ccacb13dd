"""Charts as inline SVG: no library, no script. Colours and text come from the page's CSS, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 24
MOST_POINTS = 400
"""A longer line is thinned, keeping the lowest and the highest value of each stretch."""
MOST_MARKS = 60
"""Lines with more points are drawn without marks."""


@dataclass(frozen=True, slots=True)
class Point:
    """x is a step. `low` and `high` are an interval around y, drawn as an error bar."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """One line. Points whose y is not finite leave a gap."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps data to pixels; the ticks of y, round numbers, reach from its lower to its upper edge."""

    x0: float
    x1: float
    marks: tuple[float, ...]

    @property
    def y0(self) -> float:
        return self.marks[0]

    @property
    def y1(self) -> float:
        return self.marks[-1]

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def line_chart(name: str, series: Sequence[Series], *, limits: Sequence[float] = ()) -> str:
    """Lines over steps; `limits` (ends of a healthy range) are drawn dashed where they fall into the picture.

    `name` is what a screen reader says. Returns "" if there is not one finite value.
    """
    finite = [p for one in series for p in one.points if math.isfinite(p.y)]
    if not finite:
        return ""
    ys = [y for p in finite for y in (p.y, p.low, p.high) if y is not None and math.isfinite(y)]
    frame = _frame([p.x for p in finite], ys)
    parts = [_axes(frame)]
    for limit in limits:
        if frame.y0 <= limit <= frame.y1:
            y = frame.y(limit)
            parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts += [_line(frame, index, one) for index, one in enumerate(series)]
    return _svg(name, parts)


def stacked_chart(name: str, series: Sequence[Series]) -> str:
    """Areas on top of each other; all series have the same x. A value that is not finite counts as 0."""
    if not series or not series[0].points:
        return ""
    xs = [point.x for point in series[0].points]
    layers = [[point.y if math.isfinite(point.y) else 0.0 for point in one.points] for one in series]
    tops = [0.0] * len(xs)
    edges = [tops]
    for layer in layers:
        tops = [below + value for below, value in zip(tops, layer, strict=True)]
        edges.append(tops)
    frame = _frame(xs, [0.0, *tops])
    parts = [_axes(frame)]
    for index, (below, above) in enumerate(pairwise(edges)):
        outline = [*zip(xs, above, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        corners = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in outline)
        title = escape(series[index].label)
        parts.append(f'<polygon class="area c{index % 6}" points="{corners}"><title>{title}</title></polygon>')
    return _svg(name, parts)


def legend(labels: Sequence[str]) -> str:
    """Names beside their colours, in the order of the series."""
    return "".join(
        f'<span class="key"><i class="c{i % 6}"></i>{escape(label)}</span>' for i, label in enumerate(labels)
    )


def short(value: float) -> str:
    """A number for a label: 0.43, 1.05e-5, 12.5k"""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1e6 or 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value / 1e3:.4g}k" if size >= 1e4 else f"{value:.3g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers that span low to high, both ends included or exceeded."""
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * index for index in range(first, last + 1)]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points; of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = [p for p in points[start : start + size] if math.isfinite(p.y)]
        if stretch:
            ends = {id(p): p for p in (min(stretch, key=lambda p: p.y), max(stretch, key=lambda p: p.y))}
            kept += sorted(ends.values(), key=lambda p: p.x)
        else:
            kept.append(points[start])
    return kept


def _frame(xs: Sequence[float], ys: Sequence[float]) -> Frame:
    x0, x1 = min(xs), max(xs)
    y0, y1 = min(ys), max(ys)
    if y1 - y0 <= 1e-12 * max(abs(y0), abs(y1), 1e-12):  # a flat line is drawn in the middle of a small range
        room = abs(y0) * 0.1 or 1.0
        y0, y1 = y0 - room, y1 + room
    return Frame(x0, x1 if x1 > x0 else x0 + 1, tuple(ticks(y0, y1)))


def _axes(frame: Frame) -> str:
    parts: list[str] = []
    for value in frame.marks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(value)}</text>')
    for value in ticks(frame.x0, frame.x1):
        if frame.x0 <= value <= frame.x1 and value == round(value):
            parts.append(f'<text x="{frame.x(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value:.0f}</text>')
    return "".join(parts)


def _line(frame: Frame, index: int, series: Series) -> str:
    points = thin(series.points)
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point.y):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    path = "".join(
        ("M" if i == 0 else "L") + f"{frame.x(p.x):.1f} {frame.y(p.y):.1f}" for run in runs for i, p in enumerate(run)
    )
    parts = [f'<path class="line c{index % 6}" d="{path}"/>']
    for point in (p for run in runs for p in run):
        if point.low is not None and point.high is not None and math.isfinite(point.low) and math.isfinite(point.high):
            x, y1, y2 = frame.x(point.x), frame.y(point.low), frame.y(point.high)
            parts.append(f'<line class="bar c{index % 6}" x1="{x:.1f}" x2="{x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')
        if len(points) <= MOST_MARKS:
            parts.append(_mark(frame, index, series.label, point))
    return "".join(parts)


def _mark(frame: Frame, index: int, label: str, point: Point) -> str:
    interval = "" if point.low is None or point.high is None else f" [{short(point.low)}, {short(point.high)}]"
    title = f"{label}, step {point.x:g}: {short(point.y)}{interval}"
    where = f'cx="{frame.x(point.x):.1f}" cy="{frame.y(point.y):.1f}"'
    return f'<circle class="mark c{index % 6}" {where} r="2.2"><title>{escape(title)}</title></circle>'


def _svg(name: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">{body}</svg>'
