"""Writes samples as shards with their index, where a test needs some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mmdata.index import Manifest, ShardEntry
from mmdata.index.encode import CountTokens, encode
from mmdata.index.writer import ManifestWriter, shard_name
from mmdata.storage.folder import has_manifest
from mmdata.tars.tar import END
from mmdata.tars.write import Sample, TarWriter, members_of, size_in_tar


class ShardWriter:
    """Writes shards (`000000.tar`, …), and their index and manifest when it is closed. A context manager.

    Args:
        folder: made if missing.
        shard_rows, shard_bytes: of a shard, at most.
        count_tokens, tokenizer: fill the column caption_tokens, and the tokenizer's fingerprint.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        shard_rows: int = 10_000,
        shard_bytes: int = 10**9,
        count_tokens: CountTokens | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self._folder, self._rows, self._bytes = Path(folder), shard_rows, shard_bytes
        self._count_tokens, self._tokenizer = count_tokens, tokenizer
        self._folder.mkdir(parents=True, exist_ok=True)
        self._manifest = ManifestWriter(self._folder)
        self._shard: TarWriter | None = None
        self._num_shards = 0

    def write(self, sample: Sample) -> None:
        """Add a sample to the current shard, or to a new one if that is full."""
        members = members_of(sample)
        size = size_in_tar(members) + len(END)
        if self._shard and (len(self._shard.rows) >= self._rows or self._shard.bytes + size > self._bytes):
            self._finish()
        self._shard = self._shard or TarWriter(self._folder / shard_name(self._num_shards))
        self._shard.add(sample, members)

    def close(self, accounts: dict[str, Any] | None = None) -> Manifest:
        """Write the manifest."""
        if self._shard:
            self._finish()
        return self._manifest.close(tokenizer=self._tokenizer, accounts=accounts)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and not has_manifest(self._folder):
            self.close()

    def _finish(self) -> None:
        shard = self._shard
        assert shard is not None
        columns, sha256 = encode(shard.rows, self._count_tokens), shard.finish()
        self._manifest.add(ShardEntry.of(columns, shard.path.name, size=shard.bytes, sha256=sha256), columns.data)
        self._shard, self._num_shards = None, self._num_shards + 1
