"""Charts are sound SVG, show what they are given, and escape every text."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from mmdata.inspect.charts import (
    CHARACTER_WIDTH,
    WIDTH,
    Mark,
    compact,
    histogram,
    place_labels,
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
    assert bars(histogram([0, 1], [0], marks=[], x_ticks=[], x_label="x", y_label="y")) == []


def test_charts_escape_names():
    name = "<b>&\"'"
    svg = histogram([0, 1], [1], marks=[Mark(0.5, name)], x_ticks=[Mark(0, name)], x_label=name, y_label=name)
    assert "<b>" not in svg
    assert svg.count("&lt;b&gt;&amp;&#34;&#39;") == 7


@pytest.mark.parametrize(
    ("highest", "expected"),
    [(1, [0, 1]), (3.5, [0, 1, 2, 3]), (90, [0, 20, 40, 60, 80]), (101, [0, 50, 100]), (3000, [0, 1000, 2000, 3000])],
)
def test_ticks_are_round(highest: float, expected: list[int]):
    assert ticks(highest) == expected


@pytest.mark.parametrize(
    ("value", "text"), [(950, "950"), (1500, "1.5k"), (2e6, "2M"), (3.2e9, "3.2G"), (0.25, "0.25")]
)
def test_compact(value: float, text: str):
    assert compact(value) == text


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
