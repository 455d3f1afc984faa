"""Charts as inline SVG: histograms with bounds, lines, and shares. No two labels of a chart overlap.

Every text is escaped. Colours are CSS classes of the page, which has a light and a dark scheme; lines differ in their
dashes too, for readers who do not tell the colours apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

WIDTH, HEIGHT = 640, 260  # of the viewBox, in its own units; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 28, 42
MARK_ROWS = 2
"""Rows of labels above a histogram: a label that meets its neighbour goes into the second row."""
MARK_ROW_HEIGHT = 14
CHARACTER_WIDTH = 8.0
"""At most, of the fonts and sizes of the page, in units of the viewBox."""
LABEL_GAP = 5.0
MAX_POINTS = 600
NUM_STYLES = 6
"""Colours and dashes of lines; with more lines they repeat."""


class Mark(NamedTuple):
    """A vertical line in a histogram: its x and its label."""

    x: float
    label: str


class Series(NamedTuple):
    """A line: x ascending, y of equal length; a y that is not finite interrupts the line."""

    x: ArrayLike
    y: ArrayLike


Labels = Callable[[Sequence[float]], Sequence[str]]
"""Labels of the ticks of an axis."""


class _Frame:
    """The plotting area: maps data to the viewBox and draws axes."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float], *, top: float = TOP) -> None:
        self.x_range, self.y_range, self.top = x_range, y_range, top

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - self.top - BOTTOM)

    def axes(self, x_ticks: Sequence[Mark], x_label: str, y_label: str, y_format: Labels) -> Markup:
        parts = [Markup('<text class="label" x="{}" y="14">{}</text>').format(4, y_label)]
        values = ticks(*self.y_range, count=4)
        for value, label in zip(values, y_format(values), strict=True):
            y = f"{self.y(value):.1f}"
            parts.append(
                Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, y, y)
            )
            parts.append(_text(LEFT - 7, float(y) + 4, label, "tick end"))
        (shown,) = place_labels([(self.x(tick.x), tick.label) for tick in x_ticks], rows=1)
        parts += [_text(x, HEIGHT - BOTTOM + 17, label, "tick middle") for x, label in shown]
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label, "label middle"))
        return Markup("").join(parts)


def histogram(
    edges: ArrayLike,
    counts: ArrayLike,
    *,
    marks: Sequence[Mark],
    x_ticks: Sequence[Mark],
    x_label: str,
    y_label: str,
) -> Markup:
    """Bars between edges. The tint changes at each mark, so that a bucket is seen as one block.

    Args:
        edges: (n + 1,), ascending.
        counts: (n,), at least 0.
        marks: bounds, drawn over the bars with labels at the top.
        x_ticks: labels below the axis.
        x_label: what the x axis counts.
        y_label: what the bars count.
    """
    edge, count = np.asarray(edges, np.float64), np.asarray(counts, np.float64)
    top = TOP + MARK_ROWS * MARK_ROW_HEIGHT if marks else TOP
    frame = _Frame((edge[0], edge[-1]), (0.0, float(count.max(initial=1.0)) * 1.02), top=top)
    parts = [frame.axes(x_ticks, x_label, y_label, _whole)]
    rising = sorted(mark.x for mark in marks)
    for low, high, number in zip(edge[:-1], edge[1:], count, strict=True):
        if number > 0:
            tint = int(np.searchsorted(rising, (low + high) / 2)) % 2
            x, y, gap = frame.x(low), frame.y(number), 0.8 if len(count) < 150 else 0.0
            shape = (f"{x:.1f}", f"{y:.1f}", f"{max(frame.x(high) - x - gap, 0.6):.1f}", f"{frame.y(0) - y:.1f}")
            title = (
                f"{_plain(low)}: {int(number):,}" if high - low == 1 else f"{low:.2f} to {high:.2f}: {int(number):,}"
            )
            bar = '<rect class="bar tint{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
            parts.append(Markup(bar).format(tint, *shape, title))
    parts += [_mark_line(frame, mark) for mark in sorted(marks)]
    placed = place_labels([(frame.x(mark.x), mark.label) for mark in sorted(marks)], rows=MARK_ROWS)
    for row, labels in enumerate(placed):  # the first row is the lower one, next to the lines
        parts += [_text(x, top - 8 - row * MARK_ROW_HEIGHT, label, "marklabel middle") for x, label in labels]
    return _svg(parts, f"{y_label} by {x_label}")


def line_chart(series: Mapping[str, Series], *, x_label: str, y_label: str, percent: bool = False) -> Markup:
    """Lines over a common x axis; several lines get a legend.

    Args:
        series: name → line; six lines have distinct colours and dashes.
        x_label: what the x axis counts.
        y_label: what the lines measure.
        percent: y runs from 0 to 1 and is shown in per cent.
    """
    lines = {name: _thin(*line) for name, line in series.items()}
    every_x = np.concatenate([x for x, _ in lines.values()])
    every_y = np.concatenate([y[np.isfinite(y)] for _, y in lines.values()])
    low, high = (0.0, 1.0) if not every_y.size else (float(every_y.min()), float(every_y.max()))
    low = 0.0 if percent or (low > 0 and low < 0.5 * high) else low - 0.05 * (high - low)
    x_range = (float(every_x.min(initial=0)), float(every_x.max(initial=1)))
    frame = _Frame(x_range, (low, high + 0.05 * ((high - low) or 1.0)))
    x_values = ticks(*frame.x_range, count=6)
    x_ticks = [Mark(value, label) for value, label in zip(x_values, numbers(x_values), strict=True)]
    parts = [frame.axes(x_ticks, x_label, y_label, percentages if percent else numbers)]
    for number, (name, (x, y)) in enumerate(lines.items()):
        points = [f"{frame.x(a):.1f},{frame.y(b):.1f}" if np.isfinite(b) else "" for a, b in zip(x, y, strict=True)]
        for run in "|".join(points).split("||"):
            run = run.strip("|").replace("|", " ")
            if run:
                line = '<polyline class="line c{}" points="{}"><title>{}</title></polyline>'
                parts.append(Markup(line).format(number % NUM_STYLES, run, name))
        if len(x) <= 40:
            for a, b in zip(x, y, strict=True):
                if np.isfinite(b):
                    said = f"{name}, {x_label} {_plain(a)}: {f'{b:.1%}' if percent else f'{b:.4g}'}"
                    dot = '<circle class="dot c{}" cx="{}" cy="{}" r="3"><title>{}</title></circle>'
                    parts.append(
                        Markup(dot).format(number % NUM_STYLES, f"{frame.x(a):.1f}", f"{frame.y(b):.1f}", said)
                    )
    return _svg(parts, f"{y_label} over {x_label}") + (_legend(list(lines)) if len(lines) > 1 else Markup(""))


