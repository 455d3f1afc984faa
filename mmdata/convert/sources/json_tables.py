"""JSON Lines, and JSON documents that hold a table: arrays of objects, names with their captions.

A document is read as a whole and held in memory, about ten times its size on disk; JSON Lines are read line by line.
COCO's annotations are streamed: `stream_entries` takes the memory of the largest entry. Python's own decoder parses
each entry; the outermost array, or the arrays of the outermost object, are walked here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from mmdata.convert.sources.files import check_file, size_and_time
from mmdata.convert.sources.folder import IMAGE_SUFFIXES
from mmdata.convert.sources.rows import SourceKind
from mmdata.convert.sources.tables import SourceTable, TableRow, TextLines, naming_damage, open_text, shown
from mmdata.errors import DataError, excerpt
from mmdata.tars.captions import unique_keys

MAX_DOCUMENT_BYTES = 2**32
"""Largest JSON document, 4 GiB."""

CHUNK = 2**18
"""Characters that are read at once."""
MAX_ENTRY = 2**26
"""Longest entry in characters; a document with a longer one is something else."""
_NUMBER_ENDS = 64
"""A number that ends nearer to the end of what was read may go on in the next chunk."""
_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


class JsonLinesTable(SourceTable):
    """A file with a JSON object in each line."""

    kind = SourceKind.JSON

    def __init__(self, path: Path, encoding: str = "utf-8") -> None:
        self.path = path
        self._encoding = encoding
        self.types: dict[str, str] = {}
        self.columns, self.num_rows, first_fault = _columns_of(self.rows(()))
        if not self.columns and first_fault:
            raise DataError(
                f"table '{path}': no line of it is a JSON object ({first_fault}); JSON Lines have one object a line, "
                "and one document over several lines is read with format=json"
            )

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All lines that are not blank. See `SourceTable.rows`."""
        for number, line in enumerate(TextLines(self.path, self._encoding), 1):
            if not line.strip():
                continue
            place = f"{self.path.name}, line {number}"
            try:
                value = parse_json(line)
            except (ValueError, RecursionError) as error:
                yield TableRow.broken(place, f"not JSON: {error}")
                continue
            if isinstance(value, dict):
                yield TableRow(place, cast("dict[str, Any]", value))
            else:
                yield TableRow.broken(place, f"a JSON object is expected, got {type(value).__name__}")


