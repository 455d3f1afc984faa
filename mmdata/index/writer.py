"""Writes samples as shards with their index. The same samples give the same bytes; a failure publishes nothing."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mmdata.errors import DataError
from mmdata.files import Staged, lock, remove
from mmdata.index.encode import CountTokens, encode
from mmdata.index.manifest import Manifest
from mmdata.index.manifest_writer import ManifestWriter
from mmdata.index.pages import INDEX_FILE
from mmdata.index.tar_writer import Sample, TarWriter, members_of, size_in_tar
from mmdata.storage.folder import INNER, MANIFEST_NAME
from mmdata.tars.tar import END

STAGING_NAME = ".mmdata-staging"


class ShardWriter:
    """Writes shards (`000000.tar`, …), and their index and manifest (in `__mmdata__`).

    A context manager: an exception inside `with` publishes nothing. All files are staged in a hidden sub-folder and
    renamed in `close`; the next run removes what a killed run left.

    Args:
        folder: made if missing. It may hold other files, but no shard, index or manifest.
        shard_rows: largest number of samples in a shard.
        shard_bytes: largest size of a shard, unless a single sample is larger.
        count_tokens: fills the column caption_tokens; None leaves it empty.
        tokenizer: fingerprint of that tokenizer, kept in the manifest.

    Raises:
        DataError: the folder holds shards, or another writer is at work in it.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        shard_rows: int = 10_000,
        shard_bytes: int = 1_000_000_000,
        count_tokens: CountTokens | None = None,
        tokenizer: str | None = None,
    ) -> None:
        if shard_rows < 1 or shard_bytes < 1:
            raise ValueError(f"shard_rows and shard_bytes must be positive: got {shard_rows}, {shard_bytes}")
        self._folder = Path(folder)
        self._limits = (shard_rows, shard_bytes)
        self._count_tokens = count_tokens
        self._tokenizer = tokenizer
        self._num_shards = 0  # finished ones
        self._has_captions: bool | None = None  # of the first sample, and so of all
        self._shard: TarWriter | None = None
        self._staged = Staged(
            self._folder, self._folder / STAGING_NAME, last=INNER + MANIFEST_NAME, names=_names_of_folder
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._held = ExitStack()
        self._held.enter_context(lock(self._folder))
        try:
            self._retract()  # what a killed run has left
            _refuse_shards(self._folder)
            self._staged.new.mkdir()
            self._manifest = ManifestWriter(self._staged.new)
        except BaseException:
            self._held.close()
            raise

    def write(self, sample: Sample) -> None:
        """Add a sample to the current shard, or to a new one if that is full.

        Raises:
            BadSample: a caption that is empty or not text, or more JSON than MAX_CAPTION_BYTES.
            ValueError: a key that is not unique or that readers would split differently, a caption that is not clean,
                captions in some samples and none in others.
            OSError: the disk is full or broken.
        """
        members = members_of(sample)
        if self._has_captions is None:
            self._has_captions = bool(sample.captions)
        elif self._has_captions != bool(sample.captions):
            raise ValueError(
                f"sample '{sample.key}': {'has' if sample.captions else 'has no'} caption, unlike those before it; a "
                "folder of shards has captions for all samples or for none"
            )
        size = size_in_tar(members)
        shard_rows, shard_bytes = self._limits
        if self._shard and (len(self._shard.rows) >= shard_rows or self._shard.bytes + size + len(END) > shard_bytes):
            self._finish_shard()
        if self._shard is None:
            self._shard = TarWriter(self._staged.new / shard_name(self._num_shards))
        self._shard.add(sample, members)

    def close(self, accounts: dict[str, Any] | None = None) -> Manifest:
        """Publish all shards, the manifest last.

        Args:
            accounts: kept in the manifest; rows in, written, quarantined, …
        """
        try:
            if self._shard:
                self._finish_shard()
            manifest = self._manifest.close(tokenizer=self._tokenizer, accounts=accounts)
            self._staged.publish()
            remove(self._staged.new)
        except BaseException:
            self.abort()
            raise
        self._held.close()
        return manifest

    def abort(self) -> None:
        """Publish nothing: remove the staged files and release the folder's lock."""
        if self._shard:
            self._shard.discard()
        self._manifest.discard()
        if not (self._folder / INNER / MANIFEST_NAME).exists():
            self._retract()
        self._held.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._staged.new.exists():  # closed or aborted inside the block
            return
        if kind is None:
            self.close()
        else:
            self.abort()

    def _retract(self) -> None:
        self._staged.retract()
        with suppress(OSError):  # the folder does not exist, or is not empty
            (self._folder / INNER).rmdir()

    def _finish_shard(self) -> None:
        assert self._shard is not None
        shard, self._shard = self._shard, None
        encoded = encode(shard.rows, self._count_tokens)
        self._manifest.add(shard.finish(encoded), encoded.data)
        self._num_shards += 1


def shard_name(number: int) -> str:
    """File name of a shard's tar: 7 -> "000007.tar"."""
    return f"{number:06d}.tar"


def published_names(manifest: Manifest) -> list[str]:
    """Paths, relative to the folder, of what a `ShardWriter` publishes, manifest.json excepted."""
    # From manifest.json alone: a kill while files are moved may have moved the pages already.
    return [*map(shard_name, range(manifest.num_shards)), *(INNER + name for name in manifest.files)]


def _names_of_folder(folder: Path) -> list[str]:
    return published_names(Manifest.read(folder))


def _refuse_shards(folder: Path) -> None:
    inner = folder / INNER
    taken = sorted(path.name for path in folder.iterdir() if path.name.endswith(".tar"))
    taken += sorted(
        INNER + path.name
        for path in (inner.iterdir() if inner.is_dir() else ())
        if path.name == MANIFEST_NAME or INDEX_FILE.fullmatch(path.name)
    )
    if taken:
        raise DataError(
            f"folder '{folder}': already holds '{taken[0]}' ({len(taken)} such files); choose an empty folder"
        )
