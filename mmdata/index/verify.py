"""Compares shards, index and manifest with one another: every byte is hashed, every header is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmdata.errors import DataError, printable
from mmdata.images.probe import NO_LIMITS
from mmdata.index.columns import FIXED, Columns
from mmdata.index.encode import encode
from mmdata.index.index import Index
from mmdata.index.labels import Labels, number_labels
from mmdata.index.manifest import Manifest
from mmdata.index.manifest_writer import Totals
from mmdata.index.pages import ShardEntry
from mmdata.processes import map_in_processes, workers_for
from mmdata.storage.folder import MANIFEST_NAME, MEMBERS_HEAD_NAME, QUARANTINE_NAME, find_ledger, local_folder
from mmdata.tars.scan import Bar, Progress, Scan, scan_shard


@dataclass(frozen=True)
class Problem:
    """A fault, and the shard (or manifest.json, members.json) that has it."""

    shard: str
    detail: str

    def __str__(self) -> str:
        is_shard = self.shard not in (MANIFEST_NAME, MEMBERS_HEAD_NAME)
        return printable(f"{'shard ' if is_shard else ''}'{self.shard}': {self.detail}")


def verify(
    folder: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    shards: Collection[str] | None = None,
    num_workers: int | None = None,
) -> list[Problem]:
    """Check every shard of a folder: size, hash, strict tar, and each column of its index against the tar's content.

    Each sample of a tar must be in its index or in `quarantine.jsonl`, which must have a line for each row that the
    accounts say was left out. Accounts must balance, and the folder must hold no tar that the manifest does not list.
    Pages of the manifest are hashed. Token lengths are compared with the manifest's histogram, not counted again, and
    pixels are not decoded.

    Args:
        folder: with a manifest.
        progress: called with (bytes done, bytes in all).
        shards: names of the shards to check; None: all. What the manifest says of all together is checked anyway.
        num_workers: processes; None takes one for each core from 256 MB of tars on. The problems are the same.

    Raises:
        DataError: the manifest itself, or a page of it, is missing or damaged.
        ConfigError: `folder` is a URL.
    """
    local = local_folder(folder)
    manifest = Manifest.read(local)
    problems = [Problem(MANIFEST_NAME, detail) for detail in (*_wrong_sums(manifest), *_wrong_accounts(manifest))]
    problems += [Problem(name, detail) for name, detail in _unlisted(manifest)]
    numbers, names, sizes = list[int](), list[str](), list[int]()
    for number, entry in enumerate(manifest):
        if shards is None or entry.name in shards:
            numbers.append(number)
            names.append(entry.name)
            sizes.append(entry.bytes)
    bar, workers = Bar(progress, sizes), workers_for(sum(sizes), num_workers)
    found = map_in_processes(_Check(local), numbers, names=names, workers=workers, step=bar.steps)
    for place, details in enumerate(found):
        problems += [Problem(names[place], detail) for detail in details]
        bar.finish(place, sizes[place])
    return problems


@dataclass(frozen=True)
class _Check:
    """Finds what is wrong with a shard of a folder."""

    folder: Path

    def __call__(self, shard: int, step: Callable[[int], None]) -> list[str]:
        """What is wrong with the shard of this number."""
        entry = self._index.manifests[0].entry(shard)
        excused = self._excused.get(entry.name, set())
        return [*_problems(self._index, shard, entry, excused, self._labels, step)]

    @cached_property
    def _index(self) -> Index:
        return Index(Manifest.read(self.folder))

    @cached_property
    def _excused(self) -> dict[str, set[str]]:
        return _quarantined(self.folder)

    @cached_property
    def _labels(self) -> Labels | None:
        classes = (self._index.manifests[0].accounts or {}).get("classes")
        # Without names of classes, the index left out labels that are names.
        return Labels(classes) if classes else None


def _wrong_sums(manifest: Manifest) -> Iterator[str]:
    """Compare the totals in manifest.json with the pages; rows were compared when the pages were opened."""
    totals = Totals()
    for entry in manifest:
        totals.add(entry)
    if manifest.lengths != sorted(totals.lengths.items()):
        yield "its lengths of captions are not those of its shards"
    for name in ("bytes", "captions"):
        if getattr(manifest, name) != getattr(totals, name):
            yield f"{getattr(manifest, name)} {name}, and its shards have {getattr(totals, name)}"
    if manifest.has_labels != (totals.labels > 0):
        yield f"has_labels is {manifest.has_labels}, and {totals.labels} rows of its shards have a label"


def _wrong_accounts(manifest: Manifest) -> Iterator[str]:
    """Compare the accounts of a conversion or an index with their own sums, the rows, and the ledger."""
    accounts = manifest.accounts or {}
    merged = accounts.get("merged")  # rows whose captions are in the sample of another row: not left out
    merged = merged if isinstance(merged, int) else 0
    for total, kept, left_out in (
        ("rows", "written", ("duplicate", "filtered", "quarantined")),
        ("samples", "indexed", ("quarantined",)),
    ):
        names = (total, kept, *left_out)
        if not all(type(accounts.get(name)) is int for name in names):
            continue  # accounts of the other of the two programs, or of a foreign one
        numbers = " + ".join(f"{accounts[name]} {name}" for name in names[1:])
        lost = sum(accounts[name] for name in left_out)
        if accounts[total] != accounts[kept] + merged + lost:
            numbers += f" + {merged} merged" if merged else ""
            yield f"its accounts do not balance: {accounts[total]} {total} in, and {numbers}"
        if accounts[kept] != manifest.rows:
            yield f"its accounts say {accounts[kept]} {kept}, and its shards have {manifest.rows} rows"
        reasons = accounts.get("reasons")
        if isinstance(reasons, dict) and sum(reasons.values()) != lost:
            yield f"its accounts give reasons for {sum(reasons.values())} rows, and {lost} were left out"
        ledger = find_ledger(local_folder(str(manifest.folder)))
        always = {"run", "ignored_members"} & accounts.keys()  # convert and index write a ledger even if it is empty
        if not ledger.is_file():
            if lost or always:
                yield f"its ledger '{ledger}' is gone; it named {lost} rows that were left out"
        elif (lines := ledger.read_bytes().count(b"\n")) != lost:
            yield f"its ledger '{ledger}' has {lines} lines, and its accounts say that {lost} rows were left out"


def _unlisted(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Tars in the folder of the shards that the manifest does not list."""
    listed = {entry.name for entry in manifest}
    folder = local_folder(str(manifest.folder)) / manifest.location
    names = sorted(path.name for path in folder.glob("*.tar")) if folder.is_dir() else []
    for name in names:
        if name not in listed and not name.startswith("."):
            yield (
                name,
                f"lies in '{folder}', and the manifest does not list it: index the folder anew, or remove the tar",
            )


