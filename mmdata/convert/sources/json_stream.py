"""Reads a JSON document entry by entry: memory is that of the largest entry, not that of the file.

Python's own decoder parses each entry; the outermost array, or the arrays of the outermost object, are walked here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from mmdata.convert.sources.files import check_file
from mmdata.convert.sources.tables import open_text
from mmdata.errors import DataError, excerpt
from mmdata.tars.captions import unique_keys

CHUNK = 2**18
"""Characters that are read at once."""
MAX_ENTRY = 2**26
"""Longest entry in characters; a document with a longer one is something else."""
_NUMBER_ENDS = 64
"""A number that ends nearer to the end of what was read may go on in the next chunk."""
_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


class JsonEntry(NamedTuple):
    """One entry of a document.

    Attributes:
        key: name of its array in the document's object; "" in a document that is an array.
        number: its place in the array, from 1; 0 if the key holds something else than an array.
        value: as `json.loads` gives it. NaN and Infinity are floats, so that one bad number costs one box.
    """

    key: str
    number: int
    value: Any


def stream_entries(path: Path) -> Iterator[JsonEntry]:
    """The entries of the outermost array, or of all arrays of the outermost object, in the order of the file.

    Raises:
        DataError: not JSON, a key twice in one object, or an entry of more than `MAX_ENTRY` characters.

    Example:
        `{"info": {}, "images": [{"id": 1}, {"id": 2}]}` gives ("info", 0, {}), ("images", 1, {"id": 1}) and
        ("images", 2, {"id": 2}).
    """
    check_file(path, "annotations")
    with open_text(path, "utf-8") as file:
        reader = _JsonReader(path, file)
        if reader.peek() == "[":
            for number, value in reader.array():
                yield JsonEntry("", number, value)
        elif reader.peek() == "{":
            for key in reader.names():
                if reader.peek() == "[":
                    for number, value in reader.array():
                        yield JsonEntry(key, number, value)
                else:
                    yield JsonEntry(key, 0, reader.value())
        else:
            raise reader.fault("it begins with neither [ nor {")
        if reader.peek():
            raise reader.fault("there is more after its end")


class _JsonReader:
    """A place in a JSON file that moves on value by value."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path = path
        self._file = file
        self._text = ""
        self._at = 0
        self._before = 0  # characters of the file before `_text`

    def fault(self, problem: str, at: int | None = None) -> DataError:
        """The error for what was found here, or at another place of the text."""
        place = self._before + (self._at if at is None else at)
        return DataError(
            f"annotations '{self._path}': not JSON at character {place}: {problem}; is the file whole? Unpack or "
            "download it again"
        )

    def peek(self) -> str:
        """The next character that is no blank, which is not taken; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def array(self) -> Iterator[tuple[int, Any]]:
        """The values of the array that begins here, numbered from 1."""
        self._take("[")
        number = 0
        while self.peek() != "]":
            if number:
                self._take(",")
            number += 1
            yield number, self.value()
        self._take("]")

    def names(self) -> Iterator[str]:
        """The keys of the object that begins here; whoever asks for the next one has taken the value of the last."""
        self._take("{")
        seen = set[str]()
        while self.peek() != "}":
            if seen:
                self._take(",")
            if self.peek() != '"':
                raise self.fault("a key is expected")
            key = self.value()
            if key in seen:
                raise self.fault(f"key {excerpt(key)} is there twice")
            seen.add(key)
            self._take(":")
            yield key
        self._take("}")

    def value(self) -> Any:
        """The value that begins here."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._more():  # it may only be cut where the chunk ends
                    continue
                raise self.fault(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self.fault(str(error)) from error
            is_open = not isinstance(value, (dict, list, str)) and len(self._text) - end < _NUMBER_ENDS
            if is_open and self._more():
                continue
            self._at = end
            return value

    def _take(self, character: str) -> None:
        if (found := self.peek()) != character:
            raise self.fault(f"{character!r} is expected, got {found!r}" if found else "it ends too early")
        self._at += 1

    def _more(self) -> bool:
        """Read on, as much again as is not taken yet; False at the end of the file."""
        left = len(self._text) - self._at
        if left > MAX_ENTRY:
            raise DataError(
                f"annotations '{self._path}', at character {self._before + self._at}: an entry of more than "
                f"{MAX_ENTRY} characters; is it a file of annotations?"
            )
        if not (chunk := self._file.read(max(CHUNK, left))):
            return False
        self._before += self._at
        self._text, self._at = self._text[self._at :] + chunk, 0
        return True
