"""Checks tars. Those of an index are indexed again, and compared with it; of others only the strict reading remains."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmdata.errors import BadSample, DataError, Reason, explain, printable
from mmdata.images.probe import NO_LIMITS
from mmdata.index.columns import SCHEMA, ShardColumns
from mmdata.index.encode import Labels, encode, number_labels, with_tokens
from mmdata.index.manifest import FILE_SHARDS, INDEX_FILE, STREAM_END, Manifest, ShardEntry
from mmdata.index.writer import Totals
from mmdata.processes import Step, map_in_processes, workers_for
from mmdata.progress import Bar, Progress
from mmdata.safe_read import check_regular
from mmdata.storage.folder import INNER, MANIFEST_NAME, QUARANTINE_NAME, find_ledger, local_folder
from mmdata.tars.foreign import given_tars, guess_members
from mmdata.tars.members import USUAL, Members
from mmdata.tars.scan import Edges, Scan, scan_shard


@dataclass(frozen=True)
class Problem:
    """A fault, and the shard (or the file of the index) that has it."""

    shard: str
    detail: str

    def __str__(self) -> str:
        kind = "" if self.shard == MANIFEST_NAME or INDEX_FILE.fullmatch(self.shard) else "shard "
        return printable(f"{kind}'{self.shard}': {self.detail}")


def verify(
    folder: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    shards: Collection[str] | None = None,
    num_workers: int | None = None,
) -> list[Problem]:
    """Check every shard of a folder: its size and hash, and that indexing it again gives the same bytes.

    Each sample of a tar must be in its index or in `quarantine.jsonl`, which must have a line for each row that the
    accounts say was left out. Accounts must balance, and the folder must hold no tar that the manifest does not list.
    Token lengths are taken from the index, not counted again, and pixels are not decoded.

    Args:
        folder: with a manifest.
        progress: called with (bytes done, bytes in all).
        shards: names of the shards to check; None: all. What the manifest says of all together is checked anyway.
        num_workers: processes; None takes one for each core from 256 MB of tars on. The problems are the same.

    Raises:
        DataError: the manifest itself, or a list of shards, is missing or damaged.
        ConfigError: `folder` is a URL.
    """
    local = local_folder(folder)
    manifest = Manifest.read(local)
    problems = [Problem(MANIFEST_NAME, detail) for detail in (*_wrong_sums(manifest), *_wrong_accounts(manifest))]
    problems += [*_unlisted(manifest), *_wrong_files(manifest)]
    chosen = [(number, entry) for number, entry in enumerate(manifest) if shards is None or entry.name in shards]
    names, bar = [entry.name for _, entry in chosen], Bar(progress, [entry.bytes for _, entry in chosen])
    workers = workers_for(sum(entry.bytes for _, entry in chosen), num_workers)
    found = map_in_processes(_Check(local), chosen, names=names, workers=workers, step=bar.steps)
    for place, details in enumerate(found):
        bar.finish(place, chosen[place][1].bytes)
        problems += [Problem(names[place], detail) for detail in details]
    return problems


@dataclass(frozen=True)
class TarsReport:
    """What was read of tars without an index.

    Attributes:
        problems: in the order of the tars.
        tars, samples, bytes: of all tars; of a damaged one the samples before the damage.
    """

    problems: list[Problem]
    tars: int
    samples: int
    bytes: int


def verify_tars(
    given: Sequence[str | os.PathLike[str]], progress: Progress | None = None, *, num_workers: int | None = None
) -> TarsReport:
    """Read tars without an index strictly: headers, texts and heads of images. A damaged tar is told, and others read.

    Args:
        given: tars, folders of tars, brace patterns.
        progress: called with (bytes done, bytes in all).
        num_workers: processes; None takes one for each core from 256 MB of tars on.

    Raises:
        DataError, ConfigError: see `given_tars`.
    """
    paths = given_tars(given)
    names = [path.name for path in paths]
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    members = _members([path for path in paths if path.is_file()])
    bar, workers = Bar(progress, sizes), workers_for(sum(sizes), num_workers)
    read_tar = partial(_read_tar, members=members)
    read: list[_ReadTar] = []
    for place, one in enumerate(map_in_processes(read_tar, paths, names=names, workers=workers, step=bar.steps)):
        bar.finish(place, sizes[place])
        read.append(one)
    captioned, lacks_images = any(tar.has_captions for tar in read), all(tar.may_lack_images for tar in read)
    edges, problems = Edges(), list[Problem]()
    for name, tar in zip(names, read, strict=True):
        scan = tar.scan
        if (split := edges.add(name, scan.edges)) is not None:
            problems.append(Problem(name, str(split)))
        if tar.damage:
            problems.append(Problem(name, tar.damage))
            edges = Edges()
        if captioned:
            scan = scan.of_corpus(captions=True, members=members)
        for line in () if lacks_images else scan.quarantined:
            if line["reason"] != Reason.DAMAGED_SHARD.value:  # its sample is told with the damage
                what = f"sample '{line['key']}' cannot be used: {line['reason']}: {line['detail']}"
                problems.append(Problem(name, f"byte {line['offset']}: {what}"))
    return TarsReport(problems, len(paths), sum(tar.samples for tar in read), sum(sizes))


class _ReadTar(NamedTuple):
    """What was read of a tar without an index.

    Attributes:
        scan: see `Scan.without_sound_rows`.
        samples: all of them.
        has_captions, may_lack_images: see `Scan`.
        damage: why not all was read, or "".
    """

    scan: Scan
    samples: int
    has_captions: bool
    may_lack_images: bool
    damage: str


def _read_tar(path: Path, step: Step, *, members: Members) -> _ReadTar:
    scan, damage = Scan(path.name), None
    try:
        check_regular(path, "shard")
        scan = scan_shard(path, limits=NO_LIMITS, members=members, step=step, name=path.name)
        damage = scan.damage
    except (DataError, OSError) as error:
        damage = error
    detail = "" if damage is None else _detail(path.name, damage)
    return _ReadTar(scan.without_sound_rows(), len(scan.samples), scan.has_captions, scan.may_lack_images, detail)


def _members(paths: list[Path]) -> Members:
    """The members by the first samples; the usual ones where damage is in these."""
    try:
        return guess_members(paths)
    except (BadSample, DataError, OSError):
        return USUAL


def _detail(name: str, error: Exception) -> str:
    text = explain(error) if isinstance(error, OSError) else str(error)
    return text.removeprefix(f"shard '{name}', ").removeprefix(f"shard '{name}': ")


@dataclass(frozen=True)
class _Check:
    """Finds what is wrong with a shard of a folder."""

    folder: Path

    def __call__(self, shard: tuple[int, ShardEntry], step: Step) -> list[str]:
        """What is wrong with the shard of this number and entry."""
        return [*self._problems(*shard, step)]

    @cached_property
    def _manifest(self) -> Manifest:
        return Manifest.read(self.folder)

    @cached_property
    def _excused(self) -> dict[str, set[str]]:
        """Keys in the quarantine list, by shard. Lines without a shard are a conversion's, and excuse no sample."""
        excused: dict[str, set[str]] = {}
        path = find_ledger(self.folder)
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
            try:
                line: Any = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("shard"), str) and isinstance(line.get("key"), str):
                excused.setdefault(line["shard"], set()).add(line["key"])
        return excused

    @cached_property
    def _labels(self) -> Labels | None:
        classes = (self._manifest.accounts or {}).get("classes")
        # Without names of classes, the index left out labels that are names.
        return Labels(classes) if classes else None

    def _problems(self, shard: int, entry: ShardEntry, step: Step) -> Iterator[str]:
        path = self._manifest.shard_path(shard)
        if not path.is_file():
            what = "not a regular file, and it was not opened" if path.exists() else "no such file"
            yield f"{what}: '{path}'"
            return
        if (size := path.stat().st_size) != entry.bytes:
            yield f"{size} bytes, and the manifest says {entry.bytes}"
        digest, members = hashlib.sha256(), self._manifest.members
        scan = scan_shard(path, limits=NO_LIMITS, members=members, step=step, name=entry.name, on_bytes=digest.update)
        if size == entry.bytes and digest.hexdigest() != entry.sha256:
            yield "its SHA-256 is not the manifest's: the content changed"
        columns = None
        try:
            columns = self._manifest.columns(shard)
            columns.check()
        except DataError as error:
            yield str(error)
            columns = None
        known = (self._manifest.accounts or {}).get("damaged_shards", {}).get(entry.name)
        if scan.damage is not None and scan.damage.what != known:  # known: the shard was indexed up to its damage
            yield _detail(entry.name, scan.damage)
        elif columns is not None:
            yield from self._compare(entry, columns, scan)

    def _compare(self, entry: ShardEntry, columns: ShardColumns, scan: Scan) -> Iterator[str]:
        """Index the samples of a shard again, and compare the bytes, and what the manifest says of them."""
        keys: list[str] = columns.keys.to_pylist()
        indexed, excused = set(keys), self._excused.get(entry.name, set())
        if not entry.images and scan.may_lack_images:
            scan = scan.of_corpus(images=False)
        samples = [sample.row.key for sample in scan.samples]
        if lost := [key for key in samples if key not in indexed and key not in excused]:
            yield f"{len(lost)} samples are neither in the index nor in {QUARANTINE_NAME}; the first is '{lost[0]}'"
        kept = [sample for sample in scan.usable if sample.row.key in indexed]
        found = [sample.row.key for sample in kept]
        if gone := sorted(indexed - {*found}):
            yield f"the index names samples that the tar does not hold or cannot use: {gone[:3]}"
            return
        if found != keys:
            yield "the samples of the index stand in another order in the tar"
            return
        again = encode([sample.row for sample in kept])
        if self._labels is not None:
            again, _ = number_labels(again, [sample.label for sample in kept], self._labels)
        tokens = columns.lists("caption_tokens")[1].tolist()
        if len(tokens) == again.num_captions:
            captions = [caption for sample in kept for caption in sample.row.captions]
            again = with_tokens(again, captions, lambda captions: tokens)
        if columns.data != again.data:
            yield from _differences(columns, again)
        made = ShardEntry.of(again, entry.name, size=entry.bytes, sha256=entry.sha256)
        numbers = ("images", "captions", "labels", "cells", "counts")
        if wrong := [name for name in numbers if not np.array_equal(getattr(entry, name), getattr(made, name))]:
            yield f"the manifest's {', '.join(wrong)} of it are not those of its columns in the index"


