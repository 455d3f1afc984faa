"""Rows of a raw corpus, and the sources that give them. A row's number in its source's fixed order is its identity."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from mmdata.config.convert import ConvertConfig, Grouping
from mmdata.convert.sources.files import Seen
from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.hashing import hash64
from mmdata.tars.members import USUAL, Members
from mmdata.tars.samples import Group, image_member, label_of, texts_of
from mmdata.tars.tar import Member, header
from mmdata.tars.texts import Loss, SampleTexts

_URL = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*://|file:)", re.IGNORECASE)
LONGEST_EXTENSION = ".json"
KEY_BYTES = 16
"""Bytes of a key of an image."""


@dataclass(frozen=True)
class PackedFiles:
    """The files of a sample in a tar.

    Attributes:
        root: folder of the tar, which is the corpus.
        tar: name of the tar in it.
        group: the sample's members, by extension.
        key: of the sample in the new shards.
        members: which of them are image, caption and label.
        indexed: offset and hash of the image in the tar's index; None without an index.
    """

    root: str
    tar: str
    group: Group
    key: str
    members: Members = USUAL
    indexed: tuple[int, int] | None = None

    def image(self, seen: Seen, *, max_bytes: int) -> bytes:
        """The image's bytes; `seen` notes them.

        Raises:
            BadSample: there is none, it is larger than `max_bytes`, or it is not the image that was indexed.
        """
        member = image_member(self.group, partial(self._read, seen), self.members)
        if member.size > max_bytes:
            detail = f"'{member.name}' has {member.size} bytes; the limit is {max_bytes}"
            raise BadSample(Reason.IMAGE_TOO_LARGE, detail)
        data = self._read(seen, member)
        if self.indexed is not None and self.indexed[0] == member.offset and self.indexed[1] != hash64(data):
            raise BadSample(
                Reason.FILE_CHANGED, f"'{member.name}' is not the image indexed; `mmdata verify` tells what changed"
            )
        return data

    def texts(self, seen: Seen, *, needs_caption: bool = True) -> SampleTexts:
        """Captions, label and metadata; see `texts_of`."""
        return texts_of(self.group, partial(self._read, seen), needs_caption=needs_caption, members=self.members)

    def label(self) -> int | str | None:
        """The label that `texts` gives; None if it cannot be used."""
        return label_of(self.group, partial(self._read, Seen()), self.members)

    def _read(self, seen: Seen, member: Member) -> bytes:
        path = os.path.join(self.root, self.tar)
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(member.offset)
            data = file.read(member.size)
        if len(data) < member.size:
            raise DataError(f"shard '{path}': became shorter while it was read; convert again when it is whole")
        seen.note(self.tar, status, member.offset, data)
        return data


@dataclass(frozen=True)
class InputRow:
    """One input row; nothing in it is checked yet.

    Attributes:
        number: position in the source, from 0.
        place: the row's place in the source, for people.
        image: path relative to the source's root, or the image's bytes; the examiner refuses any other value.
        captions: values of the caption columns: strings, lists of strings, None, or anything else.
        label: class number or name, or None.
        extra: further columns to keep, by the name under which they are stored.
        sidecars: paths of text files with captions, label and extra; the fields above are empty then.
        packed: the files of a sample in a tar; image, captions and label are empty then.
        more_captions: clean captions of later rows of the same image, which are added to the row's own.
        losses: what those rows have and the sample does not get.
        url: that `image`, the bytes, was fetched from; "" for none.
        hash: of the image's bytes as the table gives it, or None.
        boxes: of the image, which are blurred, as the table gives them; None for none.
        key: of its sample in the shards; "" takes the row's number.
        merged_into: number of the row that takes this row's captions; None for a row of its own.
        fault: reason and detail if the row could not be read.
    """

    number: int
    place: str
    image: Any = None
    captions: tuple[Any, ...] = ()
    label: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    sidecars: tuple[str, ...] = ()
    packed: PackedFiles | None = None
    more_captions: tuple[str, ...] = ()
    losses: dict[Loss, str] = field(default_factory=dict[Loss, str])
    url: str = ""
    hash: Any = None
    boxes: Any = None
    key: str = ""
    merged_into: int | None = None
    fault: tuple[Reason, str] | None = None


def numbered_key(number: int) -> str:
    """The key of a row that has none of its own."""
    return f"{number:09d}"


def fits_header(key: str) -> bool:
    """Whether the names of a sample's members fit into plain tar headers."""
    try:
        header(key + LONGEST_EXTENSION, 0)
    except ValueError:
        return False
    return True


