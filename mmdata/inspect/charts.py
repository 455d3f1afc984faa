"""Histograms as inline SVG. No two labels of a chart overlap, and every text is escaped.

Colours are CSS classes of the page, which has a light and a dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

WIDTH, HEIGHT = 640, 260  # of the viewBox, in its own units; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 28, 42
MARK_ROWS = 2
"""Rows of labels above a histogram: a label that meets its neighbour goes into the second row."""
MARK_ROW_HEIGHT = 14
CHARACTER_WIDTH = 8.0
"""At most, of the fonts and sizes of the page, in units of the viewBox."""
LABEL_GAP = 5.0


class Mark(NamedTuple):
    """A labelled place on the x axis."""

    x: float
    label: str


def histogram(
    edges: ArrayLike, counts: ArrayLike, *, marks: Sequence[Mark], x_ticks: Sequence[Mark], x_label: str, y_label: str
) -> Markup:
    """Bars between edges. The tint changes at each mark, so that a bucket is seen as one block.

    Args:
        edges: (n + 1,), ascending.
        counts: (n,), at least 0.
        marks: bounds, ascending, drawn over the bars with labels at the top.
        x_ticks: labels below the axis.
        x_label: what the x axis counts.
        y_label: what the bars count.
    """
    edge, count = np.asarray(edges, np.float64), np.asarray(counts, np.float64)
    top = TOP + MARK_ROWS * MARK_ROW_HEIGHT if marks else TOP
    highest = float(count.max(initial=1.0))

    def x_of(value: float) -> float:
        return LEFT + (value - edge[0]) / (edge[-1] - edge[0]) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - value / (1.02 * highest) * (HEIGHT - top - BOTTOM)

    parts = [_text(4, 14, y_label, "label")]
    for tick in ticks(highest):
        grid = '<line class="grid" x1="{}" x2="{}" y1="{y}" y2="{y}"/>'
        parts.append(Markup(grid).format(LEFT, WIDTH - RIGHT, y=f"{y_of(tick):.1f}"))
        parts.append(_text(LEFT - 7, y_of(tick) + 4, compact(tick), "tick end"))
    (shown,) = place_labels([(x_of(x), label) for x, label in x_ticks], rows=1)
    parts += [_text(x, HEIGHT - BOTTOM + 17, label, "tick middle") for x, label in shown]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label, "label middle"))
    gap = 0.8 if len(count) < 150 else 0.0
    bounds = [mark.x for mark in marks]
    for low, high, number in zip(edge[:-1], edge[1:], count, strict=True):
        if number > 0:
            tint = int(np.searchsorted(bounds, (low + high) / 2)) % 2
            x, y, width = x_of(low), y_of(number), max(x_of(high) - x_of(low) - gap, 0.6)
            place = f"{low:.4g}" if high - low == 1 else f"{low:.2f} to {high:.2f}"
            bar = (
                '<rect class="bar tint{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
            )
            parts.append(Markup(bar).format(tint, x, y, width, y_of(0) - y, f"{place}: {int(number):,}"))
    for mark in marks:
        line = '<line class="mark" x1="{x}" x2="{x}" y1="{}" y2="{}"><title>{}</title></line>'
        parts.append(Markup(line).format(top - 4, HEIGHT - BOTTOM, mark.label, x=f"{x_of(mark.x):.1f}"))
    placed = place_labels([(x_of(mark.x), mark.label) for mark in marks], rows=MARK_ROWS)
    for row, labels in enumerate(placed):  # the first row is the lower one, next to the lines
        parts += [_text(x, top - 8 - row * MARK_ROW_HEIGHT, label, "marklabel middle") for x, label in labels]
    svg = '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    return Markup(svg).format(WIDTH, HEIGHT, f"{y_label} by {x_label}", Markup("").join(parts))


def ticks(highest: float) -> list[int]:
    """Three to six round counts from 0 on: steps of 1, 2 or 5 times a power of ten."""
    least = max(1.0, highest / 5)
    power = 10 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
    return list(range(0, math.floor(highest) + 1, step))


def compact(value: float) -> str:
    """1500 → "1.5k", 2000000 → "2M"; three digits."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


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


def _text(x: float, y: float, text: str, style: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(style, x, y, text)
