"""Writes samples as shards with their index. The same samples give the same bytes; a failure publishes nothing."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mmdata.atomic import lock, sync_folder
from mmdata.errors import DataError
from mmdata.index.encode import CountTokens, encode
from mmdata.index.manifest import Manifest
from mmdata.index.manifest_writer import ManifestWriter
from mmdata.index.open_shard import OpenShard, Sample, members_of, size_in_tar
from mmdata.index.pages import INDEX_END, PAGE_PATTERN
from mmdata.storage.folder import INNER, MANIFEST_NAME, has_manifest
from mmdata.tars.tar import END

STAGING_NAME = ".mmdata-staging"


class ShardWriter:
    """Writes shards (`000000.tar`, …), an index file for each (`__mmdata__/000000.index.arrow`, …) and the manifest.

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
        self._shard: OpenShard | None = None
        self._staging = self._folder / STAGING_NAME
        self._folder.mkdir(parents=True, exist_ok=True)
        self._held = ExitStack()
        self._held.enter_context(lock(self._folder))
        try:
            _clear_killed_run(self._folder)
            _refuse_shards(self._folder)
            self._staging.mkdir()
            self._manifest = ManifestWriter(self._staging)
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
            self._shard = OpenShard(self._staging / shard_names(self._num_shards)[0])
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
            # The staging folder has a manifest now. After a kill it says which of the renamed files to remove.
            inner = self._folder / INNER
            inner.mkdir(exist_ok=True)
            for name in published_names(manifest):
                os.rename(self._staging / name, self._folder / name)
            sync_folder(inner)
            sync_folder(self._folder)
            os.rename(self._staging / INNER / MANIFEST_NAME, inner / MANIFEST_NAME)
            sync_folder(inner)
            (self._staging / INNER).rmdir()
            self._staging.rmdir()
        except BaseException:
            self.abort()
            raise
        self._held.close()
        return manifest

    def abort(self) -> None:
        """Publish nothing: remove the staged files and release the folder's lock."""
        if self._shard:
            self._shard.discard()
        if not (self._folder / INNER / MANIFEST_NAME).exists():
            _clear_killed_run(self._folder)
        self._held.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._staging.exists():  # closed or aborted inside the block
            return
        if kind is None:
            self.close()
        else:
            self.abort()

    def _finish_shard(self) -> None:
        assert self._shard is not None
        shard, self._shard = self._shard, None
        self._manifest.add(shard.finish(encode(shard.rows, self._count_tokens)))
        self._num_shards += 1


def shard_names(number: int) -> tuple[str, str]:
    """File names of a shard's tar and index: 7 -> "000007.tar", "000007.index.arrow"."""
    return f"{number:06d}.tar", f"{number:06d}.index.arrow"


def published_names(manifest: Manifest) -> list[str]:
    """Paths, relative to the folder, of what a `ShardWriter` publishes, manifest.json excepted."""
    # From manifest.json alone: a kill while files are moved may have moved the pages already.
    names: list[str] = []
    for number in range(manifest.num_shards):
        tar, index = shard_names(number)
        names += [tar, INNER + index]
    return names + [INNER + page.file for page in manifest.pages]


def _clear_killed_run(folder: Path) -> None:
    """Remove the staging folder, and the shards that its manifest names: a kill between renames left them."""
    staging = folder / STAGING_NAME
    if not staging.exists():
        return
    if has_manifest(staging):
        for name in published_names(Manifest.read(staging)):
            (folder / name).unlink(missing_ok=True)
    shutil.rmtree(staging)
    with suppress(OSError):  # the folder does not exist, or is not empty
        (folder / INNER).rmdir()


def _refuse_shards(folder: Path) -> None:
    inner = folder / INNER
    taken = sorted(path.name for path in folder.iterdir() if path.name.endswith(".tar"))
    taken += sorted(
        INNER + path.name
        for path in (inner.iterdir() if inner.is_dir() else ())
        if path.name.endswith(INDEX_END) or path.name == MANIFEST_NAME or PAGE_PATTERN.fullmatch(path.name)
    )
    if taken:
        raise DataError(
            f"folder '{folder}': already holds '{taken[0]}' ({len(taken)} such files); choose an empty folder"
        )
