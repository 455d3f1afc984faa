"""The errors of mmdata, and what their messages are made of.

A sample is skipped only with a `Reason`; everything else is an error that names its place and the remedy.
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
    OUTSIDE_ROOT = "outside_root"  # "..", or an absolute path that leaves the corpus
    FILE_CHANGED = "file_changed"
    DUPLICATE_IMAGE = "duplicate_image"
    FILTERED = "filtered"
    DAMAGED_SHARD = "damaged_shard"  # the shard is cut or damaged within this sample
    TRANSFORM_FAILED = "transform_failed"
    TEXT_TRANSFORM_FAILED = "text_transform_failed"
    MISSING_FIELD = "missing_field"  # a member that data.fields names, or a value in it
    BAD_FIELD = "bad_field"  # it is damaged, or of another type or shape than in the first rows
    OPTED_OUT = "opted_out"  # by robots.txt, X-Robots-Tag or TDMRep
    RULES_UNKNOWN = "rules_unknown"  # robots.txt cannot be read now, so nothing is taken; the owner has not opted out
    HOST_LEFT_ALONE = "host_left_alone"  # it asks to wait longer than is waited, or no URL of it had an answer lately
    REFUSED_ADDRESS = "refused_address"  # a private address, or a URL that is not of http or https
    HTTP_STATUS = "http_status"  # another one than 200
    UNREACHABLE = "unreachable"  # no address, no connection, or an answer that is cut
    TIMED_OUT = "timed_out"
    BAD_ANSWER = "bad_answer"  # not HTTP, compressed though it must not be, or redirected without end
    HASH_DIFFERS = "hash_differs"  # from the one that the table gives

    def __str__(self) -> str:
        return self.value


def printable(text: str, *, keep: str = "") -> str:
    r"""A text in which nothing controls the terminal that shows it.

    Control characters, bidirectional marks, invisible characters and lone surrogates, all of which may be in the names
    of files and members, become escapes as in Python's source. A second call changes nothing more.

    Args:
        text: any text.
        keep: characters to leave as they are, such as "\n" in a text of several lines.

    Example:
        printable("a\x1b[31m.jpg") == r"a\x1b[31m.jpg"
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text)


class _Printable(Exception):
    """An error whose message is printable, whatever is in the names that it quotes."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class DataError(_Printable, ValueError):
    """Data on disk is damaged or of the wrong form: the message names file, place and remedy."""


class DamagedShard(DataError):
    """A tar is cut, damaged or ambiguous from some byte on.

    Args:
        what: shard, offset and damage.
        remedy: what to do.
        sample: key and offset of the sample in which the damage lies; those before it are whole. ("", 0): unknown.

    Attributes:
        what, remedy: as given, printable.
        sample: as given.
    """

    def __init__(self, what: str, remedy: str, sample: tuple[str, int] = ("", 0)) -> None:
        super().__init__(f"{what}; {remedy}")
        self.sample = sample
        self.what, self.remedy = printable(what), printable(remedy)

    def __reduce__(self) -> tuple[type[DamagedShard], tuple[str, str, tuple[str, int]]]:
        return DamagedShard, (self.what, self.remedy, self.sample)


class ConfigError(_Printable, ValueError):
    """A setting is unknown, missing or out of range: the message names the key and the remedy."""


class Problems(ConfigError):
    """Mistakes that do not depend on each other, found together; the message has one a line.

    Args:
        problems: one or more messages.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n".join([f"{len(self.args)} things do not fit:", *(f"- {problem}" for problem in self.args)])


class BadSample(_Printable):
    """One sample cannot be used; the caller counts it, records it in a ledger and goes on.

    Args:
        reason: from the closed list.
        detail: one line for people: what was found, and where.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = printable(detail)


class LoadError(_Printable, RuntimeError):
    """A batch could not be made, and no sample is at fault: a defect of the code, or of the machine.

    The message names shard, sample, epoch and step; the original error is the `__cause__`.
    """


class TrainingError(ValueError):
    """The run cannot go on: the message names the step, the rows and the remedy."""


class Interrupted(Exception):
    """A read was stopped because the loader that waited for it was closed."""


def counted(number: int, noun: str) -> str:
    """A number of things: "1 shard", "1,024 shards"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def excerpt(value: object, length: int = 80) -> str:
    """A value from data, for a message: at most about a line long, and never the content of a binary column.

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
    """For messages: how to make a user's module importable; "" if the import failed for another reason."""
    missing = isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}.")
    return "; a file of the current folder is found with PYTHONPATH=. or by `python -m mmdata`" if missing else ""


def _escape_arguments(record: logging.LogRecord) -> bool:
    """Make the texts among the arguments of a log record printable; a filter that always lets the record pass."""
    if isinstance(record.args, tuple):
        texts = (str, PurePath, Exception)
        record.args = tuple(printable(str(arg)) if isinstance(arg, texts) else arg for arg in record.args)
    return True


logging.getLogger("mmdata").addFilter(_escape_arguments)
