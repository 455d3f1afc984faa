"""The errors of mmdata, and what their messages are made of.

A sample is skipped only with a `Reason`; everything else is an error that names its place and the remedy.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import PurePath
from typing import cast

NEAR = 0.6
"""Least similarity of two names, as difflib counts it: twice the letters in common, by the letters of both."""
SHORT = 3
"""Up to this many letters the first one must be the same: another one makes another word, as cpu of gpu."""


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


def sample_name(shard: str, key: str) -> str:
    """How messages name a sample of a shard."""
    return f"shard '{shard}', sample '{key}'"


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


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that is nearest to a word; None if none is near.

    Upper case, hyphens, underscores and dots do not count.

    Args:
        word: as it was typed.
        known: all names that it may be.

    Example:
        "trian" gives "train" of ["plan", "train"], "ViT-B-16" gives "vit_b_16" of ["tiny", "vit_b_16"], "xyz" None.
    """
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(_plain(name), name)
    plain = _plain(word)
    likely = [name for name in names if len(plain) > SHORT or name[:1] == plain[:1]]
    found = difflib.get_close_matches(plain, likely, n=1, cutoff=NEAR)
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


def explain(error: OSError) -> str:
    """One sentence for an error of the system: the file, what happened, and the remedy.

    Example:
        'out/000001.tar': no space left on device; free some space or choose another disk, then run this again
    """
    if error.errno is None or not error.strerror:  # raised by a library, with a message of its own
        return str(error)
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    where = " to ".join(f"'{name}'" for name in names)
    reason = f"{error.strerror[:1].lower()}{error.strerror[1:]}"
    remedy = _REMEDIES.get(error.errno, "")
    return ": ".join(filter(None, (where, "; ".join(filter(None, (reason, remedy))))))


_WRITABLE = "choose a folder that this user may write, or change its permissions"
_REMEDIES = {
    errno.ENOSPC: "free some space or choose another disk, then run this again",
    errno.EDQUOT: "this user's quota is used up: free some space or choose another disk, then run this again",
    errno.EFBIG: "the file system, or `ulimit -f`, allows no larger file: raise the limit or choose another disk",
    errno.EROFS: "choose a folder on a disk that can be written, or mount this one for writing",
    errno.EACCES: "this user has no permission: choose another path, or change its permissions",
    errno.EPERM: _WRITABLE,
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EISDIR: "a file is expected there, and it is a folder: choose another path",
    errno.EEXIST: "something is there already: choose another path, or move it away",
    errno.ENOTEMPTY: "the folder is not empty: choose another path, or move its files away",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "links lead in a circle: choose another path",
    errno.EXDEV: "it is moved to another disk: choose folders of one disk",
    errno.EMFILE: "too many files are open: raise `ulimit -n`",
    errno.ENFILE: "the machine has too many files open: end other programs",
    errno.ENOMEM: "memory is used up: end other programs, or ask for less",
    errno.EIO: "the disk or network failed: check it (`dmesg`), then run this again",
    errno.ESTALE: "the network file system lost the file: mount it again, then run this again",
    errno.ETXTBSY: "another program runs this file: end it first",
}


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
