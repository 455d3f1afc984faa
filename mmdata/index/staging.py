"""What an index in progress has read of each tar, kept on disk, so that a run that ended early is not repeated.

What was read is used again only for a tar of the same size and modification time, or of the same URL, read with the
same settings. The folder also holds the finished index before it is published: a run that was killed while files were
moved is finished by the next one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mmdata.atomic import sync_folder, write_whole
from mmdata.errors import DamagedShard, DataError
from mmdata.index.columns import SCHEMA, ShardColumns
from mmdata.index.encode import columns_of, encode
from mmdata.index.manifest import INDEX_FILE, Manifest
from mmdata.index.side import read_columns, write_columns
from mmdata.storage.folder import INNER, MANIFEST_NAME, has_manifest
from mmdata.tars.members import Members
from mmdata.tars.row import IndexedMember, IndexRow
from mmdata.tars.scan import Edge, Scan
from mmdata.tars.texts import Loss

STAGING_NAME = ".mmdata-index"
GUESS_NAME = "members.json"
VERSION = 6
"""Of the staged files; raise it when a reader of samples changes what it finds."""
TOKENIZER_NAME = "tokenizer"
"""Name of a trained tokenizer: a link to the folder of this name in `__mmdata__`, as a conversion makes it."""

_TEXTS = {"captions": pa.list_(pa.string()), "label_name": pa.string(), "start": pa.int64()}
"""Columns of the rows that are read of a tar, besides those of the index."""


class TarFacts(NamedTuple):
    """What was found in a tar.

    Attributes:
        scan: its samples, without their rows.
        rows: how many usable ones there are.
        has_captions, has_mute, may_lack_images: see `Scan`.
        sha256, bytes: of the whole file.
    """

    scan: Scan
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
        return cls(replace(scan, rows=[], starts=[], labels=[], imageless=[]), len(scan.rows), *has, sha256, size)

    def content(self) -> dict[str, Any]:
        """The facts as JSON; `from_content` is the inverse."""
        return {**self._asdict(), "scan": {**asdict(self.scan), "damage": self.damage and self.damage.__reduce__()[1]}}

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> TarFacts:
        """The facts of which `content` is the JSON."""
        scan = dict(content["scan"])
        scan["losses"] = [(key, {Loss(loss): detail for loss, detail in lost.items()}) for key, lost in scan["losses"]]
        scan["edges"] = [Edge(*edge) for edge in scan["edges"]]
        scan["damage"] = scan["damage"] and DamagedShard(*scan["damage"])
        return cls(Scan(**scan), *(content[name] for name in cls._fields[1:]))

    @property
    def damage(self) -> DamagedShard | None:
        """See `Scan`."""
        return self.scan.damage


@dataclass(frozen=True)
class ReadTar:
    """What was read of a tar.

    Attributes:
        facts: about it.
        table: an Arrow record batch of its usable samples, and of those without an image behind them: the columns of
            the index, and captions, names of classes and offsets.
    """

    facts: TarFacts
    table: Any

    @classmethod
    def of(cls, scan: Scan, sha256: str, size: int) -> ReadTar:
        """A tar that was scanned."""
        rows = [*scan.rows, *scan.imageless]
        rest = [None] * len(scan.imageless)
        names = [label if isinstance(label, str) else None for label in scan.labels]
        more = ([row.captions for row in rows], [*names, *rest], [*scan.starts, *rest])
        table: Any = encode(rows).arrow
        for values, (name, kind) in zip(more, _TEXTS.items(), strict=True):
            table = table.append_column(name, pa.array(values, kind))
        return cls(TarFacts.of(scan, sha256, size), table)

    def in_corpus(self, name: str, members: Members, *, has_captions: bool, lacks_images: bool) -> ReadTar:
        """The tar of this name, as the whole corpus decides: see `Scan`."""
        if lacks_images:
            scan = self._scan().in_corpus_without_images()
        elif has_captions and self.facts.has_mute:
            scan = self._scan().in_captioned_corpus(name, members)
        else:
            return self
        return ReadTar.of(scan, self.facts.sha256, self.facts.bytes)

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
    def _usable(self) -> Any:
        return self.table.slice(0, self.facts.rows)

    def _scan(self) -> Scan:
        """What `of` was given."""
        count = self.facts.rows
        rows = [_row_of(values) for values in self.table.select(IndexRow._fields).to_pylist()]
        starts = self.table.column("start").to_pylist()[:count]
        return replace(self.facts.scan, rows=rows[:count], starts=starts, labels=[*self.labels], imageless=rows[count:])


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
        if self.new.exists():
            shutil.rmtree(self.new)
        self.new.mkdir(parents=True)
        return self.new

    def finish_killed_run(self) -> None:
        """Publish the finished index that a killed run left behind, if there is one."""
        if has_manifest(self.new):
            self.publish()

    def publish(self) -> None:
        """Move the finished index into the folder, manifest.json last, and remove this folder.

        An index that is replaced loses its manifest.json first. So at any moment the folder has the manifest of the old
        index, none, or that of the new one, never one whose files are another's.
        """
        made, inner = self.new / INNER, self.folder / INNER
        inner.mkdir(exist_ok=True)
        self._retire_published()
        for path in sorted(made.iterdir()):
            if path.name != MANIFEST_NAME:
                if (inner / path.name).is_dir():
                    shutil.rmtree(inner / path.name)
                os.replace(path, inner / path.name)
        sync_folder(inner)
        if (inner / TOKENIZER_NAME).is_dir() and not os.path.lexists(self.folder / TOKENIZER_NAME):
            (self.folder / TOKENIZER_NAME).symlink_to(INNER + TOKENIZER_NAME)
        os.replace(made / MANIFEST_NAME, inner / MANIFEST_NAME)
        sync_folder(inner)
        with suppress(FileNotFoundError):
            shutil.rmtree(self._path)

    def _retire_published(self) -> None:
        """Remove the manifest of an index that is replaced, and then its files that do not get a successor."""
        inner, following = self.folder / INNER, Manifest.read(self.new).files
        (inner / MANIFEST_NAME).unlink(missing_ok=True)
        for path in inner.iterdir():
            if INDEX_FILE.fullmatch(path.name) and path.name not in following:
                path.unlink()

    def _place(self, tar: str) -> Path:
        return self._path / f"{tar}.scan"


def _row_of(values: dict[str, Any]) -> IndexRow:
    values["members"] = [IndexedMember(**member) for member in values["members"]]
    return IndexRow(**values)