def _differences(columns: ShardColumns, again: ShardColumns) -> Iterator[str]:
    """Which columns of an index are not those that its tar gives, and the first sample."""
    for name in SCHEMA.names:
        pairs = zip(*(one.arrow.column(name).to_pylist() for one in (columns, again)), strict=True)
        if differing := [row for row, (one, other) in enumerate(pairs) if one != other]:
            first = columns.keys[differing[0]].as_py()
            yield f"index column '{name}' differs from the tar in {len(differing)} rows; the first is sample '{first}'"


def _wrong_sums(manifest: Manifest) -> Iterator[str]:
    """Compare the totals in manifest.json with the lists of shards."""
    totals = Totals()
    for entry in manifest:
        totals.add(entry)
    if wrong := [name for name, value in totals.fields().items() if getattr(manifest, name) != value]:
        yield f"its {', '.join(wrong)} are not those of its shards"


def _wrong_files(manifest: Manifest) -> Iterator[Problem]:
    """Compare each byte of the index files with the schema, the hashes of the record batches, and that of the list."""
    for number, (name, file) in enumerate(zip(manifest.files, manifest.index_files, strict=True)):
        shards = range(number * FILE_SHARDS, min((number + 1) * FILE_SHARDS, manifest.num_shards))
        with (local_folder(str(manifest.folder)) / INNER / name).open("rb") as opened:
            wrong = opened.read(manifest.listed(shards[0]).index_offset) != SCHEMA.serialize().to_pybytes()
            for entry in map(manifest.listed, shards):
                wrong |= hashlib.sha256(opened.read(entry.index_bytes)).hexdigest() != entry.index_sha256
            wrong |= opened.read(file.list_offset - opened.tell()) != STREAM_END
            wrong |= hashlib.sha256(opened.read()).hexdigest() != file.sha256
        if wrong:
            yield Problem(name, "its content is not what the manifest says: it changed")


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
            yield f"not every row is accounted for: {accounts[total]} {total} in, and {numbers}"
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


def _unlisted(manifest: Manifest) -> Iterator[Problem]:
    """Tars in the folder of the shards that the manifest does not list."""
    listed = {entry.name for entry in manifest}
    folder = local_folder(str(manifest.folder)) / manifest.location
    for name in sorted(path.name for path in folder.glob("[!.]*.tar")) if folder.is_dir() else []:
        if name not in listed:
            detail = f"lies in '{folder}', and the manifest does not list it: index the folder anew, or remove the tar"
            yield Problem(name, detail)
