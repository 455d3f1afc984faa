"""What keeps weights or patterns from fitting a model, in words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby


def difference(own: Mapping[str, Sequence[object]], given: Mapping[str, Sequence[object]]) -> str:
    """Which parts of a model the weights do not fit, with the first name of each kind; "" if they fit.

    Args:
        own: shape of each weight of the model.
        given: shape of each weight that is to be put into it.

    Example:
        "image_tower: 2 of another shape (image_tower.norm.weight is [16], in the model [32]), 3 missing (…)"
    """
    shapes = {name: f"{name} is {[*given[name]]}, in the model {[*own[name]]}" for name in own if name in given}
    kinds = {
        "missing": [name for name in own if name not in given],
        "unknown to the model": [name for name in given if name not in own],
        "of another shape": [line for name, line in shapes.items() if [*own[name]] != [*given[name]]],
    }
    parts: dict[str, list[str]] = {}
    for kind, lines in kinds.items():
        for part, alike in groupby(sorted(lines), lambda line: re.split(r"[. ]", line)[0]):
            first, *others = alike
            parts.setdefault(part, []).append(f"{1 + len(others)} {kind} ({first})")
    return "; ".join(f"{part}: {', '.join(counts)}" for part, counts in sorted(parts.items()))


def nearest_patterns(pattern: str, names: Iterable[str]) -> str:
    """The three patterns that are most like one that matches no name; numbers of layers count as *."""
    known = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
    return ", ".join(difflib.get_close_matches(pattern, known, n=3, cutoff=0.0)) or "none"