class JsonTable(SourceTable):
    """One JSON document with a table in it.

    It is an array of objects, Karpathy's `images` with `sentences`, an object with one such array, an object of
    columns, or an object of image names and their captions.
    """

    kind = SourceKind.JSON

    def __init__(self, path: Path, encoding: str = "utf-8") -> None:
        self.path = path
        self.types: dict[str, str] = {}
        _refuse_large(path, size_and_time(path)[0])
        with naming_damage(path), open_text(path, encoding) as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
        _refuse_large(path, len(text))  # of one that is compressed
        try:
            document = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"table '{path}': not JSON: {error}") from error
        self._rows = list(_rows_of(path, document))
        self.columns, self.num_rows, _ = _columns_of(self._rows)

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows. See `SourceTable.rows`."""
        return iter(self._rows)


def _refuse_large(path: Path, size: int) -> None:
    if size > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"table '{path}': a JSON document of {size} bytes; it would be held in memory, and at most "
            f"{MAX_DOCUMENT_BYTES} are: write its rows as JSON Lines, one object a line"
        )


def _rows_of(path: Path, document: Any) -> Iterator[TableRow]:
    """The rows of a document; the first form that it has decides."""
    if isinstance(document, list):
        return _objects(path, cast("list[Any]", document))
    content = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
    lists = {name: value for name, value in content.items() if isinstance(value, list) and value}
    images, annotations = lists.get("images"), lists.get("annotations")
    if images and annotations and _all_have(images, "id") and _all_have(annotations, "image_id"):
        if any("caption" in annotation for annotation in annotations):
            raise DataError(f"table '{path}': COCO's captions, which are no table; leave format and encoding out")
        raise DataError(
            f"table '{path}': COCO annotations without captions (their keys: {shown(list(annotations[0]))}); give the "
            "file of captions (captions_train2017.json), or of boxes (instances_train2017.json)"
        )
    if images and _all_have(images, "sentences"):
        return _karpathy(path, images)
    tables = [value for value in lists.values() if isinstance(value[0], dict)]
    if len(tables) == 1:
        return _objects(path, tables[0])
    if content and all(_is_image_name(name) and isinstance(value, (str, list)) for name, value in content.items()):
        return _objects(path, [{"image": name, "captions": value} for name, value in content.items()])
    if content and len(lists) == len(content) and len({len(value) for value in lists.values()}) == 1 and not tables:
        return _objects(path, [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)])
    found = f"an object with the keys {shown(list(content))}" if content else type(document).__name__
    raise DataError(
        f"table '{path}': {found}, in which no table of images is known; write its rows as JSON Lines, one object a "
        'line: {"image": "a.jpg", "caption": "a dog"}'
    )


def _objects(path: Path, entries: Sequence[Any]) -> Iterator[TableRow]:
    for number, entry in enumerate(entries, 1):
        place = f"{path.name}, entry {number}"
        if isinstance(entry, dict):
            yield TableRow(place, cast("dict[str, Any]", entry))
        else:
            yield TableRow.broken(place, f"a JSON object is expected, got {type(entry).__name__}")


def _karpathy(path: Path, images: Sequence[Any]) -> Iterator[TableRow]:
    """Rows of Karpathy's splits of COCO and Flickr: `filepath` is a folder, `sentences` hold the captions as `raw`."""
    for number, image in enumerate(images, 1):
        sentences = cast("list[Any]", image["sentences"] if isinstance(image["sentences"], list) else [])
        said = [one.get("raw") if isinstance(one, dict) else one for one in sentences]
        name = "/".join(str(image[key]) for key in ("filepath", "filename") if key in image)
        others = {key: value for key, value in image.items() if key not in ("filepath", "filename", "sentences")}
        yield TableRow(f"{path.name}, entry {number}", {"image": name, "captions": said, **others})


def _all_have(entries: Sequence[Any], name: str) -> bool:
    return all(isinstance(entry, dict) and name in entry for entry in entries)


def hashable(value: Any) -> Any:
    """An id of COCO's as a key of a dictionary; 1.0, as pandas writes it, is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int)) else json.dumps(value)


def _is_image_name(name: str) -> bool:
    return Path(name).suffix.lower() in IMAGE_SUFFIXES


def _columns_of(rows: Iterable[TableRow]) -> tuple[list[str], int, str]:
    """Keys of all rows, in order; the number of rows; and the first fault among them."""
    columns: dict[str, None] = {}
    count, first_fault = 0, ""
    for row in rows:
        count += 1
        columns.update(dict.fromkeys(row.cells or ()))
        if row.fault and not first_fault:
            first_fault = f"{row.place}: {row.fault[1]}"
    return list(columns), count, first_fault


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no Infinity, no duplicate key.

    Raises:
        ValueError, RecursionError: it is not that.
    """
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique_keys)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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
            yield from reader.entries("")
        elif reader.peek() == "{":
            seen = set[str]()
            for _ in reader.places("{", "}"):
                key = reader.key()
                if key in seen:
                    raise reader.fault(f"key {excerpt(key)} is there twice")
                seen.add(key)
                if reader.peek() == "[":
                    yield from reader.entries(key)
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

    def entries(self, key: str) -> Iterator[JsonEntry]:
        """The entries of the array that begins here."""
        return (JsonEntry(key, number, self.value()) for number in self.places("[", "]"))

    def places(self, begin: str, end: str) -> Iterator[int]:
        """Numbers, from 1, of what is in the array or object that begins here; each is taken before the next."""
        self._take(begin)
        number = 0
        while self.peek() != end:
            if number:
                self._take(",")
            number += 1
            yield number
        self._take(end)

    def key(self) -> str:
        """The key that begins here."""
        if self.peek() != '"':
            raise self.fault("a key is expected")
        key = self.value()
        self._take(":")
        return key

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
