"""What can be wrong with data.

A sample is skipped only with a `Reason`; everything else is an error that names its place.
"""

from __future__ import annotations

import logging
from enum import Enum
from pathlib import PurePath
from typing import cast


class Reason(str, Enum):
    """Why a row was quarantined (convert) or masked (load). The list is closed: ledgers and reports rely on it."""

    MISSING_IMAGE = "missing_image"
    MISSING_CAPTION = "missing_caption"
    EMPTY_CAPTION = "empty_caption"
    BAD_CAPTION = "bad_caption"  # not text: wrong type, invalid UTF-8, a lone surrogate
    CAPTION_TOO_LONG = "caption_too_long"
    BROKEN_ROW = "broken_row"  # a ragged CSV row, a JSONL line that does not parse
    EMPTY_FILE = "empty_file"
    NOT_AN_IMAGE = "not_an_image"
    UNSUPPORTED_FORMAT = "unsupported_format"
    CORRUPT_IMAGE = "corrupt_image"
    IMAGE_TOO_LARGE = "image_too_large"
    IMAGE_TOO_SMALL = "image_too_small"
    EXTREME_ASPECT = "extreme_aspect"
    NOT_A_FILE = "not_a_file"  # a FIFO, a device, a folder
    OUTSIDE_ROOT = "outside_root"  # "..", an absolute path or a link that leaves the corpus
    FILE_CHANGED = "file_changed"
    DUPLICATE_IMAGE = "duplicate_image"
    FILTERED = "filtered"
    TRANSFORM_FAILED = "transform_failed"

    def __str__(self) -> str:
        return self.value


def printable(text: str, *, keep: str = "") -> str:
    r"""A text that a terminal shows and does not obey.

    Control characters, bidirectional marks, invisible characters and lone surrogates, all of which the names of files
    and members may hold, become escapes as in Python's source. Applying it twice changes nothing more.

    Args:
        text: any.
        keep: characters to leave as they are, such as "\n" in a text of several lines.

    Example:
        printable("a\x1b[31m.jpg") == r"a\x1b[31m.jpg"
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text)


class _Printable(Exception):
    """An error whose message is printable, whatever the names in it hold."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class DataError(_Printable, ValueError):
    """Data on disk is not what it must be: the message names file, place and remedy."""


class ConfigError(_Printable, ValueError):
    """A setting is unknown, missing or out of range: the message names the key and the remedy."""


class BadSample(_Printable):
    """One sample cannot be used; the caller counts it, records it in a ledger and goes on.

    Args:
        reason: code from the closed list.
        detail: one line for a person: what was seen, and where.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = printable(detail)


class LoadError(_Printable, RuntimeError):
    """A batch could not be made, and no sample is at fault: a defect, or a machine that gave out.

    The message names shard, sample, epoch and step; the error itself is the `__cause__`.
    """


def excerpt(value: object, length: int = 80) -> str:
    """A value that came with data, for a message: never longer than a line, and never what a binary column holds.

    Example:
        "cat" gives "'cat'", b"..." gives "a value of type bytes (3 bytes)", a list "a value of type list (2 items)".
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"a value of type {type(value).__name__} ({len(value)} bytes)"
    if isinstance(value, (list, tuple, dict, set)):
        return f"a value of type {type(value).__name__} ({len(cast('list[object]', value))} items)"
    if isinstance(value, str):
        return repr(value) if len(value) <= length else f"{value[:length]!r}… ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def where_to_look(error: Exception, module: str) -> str:
    """For messages: what finds a user's module that could not be imported; "" where something else went wrong."""
    missing = isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}.")
    return "; a file of the current folder is found with PYTHONPATH=. or by `python -m mmdata`" if missing else ""


def _escape_arguments(record: logging.LogRecord) -> bool:
    """Make the texts that a log record names printable; those of other types are as their program prints them."""
    if isinstance(record.args, tuple):
        texts = (str, PurePath, Exception)
        record.args = tuple(printable(str(arg)) if isinstance(arg, texts) else arg for arg in record.args)
    return True


logging.getLogger("mmdata").addFilter(_escape_arguments)


class Interrupted(Exception):
    """Whoever waited for the file does not any more."""


class TrainingError(ValueError):
    """The run cannot go on: the message names the step, the rows and the remedy."""
