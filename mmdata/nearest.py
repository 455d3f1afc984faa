"""The known name that is nearest to a misspelt one, for error messages. Nothing is suggested that is not near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.6
"""Least similarity of two names, as difflib counts it: twice the letters in common, by the letters of both."""
SHORT = 3
"""Up to this many letters the first one must be the same: another one makes another word, as cpu of gpu."""


def nearest(word: str, known: Iterable[str], *, least: float = NEAR) -> str | None:
    """The known name that is nearest to a word; None if none is near.

    Upper case, hyphens, underscores and dots do not count.

    Args:
        word: as it was typed.
        known: all names that it may be.
        least: similarity from which on a name is near.

    Example:
        "trian" gives "train" of ["plan", "train"], "ViT-B-16" gives "vit_b_16" of ["tiny", "vit_b_16"], "xyz" None.
    """
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(_plain(name), name)
    plain = _plain(word)
    likely = [name for name in names if len(plain) > SHORT or name[:1] == plain[:1]]
    found = difflib.get_close_matches(plain, likely, n=1, cutoff=least)
    return names[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message: "; did you mean 'train'?", or "" if no known name is near."""
    found = nearest(word, known)
    return f"; did you mean '{found}'?" if found is not None else ""


def meant(word: str, known: Iterable[str]) -> str:
    """Within a message that goes on: " (did you mean 'train'?)", or "" if no known name is near."""
    found = nearest(word, known)
    return f" (did you mean '{found}'?)" if found is not None else ""


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter not in "-_. ")
