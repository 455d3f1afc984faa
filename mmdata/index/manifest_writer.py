"""Writes manifests: each page when it is full, manifest.json last, so that a manifest.json names only whole pages."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdata.atomic import write_whole
from mmdata.errors import DataError
from mmdata.index.histogram import unpack_cells
from mmdata.index.manifest import Manifest
from mmdata.index.pages import PAGE_PATTERN, PAGE_SHARDS, Page, ShardEntry, encode_page, page_name
from mmdata.storage.folder import INNER, MANIFEST_NAME, LocalFolder, has_manifest
from mmdata.storage.listed import check_plain_name


@dataclass
class Totals:
    """Sums over entries: tar bytes, captions, labelled rows, and captions by length in tokens."""

    bytes: int = 0
    captions: int = 0
    labels: int = 0
    lengths: Counter[int] = field(default_factory=Counter[int])

    def add(self, entry: ShardEntry) -> None:
        """Add a shard."""
        self.bytes += entry.bytes
        self.captions += entry.captions
        self.labels += entry.labels
        tokens, _ = unpack_cells(entry.cells)
        for length, captions in zip(tokens.tolist(), entry.counts.tolist(), strict=True):
            self.lengths[length] += captions


class ManifestWriter:
    """Writes a manifest entry by entry into the sub-folder `__mmdata__`, which is made if missing.

    Pages that a killed run left are removed first.

    Args:
        folder: of shards, without a manifest: several pages cannot be replaced in one step.

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
        self._pages: list[Page] = []
        self._totals = Totals()

    def add(self, entry: ShardEntry) -> None:
        """Add the next shard.

        Raises:
            DataError: a name in the entry is not a plain file name.
        """
        for name in (entry.name, entry.index):
            check_plain_name(name, f"manifest of '{self._folder}'")
        self._entries.append(entry)
        self._totals.add(entry)
        if len(self._entries) == PAGE_SHARDS:
            self._write_page()

    def close(
        self, *, tokenizer: str | None = None, location: str = ".", accounts: dict[str, Any] | None = None
    ) -> Manifest:
        """Write manifest.json, which publishes the shards. The arguments are attributes of `Manifest`."""
        if self._entries:
            self._write_page()
        manifest = Manifest(
            rows=sum(page.rows for page in self._pages),
            bytes=self._totals.bytes,
            num_shards=sum(page.shards for page in self._pages),
            captions=self._totals.captions,
            lengths=sorted(self._totals.lengths.items()),
            has_labels=self._totals.labels > 0,
            pages=self._pages,
            tokenizer=tokenizer,
            location=location,
            accounts=accounts,
            folder=LocalFolder(self._folder),
        )
        write_whole(self._inner / MANIFEST_NAME, manifest.to_json())
        return manifest

    def abort(self) -> None:
        """Remove the pages that were written."""
        self._clear()
        with suppress(OSError):  # the folder holds something else
            self._inner.rmdir()

    def _clear(self) -> None:
        for path in self._inner.iterdir():
            if PAGE_PATTERN.fullmatch(path.name):
                path.unlink()

    def _write_page(self) -> None:
        data = encode_page(self._entries)
        name = page_name(len(self._pages))
        write_whole(self._inner / name, data)
        rows = sum(entry.rows for entry in self._entries)
        self._pages.append(Page(name, hashlib.sha256(data).hexdigest(), len(self._entries), rows))
        self._entries = []


def write_manifest(
    folder: str | os.PathLike[str],
    entries: Iterable[ShardEntry],
    *,
    tokenizer: str | None = None,
    location: str = ".",
    accounts: dict[str, Any] | None = None,
) -> Manifest:
    """Write a manifest of these entries; a failure leaves nothing of it. See `ManifestWriter`."""
    writer = ManifestWriter(folder)
    try:
        for entry in entries:
            writer.add(entry)
        return writer.close(tokenizer=tokenizer, location=location, accounts=accounts)
    except BaseException:
        writer.abort()
        raise
