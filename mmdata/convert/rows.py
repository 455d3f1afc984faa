"""A row as its source has it, and what a source is. A row's number in its source's fixed order is its identity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from mmdata.errors import BadSample, DataError, Reason
from mmdata.hashing import hash64
from mmdata.shards.samples import Group, image_member, texts_of
from mmdata.shards.tar import Member
from mmdata.shards.texts import Texts


@dataclass(frozen=True)
class PackedFiles:
    """The files of a sample that lies in a tar.

    Attributes:
        tar: path of the tar.
        group: its members, by extension.
        key: the key that the sample gets.
        indexed: offset of the image that an index names, and its hash there; None where there is no index.
    """

    tar: str
    group: Group
    key: str
    indexed: tuple[int, int] | None = None

    def image(self, *, max_bytes: int) -> bytes:
        """The image's bytes; BadSample where there is none, a larger one, or another than the index says."""
        member = image_member(self.group, self._read)
        if member.size > max_bytes:
            detail = f"'{member.name}' has {member.size} bytes; the limit is {max_bytes}"
            raise BadSample(Reason.IMAGE_TOO_LARGE, detail)
        data = self._read(member)
        if self.indexed is not None and self.indexed[0] == member.offset and self.indexed[1] != hash64(data):
            raise BadSample(
                Reason.FILE_CHANGED, f"'{member.name}' is not the image indexed; `mmdata verify` tells what changed"
            )
        return data

    def texts(self) -> Texts:
        """What its text members say; BadSample where none has a usable caption."""
        return texts_of(self.group, self._read)

    def _read(self, member: Member) -> bytes:
        with open(self.tar, "rb") as file:
            file.seek(member.offset)
            data = file.read(member.size)
        if len(data) < member.size:
            raise DataError(f"shard '{self.tar}': became shorter while it was read; convert again when it is whole")
        return data


@dataclass(frozen=True)
class Row:
    """One input row, as found: nothing in it is checked yet.

    Attributes:
        number: position in the source, from 0.
        place: where it stands, for people.
        image: path relative to the source's root, or the image's bytes; anything else is a fault to be found.
        captions: values of the caption columns: strings, lists of strings, None, or what else was there.
        label: class number or name, or None.
        extra: further columns to keep, by the name they are stored under.
        sidecars: paths of files that hold captions, label and extra instead.
        packed: the files of a sample in a tar, which hold all of it instead.
        fault: reason and detail where the row could not be read at all.
    """

    number: int
    place: str
    image: Any = None
    captions: tuple[Any, ...] = ()
    label: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    sidecars: tuple[str, ...] = ()
    packed: PackedFiles | None = None
    fault: tuple[Reason, str] | None = None


class Source(Protocol):
    """A raw corpus.

    Attributes:
        root: real path of the folder that all images lie below.
        rows_at_most: bound on the number of rows, exact for folders, tars and Parquet.
        classes: names of the class numbers where the corpus comes with them; else empty.
    """

    root: str
    rows_at_most: int
    classes: tuple[str, ...]

    def rows(self) -> Iterator[Row]:
        """All rows, in the same order every time."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was read, without a machine's paths or clocks: equal for equal input."""
        ...
