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
from mmdata.files import Staged, remove, write_whole
from mmdata.index.columns import SCHEMA, ShardColumns
from mmdata.index.encode import columns_of, encode
from mmdata.index.manifest import INDEX_FILE
from mmdata.index.side import read_columns, write_columns
from mmdata.storage.folder import INNER, MANIFEST_NAME
from mmdata.tars.members import Members
from mmdata.tars.scan import Scan
from mmdata.tars.texts import Loss

STAGING_NAME = ".mmdata-index"
GUESS_NAME = "members.json"
VERSION = 7
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
        rows: how many of them are usable.
        has_captions, has_mute, may_lack_images: see `Scan`.
        sha256, bytes: of the whole file.
    """

    suspects: Scan
    samples: int
    rows: int
    has_captions: bool
    has_mute: bool
    may_lack_images: bool
    sha256: str
    bytes: int

    @classmethod
    def of(cls, scan: Scan, sha256: str, size: int) -> TarFacts:
        """The facts of a tar that was read."""
        has = scan.has_captions, scan.has_mute, scan.may_lack_images
        return cls(scan.without_sound_rows(), len(scan.samples), len(scan.usable), *has, sha256, size)

    def in_brief(self) -> TarFacts:
        """The facts without those samples that only lack a caption: a corpus of labels has no others."""
        edges = self.suspects.edges
        kept = [s for s in self.suspects.samples if s.fault is not None or any(s is edge for edge in edges)]
        return self._replace(suspects=replace(self.suspects, samples=kept))

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
            usable[len(usable) - sum(sample.is_damaged for sample in suspects.samples) :] = False  # it is the last
        else:
            usable = self._flags("is_usable") & self._flags("has_caption")
        place = self.table.schema.get_field_index("is_usable")
        table = self.table.set_column(place, "is_usable", pa.array(usable))
        return ReadTar(self.facts._replace(suspects=suspects, rows=int(usable.sum())), table)

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
        return (
            self.table if self.facts.rows == self.facts.samples else self.table.filter(self.table.column("is_usable"))
        )

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

    def load_guess(self, of: dict[str, Any]) -> dict[str, list[str]] | None:
        """The members that an earlier run guessed of the same tars; None if there was none."""
        try:
            content = json.loads((self._path / GUESS_NAME).read_bytes())
            return content["members"] if content["of"] == of else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save_guess(self, of: dict[str, Any], members: dict[str, list[str]]) -> None:
        """Keep the members that were guessed, as `Members.content` gives them; `of` names the tars, as JSON."""
        self._path.mkdir(exist_ok=True)
        write_whole(self._path / GUESS_NAME, json.dumps({"of": of, "members": members}).encode())

    def make_new(self) -> Path:
        """An empty folder for the finished index."""
        remove(self.new)
        self.new.mkdir(parents=True)
        return self.new

    def finish_killed_run(self) -> None:
        """Publish the finished index that a killed run left behind, if there is one."""
        if self._staged.is_whole:
            self.publish()

    def publish(self) -> None:
        """Publish the finished index, with a link to its tokenizer unless something has its place; see `Staged`."""
        link, places = self.new / TOKENIZER_NAME, (self.new / TOKENIZER_NAME, self.folder / TOKENIZER_NAME)
        if (self.new / INNER / TOKENIZER_NAME).is_dir() and not any(map(os.path.lexists, places)):
            link.symlink_to(INNER + TOKENIZER_NAME)
        self._staged.publish()
        remove(self._path)

    def _published(self, _: Path) -> list[str]:
        """Index files in the folder, also those that no manifest names."""
        return [INNER + path.name for path in (self.folder / INNER).iterdir() if INDEX_FILE.fullmatch(path.name)]

    def _place(self, tar: str) -> Path:
        return self._path / f"{tar}.scan"