class Source(Protocol):
    """A raw corpus.

    Attributes:
        root: real path of the folder that must contain all images.
        rows_at_most: upper bound of the number of rows, exact for folders, tars and Parquet.
        rows_are_exact: whether `rows_at_most` is the number of rows.
        classes: names of the class numbers, if the corpus declares them; else empty.
        has_captions: whether any row may have a caption; if not, the corpus is one of labels only.
        group_by: which rows become one sample unless the settings say: those that name one image, those whose images
            are equal byte for byte, or none. Only where it is "image" may several rows name one.
    """

    root: str
    rows_at_most: int
    rows_are_exact: bool
    classes: tuple[str, ...]
    has_captions: bool
    group_by: Grouping

    def rows(self) -> Iterator[InputRow]:
        """All rows, in the same order every time."""
        ...

    def rows_with_labels(self) -> Iterator[InputRow]:
        """All rows that may have a label, in their order; they need not have an image or captions."""
        ...

    def describe(self) -> dict[str, Any]:
        """Kind and content of the source, without paths and times: equal for equal input."""
        ...


@runtime_checkable
class ImageSource(Source, Protocol):
    """A source whose rows may hold the bytes of images, so that many of them do not fit into memory.

    Attributes:
        holds_images: whether they do. The number of rows is known then.
        can_be_sent: whether another process can read them.
    """

    holds_images: bool
    can_be_sent: bool

    def rows_from(self, start: int) -> Iterator[InputRow]:
        """The rows from number `start` on; images before it are not read.

        Raises:
            DataError: a file has changed since it was opened.
        """
        ...

    def check_unchanged(self) -> None:
        """Raise DataError if a file has changed since it was opened."""
        ...


def images_of(source: Source) -> ImageSource | None:
    """The source if its rows hold images, which are read where they are worked on; else None."""
    return source if isinstance(source, ImageSource) and source.holds_images else None


def has_url(row: InputRow) -> bool:
    """Whether the row's image is behind a URL, of whatever scheme."""
    return isinstance(row.image, str) and row.fault is None and row.merged_into is None and bool(_URL.match(row.image))


def grouping(source: Source, config: ConvertConfig) -> Grouping:
    """Which rows of a source become one sample, by the settings or the kind of source."""
    how = config.group_by or ("none" if config.keep_duplicates else source.group_by)
    return "none" if how == "image" and source.group_by != "image" else how


def expected_hash(expected: Any) -> str:
    """The cell of a hash in one spelling; "" for an empty cell, which is one of blanks too."""
    if expected is None:
        return ""
    return expected.hex() if isinstance(expected, bytes) else str(expected).strip().lower()


def image_key(row: InputRow) -> bytes:
    """KEY_BYTES that are equal for rows with the same path, or the same bytes in a binary column, and the same hash."""
    image = row.image
    if row.fault or not isinstance(image, (str, bytes)):
        return row_key(row.number)
    data = b"path " + image.encode("utf-8", "surrogatepass") if isinstance(image, str) else b"data " + image
    if expected := expected_hash(row.hash):
        data = f"hash {expected} ".encode("utf-8", "surrogatepass") + data
    return hashlib.sha256(data).digest()[:KEY_BYTES]


def row_key(number: int) -> bytes:
    """KEY_BYTES that no other row has: of a row whose image is not known."""
    return hashlib.sha256(b"row %d" % number).digest()[:KEY_BYTES]


