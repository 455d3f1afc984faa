"""What keeps weights from fitting a model, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def difference(own: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]]) -> str:
    """Which parts of a model the weights do not fit, with the first name of each kind; "" if they fit.

    Args:
        own: shape of each weight of the model.
        given: shape of each weight that is to be put into it.

    Example:
        "image_tower: 2 of another shape (image_tower.norm.weight is [16], in the model [32]), 3 missing (…)"
    """
    parts: dict[str, dict[str, list[str]]] = {}
    for name in [*own, *(given.keys() - own.keys())]:
        if name not in given:
            kind, line = "missing", name
        elif name not in own:
            kind, line = "unknown to the model", name
        elif [*own[name]] != [*given[name]]:
            kind, line = "of another shape", f"{name} is {[*given[name]]}, in the model {[*own[name]]}"
        else:
            continue
        parts.setdefault(name.partition(".")[0], {}).setdefault(kind, []).append(line)
    return "; ".join(
        f"{part}: " + ", ".join(f"{len(lines)} {kind} ({min(lines)})" for kind, lines in sorted(kinds.items()))
        for part, kinds in sorted(parts.items())
    )