def _problems(
    index: Index,
    shard: int,
    entry: ShardEntry,
    excused: set[str],
    labels: Labels | None,
    step: Callable[[int], None],
) -> Iterator[str]:
    path = index.shard_path(shard)
    if not path.exists():
        yield f"no such file: '{path}'"
        return
    if not path.is_file():
        yield f"not a regular file, and it was not opened: '{path}'"
        return
    if (size := path.stat().st_size) != entry.bytes:
        yield f"{size} bytes, and the manifest says {entry.bytes}"
    digest = hashlib.sha256()
    scan = scan_shard(
        path, limits=NO_LIMITS, members=index.manifests[0].members, step=step, name=entry.name, digest=digest
    )
    if size == entry.bytes and digest.hexdigest() != entry.sha256:
        yield "its SHA-256 is not the manifest's: the content changed"
    columns = None
    try:
        opened = index.shard(shard)
        opened.check()
        if opened.sha256 != entry.index_sha256:  # opening compares only the faster XXH3
            yield f"the SHA-256 of its index '{entry.index}' is not the manifest's: the content changed"
        columns = opened
    except DataError as error:
        yield str(error)
    known = (index.manifests[0].accounts or {}).get("damaged_shards", {}).get(entry.name)
    if scan.damage is not None and scan.damage.what != known:  # known: the shard was indexed up to its damage
        yield str(scan.damage).removeprefix(f"shard '{entry.name}', ").removeprefix(f"shard '{entry.name}': ")
        return
    if columns is not None:
        yield from _compare(entry, columns, scan, excused, labels)


