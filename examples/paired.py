"""Differences of runs to a baseline, paired by their seeds, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Scores = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Arm → seed → name of the score → value."""


@dataclass(frozen=True)
class Difference:
    """Gain of an arm over the baseline.

    Attributes:
        mean: of the differences; there is one for each seed.
        low, high: 95 % confidence interval of the mean, by Student's t; nan with one seed.
        won: seeds in which the arm is better.
        seeds: number of seeds.
    """

    mean: float
    low: float
    high: float
    won: int
    seeds: int


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """The paired difference of an arm to the baseline; both lists are in the order of the seeds.

    Example:
        ours 0.6, 0.7, 0.8 and theirs 0.5, 0.5, 0.7: differences 0.1, 0.2, 0.1, their mean 0.133, its standard error
        0.033, t of 2 degrees of freedom 4.303: from -0.010 to 0.277, 3 of 3 won.
    """
    gains = np.subtract(ours, theirs, dtype=np.float64)
    mean, count = float(gains.mean()), len(gains)
    half = math.nan if count < 2 else student_t(count - 1) * float(gains.std(ddof=1)) / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, int((gains > 0).sum()), count)


def student_t(degrees: int) -> float:
    """The value that |t| stays below in 95 % of cases, to five digits; `student_t(9)` is 2.26216."""
    # With t = sqrt(n) tan(u) the density is cos(u)^(n-1) on (-pi/2, pi/2): smooth and bounded, so that a plain sum over
    # the whole support is its integral.
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    share = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(0.95, share / share[-1], angles)
    return math.sqrt(degrees) * math.tan(float(angle))


def markdown(scores: Scores, baseline: str, metric: str, columns: Sequence[str]) -> list[str]:
    """Lines of a Markdown table: for each arm the mean of `metric`, its gain over the baseline, the means of `columns`.

    Only seeds of both the arm and the baseline count. Values are percentages, gains are percentage points.
    """
    names = ["arm", "seeds", metric, f"gain over {baseline} (95 %)", "seeds won", *columns]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for arm, of_seed in scores.items():
        seeds = sorted(of_seed.keys() & scores[baseline].keys())
        if not seeds:
            continue
        ours = [of_seed[seed] for seed in seeds]
        gain = difference([s[metric] for s in ours], [scores[baseline][seed][metric] for seed in seeds])
        interval = f"{100 * gain.mean:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
        cells = [
            arm,
            f"{len(seeds)}",
            _mean(ours, metric),
            *(["", ""] if arm == baseline else [interval, f"{gain.won}"]),
        ]
        lines.append(f"| {' | '.join([*cells, *(_mean(ours, name) for name in columns)])} |")
    return lines


def _mean(scores: Sequence[Mapping[str, float]], name: str) -> str:
    return f"{100 * float(np.mean([s[name] for s in scores])):.1f}"