def share_bars(bars: Mapping[str, float]) -> Markup:
    """Horizontal bars of shares from 0 to 1, each with its name and value, as wide as the page."""
    parts: list[Markup] = []
    for number, (name, share) in enumerate(bars.items()):
        y = 4 + 46 * number
        parts.append(Markup('<text class="label" x="0" y="{}">{}</text>').format(y + 12, name))
        parts.append(Markup('<text class="label end" x="100%" y="{}">{}</text>').format(y + 12, f"{share:.1%}"))
        bar = '<rect class="{}" x="0" y="{}" width="{}" height="16" rx="4"/>'
        parts.append(Markup(bar).format("track", y + 18, "100%"))
        parts.append(Markup(bar).format(f"bar tint{number % 2}", y + 18, f"{share:.2%}"))
    # Without a viewBox nothing is scaled: the text keeps its size on a narrow screen.
    head = Markup('<svg class="shares" style="height: {}px" role="img" aria-label="shares">').format(46 * len(bars))
    return head + Markup("").join(parts) + Markup("</svg>")


def ticks(low: float, high: float, *, count: int) -> list[float]:
    """About `count` round values within [low, high]: steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def compact(value: float, *, digits: int = 3) -> str:
    """1500 → "1.5k", 2000000 → "2M"; at most so many digits from 1000 on."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{suffix}"
    return f"{value:.{max(digits, 4)}g}"


def numbers(values: Sequence[float]) -> list[str]:
    """Labels with as few digits, from three on, as give the values exactly: 10000, 10250 → "10k", "10.25k"."""
    digits = (n for n in range(3, 8) if all(math.isclose(float(f"{value:.{n}g}"), value) for value in values))
    shown = next(digits, 8)
    return [compact(value, digits=shown) for value in values]


def percentages(values: Sequence[float]) -> list[str]:
    """0.005, 0.01 → "0.5%", "1.0%"; 0.1, 0.2 → "10%", "20%"."""
    digits = (n for n in range(5) if all(abs(round(100 * value, n) - 100 * value) < 1e-6 for value in values))
    shown = next(digits, 5)
    return [f"{value:.{shown}%}" for value in values]


def place_labels(labels: Sequence[tuple[float, str]], *, rows: int) -> list[list[tuple[float, str]]]:
    """Centred labels in rows in which none meets another; a label for which no row has room is left out.

    Args:
        labels: (x of the centre, text), x ascending.
        rows: number of rows; each label goes into the first that has room.

    Returns:
        The labels of each row. A label that would leave the picture at its right edge is moved to the left.
    """
    placed: list[list[tuple[float, str]]] = [[] for _ in range(rows)]
    ends = [-math.inf] * rows
    for centre, text in labels:
        half = CHARACTER_WIDTH * len(text) / 2
        x = min(max(centre, half), WIDTH - half)
        for row in range(rows):
            if x - half >= ends[row] + LABEL_GAP:
                placed[row].append((x, text))
                ends[row] = x + half
                break
    return placed


def _whole(values: Sequence[float]) -> list[str]:
    """Labels of counts: there is no half row."""
    return [compact(value) if value == int(value) else "" for value in values]


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _thin(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means of neighbouring points, at most MAX_POINTS, so that the page of a long run stays small."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    size = -(-len(a) // MAX_POINTS)
    if size <= 1:
        return a, b
    starts = np.arange(0, len(a), size)
    lengths = np.diff(np.append(starts, len(a)))
    return np.add.reduceat(a, starts) / lengths, np.add.reduceat(b, starts) / lengths


def _text(x: float, y: float, text: str, style: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(style, f"{x:.1f}", f"{y:.1f}", text)


def _legend(names: Sequence[str]) -> Markup:
    key = '<span><svg class="key" viewBox="0 0 26 6" aria-hidden="true"><path class="line c{}" d="M0 3H26"/></svg>'
    key += "{}</span>"
    items = [Markup(key).format(i % NUM_STYLES, name) for i, name in enumerate(names)]
    return Markup('<div class="legend">{}</div>').format(Markup("").join(items))


def _mark_line(frame: _Frame, mark: Mark) -> Markup:
    line = '<line class="mark" x1="{0}" x2="{0}" y1="{1}" y2="{2}"><title>{3}</title></line>'
    return Markup(line).format(f"{frame.x(mark.x):.1f}", f"{frame.top - 4:.1f}", HEIGHT - BOTTOM, mark.label)


def _svg(parts: Sequence[Markup], title: str) -> Markup:
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, title)
    return head + Markup("").join(parts) + Markup("</svg>")
