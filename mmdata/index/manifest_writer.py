"""Writes manifests with their index files: manifest.json last, so that it names only whole files."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmdata.errors import DataError
from mmdata.files import end_file, naming, write_whole
from mmdata.hashing import file_sha256
from mmdata.index.columns import SCHEMA
from mmdata.index.histogram import unpack_cells
from mmdata.index.manifest import Manifest
from mmdata.index.pages import INDEX_FILE, PAGE_SHARDS, ManifestPage, ShardEntry, encode_page, page_name
from mmdata.storage.folder import INNER, MANIFEST_NAME, LocalFolder, has_manifest
from mmdata.storage.urls import check_plain_name


@dataclass
class Totals:
    """Sums over entries: tar bytes, rows, images, captions, labelled rows, and captions by length in tokens."""

    bytes: int = 0
    rows: int = 0
    images: int = 0
    captions: int = 0
    labels: int = 0
    lengths: Counter[int] = field(default_factory=Counter[int])

    def fields(self) -> dict[str, Any]:
        """What manifest.json says of all shards together."""
        return {
            "rows": self.rows,
            "bytes": self.bytes,
            "captions": self.captions,
            "lengths": sorted(self.lengths.items()),
            "has_images": self.images > 0 or self.rows == 0,
            "has_labels": self.labels > 0,
        }

    def add(self, entry: ShardEntry) -> None:
        """Add a shard."""
        self.bytes += entry.bytes
        self.rows += entry.rows
        self.images += entry.images
        self.captions += entry.captions
        self.labels += entry.labels
        tokens, _ = unpack_cells(entry.cells)
        for length, captions in zip(tokens.tolist(), entry.counts.tolist(), strict=True):
            self.lengths[length] += captions


class ManifestWriter:
    """Writes a manifest and its index files shard by shard into the sub-folder `__mmdata__`, which is made if missing.

    Pages and index files that a killed run left are removed first.

    Args:
        folder: of shards, without a manifest: several files cannot be replaced in one step.

    Raises:
        DataError: the folder has a manifest.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        if has_manifest(self._folder):
            raise DataError(f"folder '{folder}': already holds {INNER}{MANIFEST_NAME}; remove it first")
        self._inner = self._folder / INNER
        self._inner.mkdir(exist_ok=True)
        self._clear()
        self._entries: list[ShardEntry] = []
        self._index: _IndexFile | None = None  # of these entries
        self._pages: list[ManifestPage] = []
        self._totals = Totals()

    def add(self, entry: ShardEntry, columns: bytes) -> None:
        """Add the next shard: its entry, whose place in an index file does not matter, and `Encoded.data`.

        Raises:
            DataError: a name in the entry is not a plain file name.
            OSError: the disk is full or broken.
        """
        check_plain_name(entry.name, f"manifest of '{self._folder}'")
        if self._index is None:
            self._index = _IndexFile(self._inner / f"index-{len(self._pages):05d}.arrow")
        self._entries.append(replace(entry, index_offset=self._index.add(columns)))
        self._totals.add(entry)
        if len(self._entries) == PAGE_SHARDS:
            self._write_page()

    def finish(
        self, *, tokenizer: str | None = None, location: str = ".", accounts: dict[str, Any] | None = None
    ) -> Manifest:
        """Write all but manifest.json. The arguments are attributes of `Manifest`."""
        if self._entries:
            self._write_page()
        return Manifest(
            **self._totals.fields(),
            num_shards=sum(page.shards for page in self._pages),
            pages=self._pages,
            tokenizer=tokenizer,
            location=location,
            accounts=accounts,
            folder=LocalFolder(self._folder),
        )

    def publish(self, manifest: Manifest) -> Manifest:
        """Write manifest.json, which publishes the shards; returns it."""
        write_whole(self._inner / MANIFEST_NAME, manifest.to_json())
        return manifest

    def close(
        self, *, tokenizer: str | None = None, location: str = ".", accounts: dict[str, Any] | None = None
    ) -> Manifest:
        """`finish`, and then `publish`."""
        return self.publish(self.finish(tokenizer=tokenizer, location=location, accounts=accounts))

    def discard(self) -> None:
        """Close the file that is being written; what was written is the caller's to remove."""
        if self._index is not None:
            self._index.discard()

    def abort(self) -> None:
        """Remove what was written."""
        self.discard()
        self._clear()
        with suppress(OSError):  # the folder holds something else
            self._inner.rmdir()

    def _clear(self) -> None:
        for path in self._inner.iterdir():
            if INDEX_FILE.fullmatch(path.name):
                path.unlink()

    def _write_page(self) -> None:
        assert self._index is not None
        self._index.finish()
        index, name = self._index.path, page_name(len(self._pages))
        data = encode_page(self._entries)
        write_whole(self._inner / name, data)
        page = ManifestPage(
            file=name,
            sha256=hashlib.sha256(data).hexdigest(),
            shards=len(self._entries),
            rows=sum(entry.rows for entry in self._entries),
            index_bytes=index.stat().st_size,
            index_sha256=file_sha256(index),
        )
        assert index.name == page.index
        self._pages.append(page)
        self._entries, self._index = [], None


class _IndexFile:
    """An Arrow IPC file with a record batch a shard, while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("xb")
        self._writer = pa.ipc.new_file(self._file, SCHEMA)

    def add(self, columns: bytes) -> int:
        """Write the columns of the next shard; returns their offset."""
        with naming(self.path):
            self._writer.write_batch(pa.ipc.read_record_batch(pa.py_buffer(columns), SCHEMA))
            return self._file.tell() - len(columns)

    def finish(self) -> None:
        """End the file, which is on disk when this returns."""
        with naming(self.path):
            self._writer.close()
            end_file(self._file)

    def discard(self) -> None:
        """Close the file, and remove it."""
        with suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
            self._file.close()
        self.path.unlink(missing_ok=True)
