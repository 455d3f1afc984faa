"""Indexes foreign tars, which are only read. Samples in the tars = indexed + quarantined."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmdata.errors import ConfigError, DataError, counted
from mmdata.files import lock, write_whole
from mmdata.images.probe import DEFAULT_LIMITS, Limits
from mmdata.index.builder import Builder, Counting, MakeTokenizer, TarReader, nothing_to_tokenize
from mmdata.index.encode import CountTokens
from mmdata.index.index import Index
from mmdata.index.manifest import Manifest, ShardEntry
from mmdata.index.staging import IndexStaging
from mmdata.index.store import ShardStore
from mmdata.index.tars import LocalTars, Tars, UrlTars, find_urls, what_changed
from mmdata.index.writer import ManifestWriter
from mmdata.progress import Bar, Progress
from mmdata.storage.cache import ShardCache
from mmdata.storage.folder import (
    INNER,
    MANIFEST_NAME,
    QUARANTINE_NAME,
    find_ledger,
    has_manifest,
    local_folder,
)
from mmdata.storage.urls import display_name, is_url
from mmdata.tars.members import USUAL, Members
from mmdata.tars.texts import Loss


@dataclass(frozen=True)
class IndexReport:
    """Result of `build_index`.

    Attributes:
        folder: its sub-folder `__mmdata__` holds index, manifest and quarantine list.
        manifest: as written.
        accounts: samples = indexed + quarantined, each counted independently; ignored_members (without an extension,
            `__meta__`) belong to no sample. "lost", if present, counts indexed samples with an unusable text member;
            "classes", if labels are names, lists the names by class number.
        lost: place and detail of the first loss of each kind.
        quarantined: an entry for each sample left out: shard, key, offset, reason, detail.
        guessed: whether the members of captions were guessed (`manifest.members`).
        only_counted: whether the index existed, and only got the lengths of its captions.
        unchanged: whether the index of these tars existed.
        cached: tars that are in the cache; None if they were not to be kept there.
    """

    folder: Path
    manifest: Manifest
    accounts: dict[str, Any]
    lost: dict[Loss, str] = field(default_factory=dict["Loss", str])
    quarantined: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    guessed: bool = False
    only_counted: bool = False
    unchanged: bool = False
    cached: int | None = None


Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A folder of tars, a tar, a URL or brace pattern of tars, or several of the last two."""


