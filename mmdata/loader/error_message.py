"""An error of a side process, as JSON on its way to the program: its type, its text, and where it came from."""

from __future__ import annotations

import traceback

from mmdata.errors import ConfigError, DataError, LoadError, printable

KNOWN = {"ConfigError": ConfigError, "DataError": DataError, "LoadError": LoadError}
LINE_END = "\n"


class SideTraceback(Exception):
    """Where in a side process an error came from; the `__cause__` of that error here."""

    def __init__(self, text: str) -> None:
        super().__init__(f"in the loader's side process:\n{printable(text, keep=LINE_END)}")


def message_of(error: BaseException) -> dict[str, str]:
    """What is sent of an error that is being handled."""
    return {"type": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}


def error_of(message: dict[str, str]) -> Exception:
    """The error that was sent: of its own type where callers know it, else a `LoadError`."""
    kind, text = message["type"], message["text"]
    error = KNOWN[kind](text) if kind in KNOWN else LoadError(f"{kind}: {text}")
    error.__cause__ = SideTraceback(message["traceback"])
    return error
