"""Rows of a raw corpus, and the sources that give them. A row's number in its source's fixed order is its identity."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from mmdata.config.convert import ConvertConfig, Grouping
from mmdata.errors import ConfigError, Reason
from mmdata.tars.tar import header
from mmdata.tars.texts import Loss

if TYPE_CHECKING:
    from mmdata.convert.sources.folder import FolderFiles
    from mmdata.convert.sources.tars import PackedFiles

_URL = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*://|file:)", re.IGNORECASE)
LONGEST_EXTENSION = ".json"
KEY_BYTES = 16
"""Bytes of a key of an image."""
NOT_QUARANTINED = (Reason.DUPLICATE_IMAGE, Reason.FILTERED)
"""Reasons of rows that are left out and could be used."""


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
        files: of the sample, with captions, label and metadata in them; the fields above are empty then, but for the
            path of an image in a folder.
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
    files: FolderFiles | PackedFiles | None = None
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


class Source(ABC):
    """A raw corpus.

    Attributes:
        root: real path of the folder that must contain all images.
        num_rows: number of rows.
        classes: names of the class numbers, if the corpus declares them; else empty.
        has_captions: whether any row may have a caption; if not, the corpus is one of labels only.
        group_by: which rows become one sample unless the settings say: those that name one image, those whose images
            are equal byte for byte, or none. Only where it is "image" may several rows name one.
        holds_images: whether rows hold the bytes of images, so that many of them do not fit into memory.
        can_be_sent: whether another process can read the rows.
        can_seek: whether rows can be read without those before them.
    """

    root: str
    num_rows: int
    classes: tuple[str, ...] = ()
    has_captions: bool = True
    group_by: Grouping = "none"
    holds_images: bool = False
    can_be_sent: bool = True
    can_seek: bool = False

    @abstractmethod
    def rows(self, start: int = 0) -> Iterator[InputRow]:
        """The rows from number `start` on, in the same order every time; images before it are not read."""

    @abstractmethod
    def rows_with_labels(self) -> Iterator[InputRow]:
        """All rows that may have a label, in their order; they need not have an image or captions."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Kind and content of the source, without paths and times: equal for equal input."""

    def check_unchanged(self) -> None:  # noqa: B027  # most are not read again
        """Raise DataError if a table has changed since it was opened."""


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
            files=row.files,
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


_OF_ROWS = frozenset(
    (
        *("images", "image_column", "caption_columns", "label_column", "hash_column"),
        *("contact", "connections_per_host", "ignore_opt_outs", "allow_private_addresses"),
    )
)
_OF_TABLES = _OF_ROWS | {"table", "format", "blur_boxes"}
_SETTINGS: Mapping[SourceKind, frozenset[str]] = MappingProxyType(
    {
        SourceKind.DELIMITED: _OF_TABLES | {"delimiter", "quotes", "columns", "encoding"},
        SourceKind.JSON: _OF_TABLES | {"encoding"},
        SourceKind.ARROW: _OF_TABLES,
        SourceKind.FOLDER: frozenset({"table"}),
        SourceKind.BOXES: frozenset({"table", "images"}),
        SourceKind.TARS: frozenset({"table", "image_column", "caption_columns", "label_column"}),
        SourceKind.ROWS: _OF_ROWS,
    }
)
"""Settings of each kind of source, of those that do not belong to all."""


def refuse_strangers(path: Path, config: ConvertConfig, kind: SourceKind) -> None:
    """Raise ConfigError if the settings hold one that does not belong to this kind of source."""
    strangers = frozenset[str]().union(*_SETTINGS.values()) - _SETTINGS[kind]
    changed = {name for name, field in ConvertConfig.model_fields.items() if getattr(config, name) != field.default}
    if wrong := sorted(strangers & changed):
        advice = ", or give a table as the source" if kind is SourceKind.FOLDER else ""
        raise ConfigError(
            f"source '{path}': it is {kind.value}; settings that are not for it: {', '.join(wrong)}; leave them "
            f"out{advice}"
        )