class Merge(NamedTuple):
    """What merging does to a row.

    Attributes:
        captions: of later rows of the image, which this row takes.
        losses: what those rows have and the sample does not get.
        boxes: to blur, of all rows of the image; None if this row has them all.
        into: number of the row that takes this row's captions; None for a row that takes those of others.
        fault: of this row. It cannot be merged because it has no caption that is new, or too many; or it cannot take
            the others' boxes.
    """

    captions: tuple[str, ...] = ()
    losses: dict[Loss, str] = {}  # noqa: RUF012  # never changed
    boxes: list[list[float]] | None = None
    into: int | None = None
    fault: tuple[Reason, str] | None = None

    def __call__(self, row: InputRow) -> InputRow:
        """The row after merging."""
        if self.into is None:
            boxes = row.boxes if self.boxes is None else self.boxes
            losses = {**row.losses, **self.losses}
            return replace(row, more_captions=self.captions, losses=losses, boxes=boxes, fault=self.fault or row.fault)
        image = row.image if isinstance(row.image, str) else None  # for the ledger; bytes are not needed any more
        # Its files stay with it: a run that goes on looks whether they have changed.
        return InputRow(
            row.number,
            row.place,
            image,
            sidecars=row.sidecars,
            packed=row.packed,
            merged_into=self.into,
            fault=self.fault,
        )


def fill_templates(templates: Iterable[str], name: str) -> list[str]:
    """Captions of a name: `fill_templates(["a photo of a {}."], "polar_bear") == ["a photo of a polar bear."]`."""
    return [template.replace("{}", name.replace("_", " ")) for template in templates]


class SourceKind(Enum):
    """Kinds of source; the value is the name for people."""

    DELIMITED = "a CSV or TSV table"
    JSON = "a JSON table"
    ARROW = "a Parquet or Arrow table"
    FOLDER = "a folder of images, read without a table"
    BOXES = "COCO's annotations"
    TARS = "WebDataset tars"
    ROWS = "rows of a program"


_TABLES = (SourceKind.DELIMITED, SourceKind.JSON, SourceKind.ARROW)
_ROWS = (*_TABLES, SourceKind.ROWS)
_BELONG: Mapping[str, tuple[SourceKind, ...]] = MappingProxyType(
    {
        "delimiter": (SourceKind.DELIMITED,),
        "quotes": (SourceKind.DELIMITED,),
        "columns": (SourceKind.DELIMITED,),
        "encoding": (SourceKind.DELIMITED, SourceKind.JSON),
        "table": (*_TABLES, SourceKind.FOLDER, SourceKind.TARS, SourceKind.BOXES),
        "format": _TABLES,
        "images": (*_ROWS, SourceKind.BOXES),
        "image_column": (*_ROWS, SourceKind.TARS),
        "caption_columns": (*_ROWS, SourceKind.TARS),
        "label_column": (*_ROWS, SourceKind.TARS),
        "hash_column": _ROWS,
        "blur_boxes": _TABLES,
        "contact": _ROWS,
        "connections_per_host": _ROWS,
        "ignore_opt_outs": _ROWS,
        "allow_private_addresses": _ROWS,
    }
)
"""Kinds of source of each setting that does not belong to all."""


def refuse_strangers(path: Path, config: ConvertConfig, kind: SourceKind) -> None:
    """Raise ConfigError if the settings hold one that does not belong to this kind of source."""
    wrong: dict[str, list[str]] = {}
    for name, kinds in _BELONG.items():
        if kind not in kinds and getattr(config, name) != ConvertConfig.model_fields[name].default:
            wrong.setdefault(_of(kinds), []).append(name)
    if not wrong:
        return
    said = "; ".join(f"{', '.join(names)} {purpose}" for purpose, names in wrong.items())
    advice = ", or give a table as the source" if kind is SourceKind.FOLDER else ""
    raise ConfigError(f"source '{path}': it is {kind.value}; {said}; leave out what is not for it{advice}")


def _of(kinds: tuple[SourceKind, ...]) -> str:
    """Says what settings are for, as "only for a CSV or TSV table"."""
    named = ["a table"] if set(_TABLES) <= set(kinds) else [one.value for one in kinds if one in _TABLES]
    return "only for " + " or ".join([*named, *(one.value for one in kinds if one not in _ROWS)])
