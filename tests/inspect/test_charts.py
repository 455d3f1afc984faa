"""Charts are sound SVG, show what they are given, and escape every text."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from mmdata.inspect.charts import (
    CHARACTER_WIDTH,
    WIDTH,
    Mark,
    Series,
    compact,
    histogram,
    line_chart,
    numbers,
    percentages,
    place_labels,
    share_bars,
    ticks,
)


def bars(svg: str) -> list[ElementTree.Element]:
    return [node for node in ElementTree.fromstring(svg).iter("rect") if "bar" in node.attrib["class"]]


def test_histogram_draws_a_bar_for_each_count_and_tints_buckets():
    marks = [Mark(2.5, "2"), Mark(4.5, "4")]
    svg = histogram([0.5, 1.5, 2.5, 3.5, 4.5], [5, 10, 0, 1], marks=marks, x_ticks=[], x_label="tokens", y_label="n")
    drawn = bars(svg)
    assert [bar.attrib["class"] for bar in drawn] == ["bar tint0", "bar tint0", "bar tint1"]
    heights = [float(bar.attrib["height"]) for bar in drawn]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert [bar[0].text for bar in drawn] == ["0.5: 5", "1.5: 10", "3.5: 1"]
    assert re.findall(r'class="marklabel middle"[^>]*>(\d)<', svg) == ["2", "4"]


def test_histogram_of_nothing_is_still_a_chart():
    svg = histogram([0, 1], [0], marks=[], x_ticks=[], x_label="x", y_label="y")
    assert bars(svg) == []


def test_line_chart_breaks_where_a_value_is_missing():
    svg = line_chart({"loss": Series(range(5), [1, 2, np.nan, 4, 5])}, x_label="step", y_label="loss")
    lines = [node.attrib["points"].split() for node in ElementTree.fromstring(svg).iter("polyline")]
    assert [len(points) for points in lines] == [2, 2]


def test_line_chart_thins_long_series():
    svg = line_chart({"loss": Series(range(100_000), np.arange(100_000))}, x_label="step", y_label="loss")
    (line,) = ElementTree.fromstring(svg).iter("polyline")
    assert 500 <= len(line.attrib["points"].split()) <= 600


def test_line_chart_of_one_point_and_of_equal_values():
    for y in ([2.0], [0.0]):
        ElementTree.fromstring(line_chart({"x": Series([10], y)}, x_label="step", y_label="loss"))


def test_share_bars_are_as_long_as_their_shares():
    widths = [bar.attrib["width"] for bar in bars(share_bars({"a": 0.25, "b": 0.75}))]
    assert widths == ["25.00%", "75.00%"]


def test_charts_escape_names():
    name = "<b>&\"'"
    svg = line_chart({name: Series([0, 1], [0, 1]), "other": Series([0], [1])}, x_label=name, y_label=name)
    assert "<b>" not in svg
    assert "&lt;b&gt;&amp;&#34;&#39;" in svg


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 100, 4, [0, 25, 50, 75, 100]),
        (0.1, 0.9, 4, [0.2, 0.4, 0.6, 0.8]),
        (0, 0.07, 4, [0, 0.02, 0.04, 0.06]),
        (3, 3, 4, [3]),
    ],
)
def test_ticks_are_round(low: float, high: float, count: int, expected: list[float]):
    assert ticks(low, high, count=count) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"), [(950, "950"), (1500, "1.5k"), (2e6, "2M"), (3.2e9, "3.2G"), (0.25, "0.25")]
)
def test_compact(value: float, text: str):
    assert compact(value) == text


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 0.005, 0.01, 0.015], ["0.0%", "0.5%", "1.0%", "1.5%"]),
        ([0, 0.2, 0.4], ["0%", "20%", "40%"]),
        ([0, 0.00025], ["0.000%", "0.025%"]),
    ],
)
def test_percentages_of_ticks_differ(values: list[float], labels: list[str]):
    assert percentages(values) == labels


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([10_000, 10_250, 10_500], ["10k", "10.25k", "10.5k"]),
        ([0, 500, 1000], ["0", "500", "1k"]),
        ([1_000_000, 1_000_100], ["1M", "1.0001M"]),
    ],
)
def test_numbers_of_ticks_are_exact(values: list[float], labels: list[str]):
    assert numbers(values) == labels


def test_labels_of_a_row_never_meet_and_none_leaves_the_picture():
    crowded = [(float(x), f"{x} of {x}") for x in range(0, WIDTH + 1, 9)]
    rows = place_labels(crowded, rows=2)
    assert all(rows)
    for row in rows:
        for (x, text), (other_x, other) in pairwise(row):
            assert other_x - x > CHARACTER_WIDTH * (len(text) + len(other)) / 2
        assert row[0][0] >= CHARACTER_WIDTH * len(row[0][1]) / 2
        assert row[-1][0] <= WIDTH - CHARACTER_WIDTH * len(row[-1][1]) / 2
    assert place_labels([(100, "a"), (300, "b")], rows=2) == [[(100, "a"), (300, "b")], []]
    assert place_labels([(100, "aaaa"), (101, "bbbb"), (102, "cccc")], rows=2) == [[(100, "aaaa")], [(101, "bbbb")]]


def test_labels_of_marks_stand_below_the_name_of_the_axis():
    marks = [Mark(0.5, "first"), Mark(0.6, "second")]
    svg = histogram([0, 100], [1], marks=marks, x_ticks=[], x_label="x", y_label="captions")
    found = {node.text: float(node.attrib["y"]) for node in ElementTree.fromstring(svg).iter("text")}
    assert found["captions"] < found["second"] - 12
    assert found["second"] < found["first"] - 12


def test_lines_of_a_chart_differ_in_their_style_as_the_legend_says():
    svg = line_chart({str(i): Series([0, 1], [0, i]) for i in range(3)}, x_label="step", y_label="y")
    chart, _, legend = svg.partition("</svg>")
    styles = re.findall(r'<polyline class="line (c\d)"', chart)
    assert styles == ["c0", "c1", "c2"]
    assert re.findall(r'<path class="line (c\d)"', legend) == styles
