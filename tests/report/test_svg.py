from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.svg import (
    HEIGHT,
    LEFT,
    WIDTH,
    Point,
    Series,
    legend,
    line_chart,
    short,
    stacked_chart,
    thin,
    ticks,
)


def line(*values: float, label: str = "x") -> Series:
    return Series(label, tuple(Point(step, value) for step, value in enumerate(values)))


def shapes(svg: str, tag: str, css: str) -> list[dict[str, str]]:
    return [e.attrib for e in ElementTree.fromstring(svg).iter(tag) if css in e.attrib.get("class", "").split()]


def test_a_straight_line_is_drawn_straight_between_round_ticks() -> None:
    svg = line_chart("x", [line(0.0, 5.0, 10.0)])
    (path,) = shapes(svg, "path", "line")
    points = [tuple(map(float, pair.split())) for pair in path["d"].lstrip("M").split("L")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert (x0, x1 - x0) == (LEFT, pytest.approx(x2 - x1, abs=0.11))
    assert y0 > y1 > y2  # larger is higher
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    texts = [e.text for e in ElementTree.fromstring(svg).iter("text")]
    assert texts == ["0", "2.5", "5", "7.5", "10", "0", "1", "2"]


def test_values_that_are_not_finite_leave_a_gap_and_alone_make_no_chart() -> None:
    svg = line_chart("x", [line(1.0, 2.0, math.nan, 3.0, 4.0, math.inf)])
    (path,) = shapes(svg, "path", "line")
    assert path["d"].count("M") == 2
    assert len(shapes(svg, "circle", "mark")) == 4
    assert line_chart("x", [line(math.nan, math.inf)]) == ""
    assert line_chart("x", []) == ""
    assert stacked_chart("x", []) == ""


def test_intervals_become_bars_and_limits_dashed_lines_inside_the_picture() -> None:
    series = Series("greedy", (Point(0, 0.3, 0.2, 0.4), Point(10, 0.8, 0.7, math.nan), Point(20, 0.9)))
    svg = line_chart("x", [series], limits=[0.5, 7.0])
    (bar,) = shapes(svg, "line", "bar")
    (mark, *_) = shapes(svg, "circle", "mark")
    assert float(bar["y1"]) > float(mark["cy"]) > float(bar["y2"])
    assert len(shapes(svg, "line", "limit")) == 1
    assert "greedy, step 0: 0.3 [0.2, 0.4]" in svg


def test_areas_are_stacked() -> None:
    svg = stacked_chart("x", [line(1.0, 1.0, label="a"), line(2.0, math.nan, label="b")])
    lower, upper = (e["points"].split() for e in shapes(svg, "polygon", "area"))
    top_of_lower = [point.split(",")[1] for point in lower[:2]]
    bottom_of_upper = [point.split(",")[1] for point in reversed(upper[2:])]
    assert top_of_lower == bottom_of_upper
    top_of_upper = [float(point.split(",")[1]) for point in upper[:2]]
    assert top_of_upper[0] < float(bottom_of_upper[0])  # 3 is above 1
    assert top_of_upper[1] == float(bottom_of_upper[1])  # nan adds nothing


def test_ticks_stay_inside_the_picture() -> None:
    svg = line_chart("x", [line(6.98, 16.0)])  # rounding such a range twice would put a tick above the edge
    heights = [float(e["y1"]) for e in shapes(svg, "line", "grid")]
    assert len(heights) == 6
    assert 0 < min(heights) < max(heights) < HEIGHT


def test_labels_are_escaped() -> None:
    svg = line_chart('a"<b', [line(1.0, 2.0, label="<script>")])
    assert "<script>" not in svg + legend(["<script>"])
    assert ElementTree.fromstring(svg).attrib["aria-label"] == 'a"<b'


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=12))
def test_any_values_give_coordinates_inside_the_picture(values: list[float]) -> None:
    bounded = [v if not math.isfinite(v) else max(-1e300, min(1e300, v)) for v in values]
    svg = line_chart("x", [line(*bounded)])
    assert "nan" not in svg.replace("nan:", "")
    for mark in shapes(svg, "circle", "mark") if svg else []:
        assert 0 <= float(mark["cx"]) <= WIDTH
        assert 0 <= float(mark["cy"]) <= HEIGHT


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2.5, 5, 7.5, 10]), (0, 1, [0, 0.25, 0.5, 0.75, 1]), (-3, 9, [-5, 0, 5, 10])],
)
def test_ticks_are_round_and_span_the_data(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.123456, "0.123"),
        (12.5, "12.5"),
        (12500, "12.5k"),
        (1e-5, "1e-5"),
        (1.05e-5, "1.05e-5"),
        (2.5e6, "2.5e6"),
        (-3e10, "-3e10"),
        (math.nan, "nan"),
    ],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_thinning_keeps_every_spike_and_gap() -> None:
    points = [Point(i, 1000.0 if i == 4321 else -7.0 if i == 77 else 0.0) for i in range(10_000)]
    kept = thin(points, 100)
    assert len(kept) <= 102
    assert {p.y for p in kept} == {1000.0, -7.0, 0.0}
    assert [p.x for p in kept] == sorted(p.x for p in kept)
    assert thin(points[:50], 100) == points[:50]
    assert any(math.isnan(p.y) for p in thin([Point(i, math.nan) for i in range(1000)], 100))
