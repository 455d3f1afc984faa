"""Writes index files and their manifest, which is last, so that it names only whole files."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from mmdata.errors import DataError
from mmdata.files import naming, write_whole
from mmdata.index.columns import SCHEMA, unpack_cells
from mmdata.index.manifest import (
    FILE_SHARDS,
    INDEX_FILE,
    STREAM_END,
    IndexFile,
    Manifest,
    ShardEntry,
    encode_list,
    index_name,
)
from mmdata.storage.folder import INNER, MANIFEST_NAME, LocalFolder, has_manifest
from mmdata.storage.urls import check_plain_name


def shard_name(number: int) -> str:
    """File name of a shard's tar: 7 -> "000007.tar"."""
    return f"{number:06d}.tar"


class Totals:
    """Sums over entries, and the captions by length in tokens."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._lengths: Counter[int] = Counter()

    def add(self, entry: ShardEntry) -> None:
        """Add a shard."""
        self._sums["num_shards"] += 1
        for name in ("bytes", "rows", "images", "captions", "labels"):
            self._sums[name] += getattr(entry, name)
        tokens, _ = unpack_cells(entry.cells)
        for length, captions in zip(tokens.tolist(), entry.counts.tolist(), strict=True):
            self._lengths[length] += captions

    def fields(self) -> dict[str, Any]:
        """What manifest.json says of all shards together."""
        sums = self._sums
        return {
            **{name: sums[name] for name in ("num_shards", "rows", "bytes", "captions")},
            "lengths": sorted(self._lengths.items()),
            "has_images": sums["images"] > 0 or sums["rows"] == 0,
            "has_labels": sums["labels"] > 0,
        }


class ManifestWriter:
    """Writes a manifest and its index files shard by shard into the sub-folder `__mmdata__`, which is made if missing.

    Index files that a killed run left are removed first.

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
        for path in self._inner.iterdir():
            if INDEX_FILE.fullmatch(path.name):
                path.unlink()
        self._entries: list[ShardEntry] = []  # of the file that is being written
        self._file: BinaryIO | None = None
        self._files: list[IndexFile] = []
        self._totals = Totals()

    def add(self, entry: ShardEntry, columns: bytes | memoryview) -> None:
        """Add the next shard: its entry, whose place in an index file does not matter, and `ShardColumns.data`.

        Raises:
            DataError: a name in the entry is not a plain file name.
            OSError: the disk is full or broken.
        """
        check_plain_name(entry.name, f"manifest of '{self._folder}'")
        with naming(self._path):
            if self._file is None:
                self._file = self._path.open("xb")
                self._file.write(SCHEMA.serialize())
            self._entries.append(replace(entry, index_offset=self._file.tell()))
            self._file.write(columns)
        self._totals.add(entry)
        if len(self._entries) == FILE_SHARDS:
            self._finish_file()

    def close(
        self, *, tokenizer: str | None = None, location: str = ".", accounts: dict[str, Any] | None = None
    ) -> Manifest:
        """Write manifest.json, which publishes the shards; returns it. The arguments are its attributes."""
        if self._file is not None:
            self._finish_file()
        manifest = Manifest(
            **self._totals.fields(),
            index_files=self._files,
            tokenizer=tokenizer,
            location=location,
            accounts=accounts,
            folder=LocalFolder(self._folder),
        )
        write_whole(self._inner / MANIFEST_NAME, manifest.to_json())
        return manifest

    def discard(self) -> None:
        """Remove the file that is being written; what was written before is the caller's to remove."""
        if self._file is not None:
            with suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
                self._file.close()
            self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self._inner / index_name(len(self._files))

    def _finish_file(self) -> None:
        """Write the list of the shards behind their columns; the file is on disk when this returns."""
        assert self._file is not None
        data = encode_list(self._entries)
        with naming(self._path):
            self._file.write(STREAM_END)
            list_offset = self._file.tell()
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._files.append(IndexFile(list_offset + len(data), list_offset, hashlib.sha256(data).hexdigest()))
        self._entries, self._file = [], None
