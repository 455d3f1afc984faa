"""Brace patterns such as "x-{0000..0331}.tar": expanded without a shell, and refused before they fill the memory."""

from __future__ import annotations

import re
import string
from math import prod

from mmdata.errors import ConfigError

MAX_SHARDS = 1_000_000
"""Largest number of shards of a brace pattern. A corpus with ten thousand samples a shard has ten billion then."""

_ALPHABET = string.ascii_uppercase + string.ascii_lowercase
"""The order of letters in a range, as braceexpand has it."""
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")


def expand_braces(name: str) -> list[str]:
    """The names that a pattern stands for, in its order; a name without braces stands for itself.

    Raises:
        ConfigError: braces that do not close, or a pattern of more than `MAX_SHARDS` shards.
    """
    if "{" not in name:
        return [name]
    from braceexpand import braceexpand  # not needed for local folders

    try:
        if count_shards(name) > MAX_SHARDS:
            raise ConfigError(
                f"shards '{name}': the pattern stands for more than {MAX_SHARDS:,} shards; correct the numbers in "
                "braces, or pack larger shards (`mmdata convert --shard-rows`)"
            )
        return list(braceexpand(name, escape=False))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"shards '{name}': braces that do not close: {error}") from error
    except RecursionError:
        raise ConfigError(f"shards '{name[:100]}…': hundreds of nested braces; write the names out") from None


def count_shards(pattern: str) -> int:
    """Number of names that `braceexpand` makes of a pattern.

    Counts without expanding, because braceexpand keeps all names of each pair of braces in memory: "{0..999999999}"
    would fill it.

    Raises:
        ValueError: the braces do not close.

    Example:
        count_shards("{a,b{0..9}}-{000..999}.tar") == 11_000
    """
    depth, start = 0, 0
    counts: list[int] = []
    for at, character in enumerate(pattern):
        if character == "{":
            start = at + 1 if depth == 0 else start
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                counts.append(_count_choices(pattern[start:at]))
    if depth != 0:
        raise ValueError(f"in '{pattern}'")
    return prod(counts)


def _count_choices(inside: str) -> int:
    """Number of strings that the inside of a pair of braces stands for: a range, or a list with nested braces."""
    if numbers := _NUMBERS.fullmatch(inside):
        return _length(int(numbers[1]), int(numbers[2]), numbers[3])
    if letters := _LETTERS.fullmatch(inside):
        return _length(_ALPHABET.index(letters[1]), _ALPHABET.index(letters[2]), letters[3])
    parts, depth, start = [], 0, 0
    for at, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append(inside[start:at])
            start = at + 1
    return sum(map(count_shards, [*parts, inside[start:]]))


def _length(first: int, last: int, step: str | None) -> int:
    return abs(last - first) // (int(step or 1) or 1) + 1
