"""What an index in progress has read of each tar, kept on disk, so that a run that ended early is not repeated.

What was read is used again only for a tar of the same size and modification time, or of the same URL, read with the
same settings. The folder also holds the finished index before it is published: a run that was killed while files were
moved is finished by the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import DataError
from mmdata.files import Staged, remove
from mmdata.index.columns import SCHEMA, ShardColumns
from mmdata.index.encode import columns_of, encode
from mmdata.index.manifest import INDEX_FILE, Manifest
from mmdata.index.side import read_columns, write_columns
from mmdata.storage.folder import INNER, MANIFEST_NAME
from mmdata.tars.members import Members
from mmdata.tars.scan import Scan
from mmdata.tars.texts import Loss

STAGING_NAME = ".mmdata-index"
VERSION = 8
"""Of the staged files; raise it when a reader of samples changes what it finds."""
TOKENIZER_NAME = "tokenizer"
"""Name of a trained tokenizer: a link to the folder of this name in `__mmdata__`, as a conversion makes it."""

_MORE = {
    "captions": pa.list_(pa.string()),
    "label_name": pa.string(),
    "losses": pa.string(),
    "has_caption": pa.bool_(),
    "is_usable": pa.bool_(),
}
"""Columns of the samples that are read of a tar, besides those of the index; `losses` are JSON, or null."""


class TarFacts(NamedTuple):
    """What was found in a tar.

    Attributes:
        suspects: the samples that some corpus leaves out, and the first and the last; see `Scan.without_sound_rows`.
        samples: how many there are.
        has_captions, has_mute, may_lack_images: see `Scan`.
        sha256, bytes: of the whole file.
    """

    suspects: Scan
    samples: int
    has_captions: bool
    has_mute: bool
    may_lack_images: bool
    sha256: str
    bytes: int

    @classmethod
    def of(cls, scan: Scan, sha256: str = "", size: int = 0) -> TarFacts:
        """The facts of a tar that was read; without an index nobody asks for hash and size."""
        has = scan.has_captions, scan.has_mute, scan.may_lack_images
        return cls(scan.without_sound_rows(), len(scan.samples), *has, sha256, size)

    def in_brief(self) -> TarFacts:
        """The facts without the samples."""
        return self._replace(suspects=replace(self.suspects, samples=[]))

    def content(self) -> dict[str, Any]:
        """The facts as JSON; `from_content` is the inverse."""
        return {**self._asdict(), "suspects": self.suspects.to_json()}

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> TarFacts:
        """The facts of which `content` is the JSON."""
        return cls(Scan.from_json(content["suspects"]), *(content[name] for name in cls._fields[1:]))


@dataclass(frozen=True)
class ReadTar:
    """What was read of a tar.

    Attributes:
        facts: about it.
        table: an Arrow record batch of its samples: the columns of the index, and those of `_MORE`.
    """

    facts: TarFacts
    table: Any

    @classmethod
    def of(cls, scan: Scan, sha256: str, size: int) -> ReadTar:
        """A tar that was scanned."""
        samples = scan.samples
        table: Any = encode([sample.row for sample in samples]).arrow
        more = (
            [sample.row.captions for sample in samples],
            [sample.label if isinstance(sample.label, str) else None for sample in samples],
            [json.dumps(sample.losses) if sample.losses else None for sample in samples],
            [sample.has_caption for sample in samples],
            [sample.fault is None for sample in samples],
        )
        for values, (name, kind) in zip(more, _MORE.items(), strict=True):
            table = table.append_column(name, pa.array(values, kind))
        return cls(TarFacts.of(scan, sha256, size), table)

    def in_corpus(self, members: Members, *, has_captions: bool, lacks_images: bool) -> ReadTar:
        """The tar as the whole corpus decides: see `Scan.of_corpus`."""
        if not lacks_images and not (has_captions and self.facts.has_mute):
            return self
        suspects = self.facts.suspects.of_corpus(captions=has_captions, images=not lacks_images, members=members)
        if lacks_images:
            usable = np.ones(self.facts.samples, np.bool_)
            usable[len(usable) - len(suspects.quarantined) :] = False  # the last, if the tar is damaged in it
        else:
            usable = self._flags("is_usable") & self._flags("has_caption")
        place = self.table.schema.get_field_index("is_usable")
        table = self.table.set_column(place, "is_usable", pa.array(usable))
        return ReadTar(self.facts._replace(suspects=suspects), table)

    @property
    def rows(self) -> int:
        """How many samples are usable."""
        return self.table.column("is_usable").true_count

    @property
    def columns(self) -> ShardColumns:
        """The columns of the usable samples."""
        return columns_of(self._usable.select(SCHEMA.names))

    @property
    def captions(self) -> list[str]:
        """The captions of the usable samples."""
        return self._usable.column("captions").flatten().to_pylist()

    @property
    def labels(self) -> Sequence[int | str | None]:
        """The labels of the usable samples: class number, class name, or None."""
        numbers, names = (self._usable.column(name).to_pylist() for name in ("label", "label_name"))
        pairs = zip(numbers, names, strict=True)
        return [name if name is not None else None if number < 0 else number for number, name in pairs]

    @property
    def losses(self) -> list[tuple[str, dict[Loss, str]]]:
        """(key, what was lost) of the usable samples with losses."""
        keys, found = (self._usable.column(name).to_pylist() for name in ("key", "losses"))
        return [
            (key, {Loss(loss): detail for loss, detail in json.loads(lost).items()})
            for key, lost in zip(keys, found, strict=True)
            if lost is not None
        ]

    @property
    def _usable(self) -> Any:
        # Filtering imports pandas where it is installed.
        return self.table if self.rows == len(self.table) else self.table.filter(self.table.column("is_usable"))

    def _flags(self, name: str) -> NDArray[np.bool_]:
        return self.table.column(name).to_numpy(zero_copy_only=False)


class IndexStaging:
    """The hidden folder of an index in progress.

    Args:
        folder: where the index will be published.

    Attributes:
        folder: as given.
        new: folder in which the finished index is made before it is published.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / STAGING_NAME
        self.new = self._path / "new"
        self._staged = Staged(folder, self.new, last=INNER + MANIFEST_NAME, names=self._published)

    def load(self, tar: str, identity: dict[str, Any]) -> ReadTar | None:
        """What was read of a tar; None if nothing was, if what is kept is damaged, or if it is of another identity."""
        try:
            head, table = read_columns(self._place(tar))
        except (OSError, ValueError, DataError, pa.ArrowException):
            return None
        if head["of"] != {"version": VERSION, **identity}:
            return None
        batch = pa.record_batch([column.combine_chunks() for column in table.columns], schema=table.schema)
        return ReadTar(TarFacts.from_content(head["facts"]), batch)

    def save(self, tar: str, identity: dict[str, Any], read: ReadTar) -> None:
        """Keep what was read of a tar; `identity` is all that decided it, as JSON, found before the tar was read."""
        self._path.mkdir(exist_ok=True)
        head = {"of": {"version": VERSION, **identity}, "facts": read.facts.content()}
        try:
            write_columns(self._place(tar), head, read.table)
        except OSError:
            with suppress(OSError):  # holds what was kept of other tars
                self._path.rmdir()
            raise

    def make_new(self) -> Path:
        """An empty folder for the finished index."""
        remove(self.new)
        self.new.mkdir(parents=True)
        return self.new

    def finish_killed_run(self) -> None:
        """Publish the finished index that a killed run left behind, if there is one."""
        if self._staged.is_whole:
            self.publish()

    def publish(self) -> Manifest:
        """Publish the finished index, with a link to its tokenizer unless something has its place; see `Staged`."""
        link, places = self.new / TOKENIZER_NAME, (self.new / TOKENIZER_NAME, self.folder / TOKENIZER_NAME)
        if (self.new / INNER / TOKENIZER_NAME).is_dir() and not any(map(os.path.lexists, places)):
            link.symlink_to(INNER + TOKENIZER_NAME)
        self._staged.publish()
        remove(self._path)
        return Manifest.read(self.folder)

    def _published(self, _: Path) -> list[str]:
        """Index files in the folder, also those that no manifest names."""
        return [INNER + path.name for path in (self.folder / INNER).iterdir() if INDEX_FILE.fullmatch(path.name)]

    def _place(self, tar: str) -> Path:
        return self._path / f"{tar}.scan"
