"""Writes manifests: pages as they fill, manifest.json last. A folder with manifest.json has all the pages it names."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmdata.atomic import write_whole
from mmdata.errors import DataError
from mmdata.shards.folder import INNER, MANIFEST_NAME, LocalFolder, manifest_prefix
from mmdata.shards.histogram import unpack_cells
from mmdata.shards.manifest import Manifest
from mmdata.shards.pages import (
    PAGE_PATTERN,
    PAGE_SHARDS,
    Page,
    ShardEntry,
    check_plain_name,
    encode_page,
    page_name,
)


class ManifestWriter:
    """Writes a manifest entry by entry: a page whenever one is full, `manifest.json` in `close`.

    They lie in the sub-folder `__mmdata__`, which is made when missing. Where that has no `manifest.json` it may hold
    pages that a killed run left; they are cleared.

    Args:
        folder: of shards; it may hold no manifest, since pages cannot be replaced at one stroke.

    Raises:
        DataError: it holds one.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        if (prefix := manifest_prefix(self._folder)) is not None:
            raise DataError(f"folder '{folder}': already holds {prefix}{MANIFEST_NAME}; remove it first")
        self._inner = self._folder / INNER
        self._inner.mkdir(exist_ok=True)
        self._clear()
        self._entries: list[ShardEntry] = []
        self._pages: list[Page] = []
        self._totals = dict.fromkeys(("bytes", "captions", "labels"), 0)
        self._lengths: Counter[int] = Counter()

    def add(self, entry: ShardEntry) -> None:
        """Add the next shard.

        Raises:
            DataError: a name that `Manifest` would not follow.
        """
        for name in (entry.name, entry.index):
            check_plain_name(name, f"manifest of '{self._folder}'")
        self._entries.append(entry)
        for name in self._totals:
            self._totals[name] += getattr(entry, name)
        tokens, _ = unpack_cells(entry.cells)
        for length, captions in zip(tokens.tolist(), entry.counts.tolist(), strict=True):
            self._lengths[length] += captions
        if len(self._entries) == PAGE_SHARDS:
            self._write_page()

    def close(
        self, *, tokenizer: str | None = None, location: str = ".", accounts: dict[str, Any] | None = None
    ) -> Manifest:
        """Publish: from here on the folder has a manifest. The arguments are the attributes of `Manifest`."""
        if self._entries:
            self._write_page()
        manifest = Manifest(
            rows=sum(page.rows for page in self._pages),
            bytes=self._totals["bytes"],
            num_shards=sum(page.shards for page in self._pages),
            captions=self._totals["captions"],
            lengths=sorted(self._lengths.items()),
            has_labels=self._totals["labels"] > 0,
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
        with suppress(OSError):  # it holds something else
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
    """Write a manifest of entries that are all known; a failure leaves none of it. See `ManifestWriter`."""
    writer = ManifestWriter(folder)
    try:
        for entry in entries:
            writer.add(entry)
        return writer.close(tokenizer=tokenizer, location=location, accounts=accounts)
    except BaseException:
        writer.abort()
        raise
