"""JSON Lines, and JSON documents that hold a table: arrays of objects, COCO captions, names with their captions.

A document is read as a whole and held in memory, about ten times its size on disk; JSON Lines are read line by line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from mmdata.convert.sources.compressed import naming_damage
from mmdata.convert.sources.files import size_and_time
from mmdata.convert.sources.folder import IMAGE_SUFFIXES
from mmdata.convert.sources.tables import SourceTable, TableRow, TextLines, open_text, shown
from mmdata.errors import DataError, excerpt
from mmdata.tars.captions import unique_keys

ROWS_SEEN = 100
"""Rows of a table whose keys are its columns."""
MAX_DOCUMENT_BYTES = 2**32
"""Largest JSON document, 4 GiB."""


class JsonLinesTable(SourceTable):
    """A file with a JSON object in each line."""

    def __init__(self, path: Path, encoding: str = "utf-8") -> None:
        self.path = path
        self._encoding = encoding
        self.types: dict[str, str] = {}
        self.columns, first_fault = _columns_of(self.rows(()))
        if not self.columns and first_fault:
            raise DataError(
                f"table '{path}': no line of it is a JSON object ({first_fault}); JSON Lines have one object a line, "
                "and one document over several lines is read with format=json"
            )

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All lines that are not blank. See `Table.rows`."""
        for number, line in enumerate(TextLines(self.path, self._encoding), 1):
            if not line.strip():
                continue
            place = f"{self.path.name}, line {number}"
            try:
                value = parse_json(line)
            except (ValueError, RecursionError) as error:
                yield TableRow(place, None, f"not JSON: {error}")
                continue
            if isinstance(value, dict):
                yield TableRow(place, cast("dict[str, Any]", value))
            else:
                yield TableRow(place, None, f"a JSON object is expected, got {type(value).__name__}")


class JsonTable(SourceTable):
    """One JSON document with a table in it.

    It is an array of objects, COCO's `images` and `annotations`, Karpathy's `images` with `sentences`, an object with
    one such array, an object of columns, or an object of image names and their captions.
    """

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
        self.num_rows = len(self._rows)
        self.columns, _ = _columns_of(self._rows)

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows. See `Table.rows`."""
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
        return _coco(path, images, annotations)
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
            yield TableRow(place, None, f"a JSON object is expected, got {type(entry).__name__}")


def _coco(path: Path, images: Sequence[Any], annotations: Sequence[Any]) -> Iterator[TableRow]:
    """A row for each image, with all its captions; a caption whose image is not listed is a row without an image."""
    if not any("caption" in annotation for annotation in annotations):
        raise DataError(
            f"table '{path}': COCO annotations without captions (their keys: {shown(list(annotations[0]))}); give the "
            "file of captions (captions_train2017.json), or of boxes (instances_train2017.json)"
        )
    captions: dict[Any, list[Any]] = {}
    for annotation in annotations:
        captions.setdefault(hashable(annotation["image_id"]), []).append(annotation.get("caption"))
    for image in images:
        said = captions.pop(hashable(image["id"]), [])
        yield TableRow(f"{path.name}, image {excerpt(image['id'])}", {**image, "captions": said})
    for number, said in captions.items():
        yield TableRow(f"{path.name}, image {number}", {"file_name": None, "captions": said})


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


def _columns_of(rows: Iterable[TableRow]) -> tuple[list[str], str]:
    """Keys of the first ROWS_SEEN rows, in order, and the first fault among them."""
    columns: dict[str, None] = {}
    seen, first_fault = 0, ""
    for row in rows:
        if row.cells is None:
            first_fault = first_fault or f"{row.place}: {row.fault}"
            continue
        columns.update(dict.fromkeys(row.cells))
        seen += 1
        if seen == ROWS_SEEN:
            break
    return list(columns), first_fault


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no Infinity, no duplicate key.

    Raises:
        ValueError, RecursionError: it is not that.
    """
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique_keys)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
