"""Callables as settings: by the name under which another process can import them, or else as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

MAIN = "__main__:"
"""Begins the names of what is defined in the program itself: another process cannot import it."""


def by_name(value: object, *, words: str = "") -> str | Callable[..., Any]:
    """A callable as "module:name" if that name gives the same object, else the callable; a text as it is.

    Args:
        value: of the setting.
        words: that the setting may be instead, for the error: "train, eval, ".

    Raises:
        ValueError: neither a text nor callable.

    Example:
        A function `jitter` of transforms.py is "transforms:jitter", of the program itself "__main__:jitter". A lambda,
        a method and a function inside another function have no name to import.
    """
    if isinstance(value, str):
        return value
    if not callable(value):
        raise ValueError(f'expected {words}"module:callable" or a callable; got {value!r}')
    name = name_of(value)
    module, _, attribute = name.partition(":")
    return name if getattr(sys.modules.get(module), attribute, None) is value else value


def name_of(value: str | Callable[..., Any]) -> str:
    """The name "module:name" of a callable, for messages and states; for an object, the name of its class."""
    if isinstance(value, str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def is_importable(value: str | Callable[..., Any]) -> bool:
    """Whether another process can import it."""
    name = by_name(value)
    return isinstance(name, str) and not name.startswith(MAIN)
