"""What an index in progress has read of each tar, kept on disk, so that a run that ended early is not repeated.

What was read is used again only for a tar of the same size and modification time, or of the same URL, read with the
same settings. The folder also holds the finished index before it is published: a run that was killed while files were
moved is finished by the next one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmdata.errors import DamagedShard, DataError, Reason
from mmdata.files import Staged, link_inside, remove
from mmdata.index.columns import ShardColumns
from mmdata.index.encode import columns_of
from mmdata.index.manifest import INDEX_FILE, Manifest
from mmdata.index.side import read_columns, write_columns
from mmdata.storage.folder import INNER, MANIFEST_NAME
from mmdata.tars.scan import IndexRow, Scan, ScannedSample
from mmdata.tars.texts import Loss

STAGING_NAME = ".mmdata-index"
VERSION = 8
"""Of the staged files; raise it when a reader of samples changes what it finds."""
TOKENIZER_NAME = "tokenizer"
"""Name of a trained tokenizer: a link to the folder of this name in `__mmdata__`, as a conversion makes it."""


@dataclass(frozen=True)
class ReadTar:
    """What was read of a tar.

    Attributes:
        scan: its samples. Of their rows, one that was kept on disk has the keys and captions alone.
        columns: of all samples, also those that cannot be used.
        sha256, bytes: of the whole file.
    """

    scan: Scan
    columns: ShardColumns
    sha256: str
    bytes: int

    @property
    def usable(self) -> ShardColumns:
        """The columns of the usable samples."""
        usable = [sample.fault is None for sample in self.scan.samples]
        # Filtering imports pandas where it is installed.
        return self.columns if all(usable) else columns_of(self.columns.arrow.filter(pa.array(usable)))


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
        samples: list[ScannedSample] = []
        for key, captions, start, label, losses, fault, *has in head["samples"]:
            losses = {Loss(loss): detail for loss, detail in losses.items()}
            fault = fault and (Reason(fault[0]), fault[1])
            samples.append(ScannedSample(IndexRow(key, captions=captions), start, label, losses, fault, *has))
        damage = head["damage"] and DamagedShard(*head["damage"])
        batch = pa.record_batch([column.combine_chunks() for column in table.columns], schema=table.schema)
        scan = Scan(tar, samples, head["ignored"], damage)
        return ReadTar(scan, columns_of(batch), head["sha256"], head["bytes"])

    def save(self, tar: str, identity: dict[str, Any], read: ReadTar) -> None:
        """Keep what was read of a tar; `identity` is all that decided it, as JSON, found before the tar was read."""
        self._path.mkdir(exist_ok=True)
        scan = read.scan
        head = {
            "of": {"version": VERSION, **identity},
            "samples": [(row.key, row.captions, *others) for row, *others in scan.samples],
            "ignored": scan.ignored,
            "damage": scan.damage and [scan.damage.what, scan.damage.remedy],
            "sha256": read.sha256,
            "bytes": read.bytes,
        }
        try:
            write_columns(self._place(tar), head, read.columns.arrow)
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
            link_inside(link, INNER + TOKENIZER_NAME)
        self._staged.publish()
        remove(self._path)
        return Manifest.read(self.folder)

    def _published(self, _: Path) -> list[str]:
        """Index files in the folder, also those that no manifest names."""
        return [INNER + path.name for path in (self.folder / INNER).iterdir() if INDEX_FILE.fullmatch(path.name)]

    def _place(self, tar: str) -> Path:
        return self._path / f"{tar}.scan"
