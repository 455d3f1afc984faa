"""Adds caption lengths to an index that has none. Only captions are read, and compared with the index."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmdata.errors import ConfigError
from mmdata.index.caption_lengths import captions_of_rows
from mmdata.index.encode import CountTokens, with_tokens
from mmdata.index.index import Index
from mmdata.index.manifest import Manifest
from mmdata.index.manifest_writer import ManifestWriter
from mmdata.index.staging import TOKENIZER_NAME, IndexStaging
from mmdata.index.store import ShardStore
from mmdata.storage.cache import ShardCache
from mmdata.storage.folder import INNER, QUARANTINE_NAME, LocalFolder, find_ledger, folder_of_index, has_manifest
from mmdata.tars.members import Members

if TYPE_CHECKING:
    from mmdata.index.tars import Tars
    from mmdata.progress import Progress


def lacks_lengths_only(
    folder: Path, tars: Tars, tokenizer: str | None, make_tokenizer: object, members: Members | None
) -> bool:
    """Whether the folder has an index of these tars, as large as they are now, which nobody has counted yet.

    With `members`, the index must be of these.
    """
    if (tokenizer is None and make_tokenizer is None) or not has_manifest(folder):
        return False
    manifest = Manifest.read(folder)
    listed = [(entry.name, entry.bytes) for entry in manifest]
    if members is not None and members != manifest.members:
        return False
    return manifest.tokenizer is None and listed == list(zip(tars.names, tars.sizes, strict=True))


def add_lengths(
    folder: Path,
    staging: IndexStaging,
    count_tokens: CountTokens | None,
    tokenizer: str | None,
    make_tokenizer: Callable[[Iterable[str], Path], tuple[CountTokens, str]] | None,
    *,
    location: str,
    progress: Progress | None = None,
    cache: ShardCache | None = None,
) -> Manifest:
    """Count the captions of an index, and publish the index with their lengths in place of the one without.

    Args:
        folder: of the index.
        staging: of that folder.
        count_tokens, tokenizer, make_tokenizer: see `build_index`.
        location: of the tars, relative to `folder`; they may have been moved since they were indexed.
        progress: called with (bytes of shards done, bytes in all).
        cache: for tars behind URLs, which are fetched again.

    Raises:
        ConfigError: the corpus has labels only.
        DataError: a caption is not the one that was indexed.
    """
    tars = folder_of_index(LocalFolder(folder), location, cache)
    manifest = replace(Manifest.read(folder, cache), location=location, folder=tars)
    if not manifest.has_captions:
        raise ConfigError(
            f"shards '{folder}': {manifest.rows:,} rows with labels and no captions, so there is nothing to tokenize: "
            "leave --tokenizer out, and data.tokenizer in the config; or make captions of the class names with "
            '`mmdata convert SOURCE OUT --caption-template "a photo of a {}."`'
        )
    index = Index(manifest)
    store = ShardStore(index)
    new = staging.make_new()
    writer = ManifestWriter(new)
    if make_tokenizer is not None:
        count_tokens, tokenizer = make_tokenizer(_all_captions(index, store), new / INNER / TOKENIZER_NAME)
    assert count_tokens is not None
    done = 0
    for shard, entry in enumerate(manifest):
        encoded = with_tokens(index.shard(shard), count_tokens(_captions(index, store, shard)))
        writer.add(encoded.entry(entry.name, size=entry.bytes, sha256=entry.sha256), encoded.data)
        done += entry.bytes
        if progress:
            progress(done, manifest.bytes)
    if (ledger := find_ledger(folder)).is_file():
        shutil.copy(ledger, new / INNER / QUARANTINE_NAME)
    writer.close(tokenizer=tokenizer, location=manifest.location, accounts=manifest.accounts)
    staging.publish()
    return Manifest.read(folder)


def _all_captions(index: Index, store: ShardStore) -> Iterator[str]:
    for shard in range(index.num_shards):
        yield from _captions(index, store, shard)


def _captions(index: Index, store: ShardStore, shard: int) -> list[str]:
    rows = range(int(index.starts[shard]), int(index.starts[shard + 1]))
    return captions_of_rows(index, store, rows)