def build_index(
    source: Source,
    *,
    out: str | os.PathLike[str] | None = None,
    count_tokens: CountTokens | None = None,
    tokenizer: str | None = None,
    make_tokenizer: MakeTokenizer | None = None,
    limits: Limits = DEFAULT_LIMITS,
    members: Members | None = None,
    max_bad_share: float = 0.05,
    skip_damaged: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    cache: ShardCache | None = None,
    fill_cache: bool = False,
    num_workers: int | None = None,
) -> IndexReport:
    """Write index, manifest and quarantine list for a folder of tars, or for one tar.

    Memory holds the rows of one shard at a time, in each process. What is read of each tar is kept until the index is
    published, so a run that failed or was killed is continued by the next one. An index that exists is left alone if it
    is of the same tars, whatever `limits` it was made with, and is an error otherwise: hashes are compared, and of tars
    behind URLs the sizes. If it has no caption lengths it gets those of the tokenizer, for which only captions are
    read.

    Samples with a label and no caption are indexed if no sample of the corpus has a caption, and quarantined otherwise.

    Args:
        source: folder (its `*.tar`, sorted by name) or a tar; or URLs and brace patterns of tars, which are
            fetched into the cache one after another; or the folder of an index of URLs.
        out: folder in whose `__mmdata__` the files are written; default: the folder of the tars. Needed for URLs.
        count_tokens: counts the tokens of captions; None: their lengths are not in the index.
        tokenizer: fingerprint of that tokenizer, kept in the manifest.
        make_tokenizer: trains the tokenizer on the captions that were read, in place of the two.
        limits: images outside them are quarantined.
        members: which members are image, caption and label; None: the usual ones, or, where the first samples have no
            caption in them, the only one of the names that known corpora use (see `guess_captions`). The manifest keeps
            them.
        max_bad_share: largest share of quarantined samples.
        skip_damaged: index the samples before the damage of a damaged tar. They are counted, and the manifest names
            each damaged tar; without it all damaged tars are listed in one error.
        overwrite: read all tars, and replace an index that exists.
        progress: called with (bytes done, bytes in all).
        cache: for tars behind URLs, which holds those that are being read; default: that of the loader.
        fill_cache: keep the tars behind URLs that are read in the cache, as many as it holds.
        num_workers: processes that read the tars of a folder; None takes one for each core from 256 MB of tars on. The
            index is the same.

    Raises:
        DataError: no tar, damaged ones, a sample split over two, another manifest in `out`, or too many samples
            quarantined; nothing is published then.
        ConfigError: URLs that are not those of tars, or no `out` for them; or a tokenizer, and a corpus of labels only.
        OSError: `out` cannot be written; raised before any shard is read.
    """
    given = source if isinstance(source, (str, os.PathLike)) and not is_url(source) else None
    cache = cache or ShardCache()
    tars, folder = _find_tars(source, out, cache, fill_cache=fill_cache)
    location = tars.location(folder)
    counting = Counting(count_tokens, tokenizer, make_tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        _refuse_a_conversions_ledger(folder, overwrite=overwrite)
        staging = IndexStaging(folder)
        staging.finish_killed_run()
        known = None
        if has_manifest(folder) and not overwrite:
            known = Manifest.read(folder, cache)
            _check_same(known, tars, members, counting, progress)
            _check_losses(known, skip_damaged=skip_damaged, max_bad_share=max_bad_share)
        if known is not None and (known.tokenizer is not None or counting.tokenizer is None):
            report = IndexReport(folder, known.moved(location), dict(known.accounts or {}), unchanged=True)
        elif known is not None:
            known = replace(known, location=location)
            manifest = _add_lengths(folder, staging, known, counting, progress)
            report = IndexReport(folder, manifest, dict(manifest.accounts or {}), only_counted=True)
        else:
            before = _index_before(given, folder)
            found = members or (before.members if before is not None else tars.guess_members())
            classes = (before.accounts or {}).get("classes") if before is not None else None
            build = Builder(TarReader(tars, staging, limits, found, skip_damaged), classes)
            build.read(progress, num_workers)
            build.check(max_bad_share)
            manifest = build.publish(location, counting)
            guessed = members is None and found != USUAL
            report = IndexReport(
                folder, manifest, build.accounts, build.losses.first, build.quarantined, guessed=guessed
            )
    if not fill_cache:
        return report
    return replace(report, cached=sum(cache.touch(entry.sha256) for entry in report.manifest))


def _find_tars(
    source: Source, out: str | os.PathLike[str] | None, cache: ShardCache, *, fill_cache: bool
) -> tuple[Tars, Path]:
    """The tars, and the folder for their index."""
    given = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    if not any(map(is_url, given)):
        if len(given) != 1:
            raise ConfigError(f"{len(given)} paths given, such as '{given[0]}': give the folder that holds the tars")
        if (known := _index_of_urls(local_folder(given[0]))) is not None:
            tars = UrlTars(known.location, [entry.name for entry in known], cache, keep=fill_cache)
            return tars, Path(out or local_folder(given[0]))
        if fill_cache:
            raise ConfigError(f"'{given[0]}': --fill-cache is for the tars of URLs; these lie on this machine already")
        tars = LocalTars(given[0])
        return tars, Path(out or str(tars))
    urls, names = find_urls([os.fspath(url) for url in given])
    if out is None:
        first = display_name(os.fspath(given[0]))
        raise ConfigError(f"'{first}': the index of a URL lies on this machine: name its folder with --out")
    return UrlTars(urls, names, cache, keep=fill_cache), Path(out)


def _index_of_urls(folder: Path) -> Manifest | None:
    """An index of URLs; None for any other folder or file, and for a folder that holds tars by now."""
    if not has_manifest(folder) or next(folder.glob("*.tar"), None) is not None:
        return None
    manifest = Manifest.read(folder)
    return manifest if "://" in manifest.location else None


def _index_before(source: str | os.PathLike[str] | None, folder: Path) -> Manifest | None:
    """The index that is made anew, or of whose tars another one is made; None if there is none.

    It says which members its captions are and what its classes are called, which nobody should have to repeat.
    """
    for place in (folder, *([] if source is None else [local_folder(source)])):
        if place.is_dir() and has_manifest(place):
            return Manifest.read(place)
    return None


def _refuse_a_conversions_ledger(folder: Path, *, overwrite: bool) -> None:
    """Raise DataError where an index would overwrite a conversion, or the ledger of one without a manifest."""
    ledger = find_ledger(folder)
    if has_manifest(folder):
        if overwrite and "run" in (Manifest.read(folder).accounts or {}):
            raise DataError(
                f"folder '{folder}': holds a conversion with its accounts, which an index does not replace; convert "
                "again with `mmdata convert --overwrite`, or give another folder with --out"
            )
        return
    if not ledger.is_file():
        return
    with ledger.open("rb") as lines:
        first = lines.readline()
    if b'"shard"' not in first and b'"row"' in first:
        raise DataError(
            f"'{ledger}': lists the rows that a conversion left out, and its {MANIFEST_NAME} is gone; an index would "
            "write over the list. Convert again into an empty folder, or move the list away and index"
        )


def _check_same(
    known: Manifest, tars: Tars, members: Members | None, counting: Counting, progress: Progress | None
) -> None:
    """Raise DataError if an index is of other tars, members or another tokenizer than those given."""
    own, given = known.tokenizer, counting.tokenizer
    other = None
    if members is not None and members != known.members:
        other = f"other members (captions: {known.members.content()})"
    elif own is not None and given not in (None, own):
        other = f"another tokenizer (fingerprint {own}; of the one given: {given})"
    else:
        bar = Bar(progress, [entry.bytes for entry in known])
        other = what_changed(tars, known, bar.finish, by_size=own != given and given is not None)
    if other is not None:
        replacing = "" if "run" in (known.accounts or {}) else "read all tars again with --overwrite, or "
        raise DataError(
            f"folder '{known.folder}': its {MANIFEST_NAME} is of {other}; {replacing}give another folder with --out"
        )


def _check_losses(known: Manifest, *, skip_damaged: bool, max_bad_share: float) -> None:
    """Raise DataError if an index leaves out more than is allowed."""
    accounts = known.accounts or {}
    damaged: dict[str, str] = accounts.get("damaged_shards", {})
    if damaged and not skip_damaged:
        first = next(iter(damaged.values()))
        raise DataError(
            f"folder '{known.folder}': its index leaves out what lies behind the damage of "
            f"{counted(len(damaged), 'shard')}, such as: {first}; keep it with --skip-damaged, or fetch the tars again "
            "and index them with --overwrite"
        )
    bad, samples = accounts.get("quarantined", 0), accounts.get("samples", 0)  # a conversion counts rows
    if samples and bad > max_bad_share * samples:
        raise DataError(
            f"folder '{known.folder}': its index leaves out {bad} of {samples} samples, more than {max_bad_share:.0%} "
            f"of them; its {QUARANTINE_NAME} lists them. Allow more with --max-bad-share, or mend the shards and index "
            "them with --overwrite"
        )


def _add_lengths(
    folder: Path, staging: IndexStaging, known: Manifest, counting: Counting, progress: Progress | None
) -> Manifest:
    """Publish an index with the lengths of its captions in place of the one without.

    Raises:
        ConfigError: the corpus has labels only.
        DataError: a caption is not the one that was indexed.
    """
    if not known.has_captions:
        raise nothing_to_tokenize(str(folder), known.rows, has_images=known.has_images)
    index, ledger = Index(known), find_ledger(folder)
    store, bar = ShardStore(index), Bar(progress, [entry.bytes for entry in known])

    def captions(shard: int) -> list[str]:
        found = store.captions(np.arange(*index.starts[shard : shard + 2]))
        return [caption for captions in found for caption in captions]

    new = staging.make_new()
    counting.train((caption for shard in range(index.num_shards) for caption in captions(shard)), new)
    writer = ManifestWriter(new)
    for shard, entry in enumerate(known):
        columns = counting.count(index.shard(shard), captions(shard))
        writer.add(ShardEntry.of(columns, entry.name, size=entry.bytes, sha256=entry.sha256), columns.data)
        bar.finish(shard, entry.bytes)
    if ledger.is_file():
        write_whole(new / INNER / QUARANTINE_NAME, ledger.read_bytes())
    writer.close(tokenizer=counting.tokenizer, location=known.location, accounts=known.accounts)
    return staging.publish()