def _compare(
    entry: ShardEntry, columns: Columns, scan: Scan, excused: set[str], labels: Labels | None
) -> Iterator[str]:
    """Compare the index of a shard with its tar."""
    keys: list[str] = columns.keys.to_pylist()
    indexed = set(keys)
    samples = [row.key for row in scan.rows] + [line["key"] for line in scan.quarantined]
    if lost := [key for key in samples if key not in indexed and key not in excused]:
        yield f"{len(lost)} samples are neither in the index nor in {QUARANTINE_NAME}; the first is '{lost[0]}'"
    kept = [(row, label) for row, label in zip(scan.rows, scan.labels, strict=True) if row.key in indexed]
    rows = [row for row, _ in kept]
    if labels is not None:
        rows, _ = number_labels(rows, [label for _, label in kept], labels)
    if [row.key for row in rows] != keys:
        gone = sorted(indexed - {row.key for row in rows})
        yield (
            f"the index names samples that the tar does not hold or cannot use: {gone[:3]}"
            if gone
            else ("the samples of the index stand in another order in the tar")
        )
        return
    expected = Columns.parse(encode(rows).data, len(rows), entry.index)
    for name in FIXED:
        yield from _difference(name, columns.fixed(name) != expected.fixed(name), keys)
    offsets, hashes = columns.lists("caption_hash")
    true_offsets, true_hashes = expected.lists("caption_hash")
    if np.array_equal(offsets, true_offsets):
        owners = np.repeat(np.arange(len(keys)), np.diff(offsets))
        yield from _difference("caption_hash", np.isin(np.arange(len(keys)), owners[hashes != true_hashes]), keys)
    else:
        yield from _difference("caption_hash", np.diff(offsets) != np.diff(true_offsets), keys)
    token_offsets, _ = columns.lists("caption_tokens")
    if token_offsets[-1] and not np.array_equal(token_offsets, true_offsets):
        yield from _difference("caption_tokens", np.diff(token_offsets) != np.diff(true_offsets), keys)
        return
    yield from _compare_entry(entry, expected, tokens_of=columns)


def _compare_entry(entry: ShardEntry, columns: Columns, *, tokens_of: Columns) -> Iterator[str]:
    """Compare the manifest's counts with the columns that the tar gives; token lengths are those of the index."""
    for name, listed, found in (
        ("captions", entry.captions, columns.num_captions),
        ("labels", entry.labels, columns.num_labels),
    ):
        if listed != found:
            yield f"the manifest lists {listed} {name}, and there are {found}"
    cells, counts = columns.histogram(tokens_of)
    if not (np.array_equal(cells, entry.cells) and np.array_equal(counts, entry.counts)):
        yield "the manifest's histogram is not that of the images' aspect ratios and of index column 'caption_tokens'"


def _difference(name: str, differs: npt.NDArray[np.bool_], keys: list[str]) -> Iterator[str]:
    if differs.any():
        first = keys[int(np.argmax(differs))]
        yield f"index column '{name}' differs from the tar in {int(differs.sum())} rows; the first is sample '{first}'"


def _quarantined(folder: Path) -> dict[str, set[str]]:
    """Keys in the quarantine list, by shard. Lines without a shard are a conversion's, and excuse no sample."""
    excused: dict[str, set[str]] = {}
    path = find_ledger(folder)
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            line: Any = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("shard"), str) and isinstance(line.get("key"), str):
            excused.setdefault(line["shard"], set()).add(line["key"])
    return excused
