"""Indexes tars that others wrote. Samples in = indexed + quarantined; the tars are only read, never touched."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmdata.atomic import lock, write_whole
from mmdata.errors import BadSample, DataError, Reason
from mmdata.shards.columns import CountTokens, Row, encode
from mmdata.shards.decoder_warnings import naming, sample_name
from mmdata.shards.folder import local_folder
from mmdata.shards.manifest import MANIFEST_NAME, Manifest
from mmdata.shards.manifest_writer import write_manifest
from mmdata.shards.pages import ShardEntry, check_plain_name
from mmdata.shards.probe import DEFAULT_LIMITS, Limits
from mmdata.shards.samples import Group, SampleReader, describe
from mmdata.shards.tar import Member

QUARANTINE_NAME = "quarantine.jsonl"
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True)
class IndexReport:
    """What `build_index` made.

    Attributes:
        folder: where index, manifest and quarantine list lie.
        manifest: as it lies there.
        accounts: samples = indexed + quarantined, each counted by itself; ignored_members (without an extension,
            `__meta__`) belong to no sample.
        quarantined: one entry a sample left out: shard, key, offset, reason, detail.
    """

    folder: Path
    manifest: Manifest
    accounts: dict[str, Any]
    quarantined: list[dict[str, Any]]


def build_index(
    source: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    count_tokens: CountTokens | None = None,
    tokenizer: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    max_bad_share: float = 0.05,
    progress: Progress | None = None,
) -> IndexReport:
    """Write index, manifest and quarantine list for a folder of tars, or for one tar.

    Shard by shard: memory holds one shard's rows. An index that is there already and would come out the same is
    left alone; one that would differ is refused, never replaced.

    Args:
        source: folder (its `*.tar`, sorted by name) or a tar.
        out: where to; beside the tars when None.
        count_tokens, tokenizer: as for `ShardWriter`.
        limits: which images are refused.
        max_bad_share: an error when more than this share of the samples had to be quarantined.

    Raises:
        DataError: no tar, a damaged one, a sample split over two, another manifest in the way, or too much
            quarantined; nothing is published then.
        ConfigError: `source` is a URL.
        OSError: `out` cannot be written; found before any shard is read.
    """
    shards = find_shards(local_folder(source))
    folder = Path(out) if out is not None else shards[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        build = _Build(folder, shards, limits, count_tokens, tokenizer)
        try:
            for path in shards:
                build.add(path, progress)
            build.check(max_bad_share)
            location = Path(os.path.relpath(shards[0].parent.resolve(), folder.resolve())).as_posix()
            manifest = build.publish(location)
        except BaseException:
            build.withdraw()
            raise
    return IndexReport(folder, manifest, build.accounts, build.quarantined)


@dataclass(frozen=True)
class Scan:
    """What one tar holds.

    Attributes:
        rows: samples that can be used.
        quarantined: samples that cannot, as in `IndexReport`.
        samples: how many the tar has, counted apart from the two lists.
        ignored: members that belong to no sample.
        edges: (key, complete) of the first and the last sample.
    """

    rows: list[Row]
    quarantined: list[dict[str, Any]]
    samples: int
    ignored: int
    edges: list[tuple[str, bool]]


def scan_shard(path: Path, *, limits: Limits, step: Callable[[int], None]) -> Scan:
    """Read a tar strictly; `step` is called with the offset of each sample."""
    rows: list[Row] = []
    quarantined: list[dict[str, Any]] = []
    edges: list[tuple[str, bool]] = []
    samples = 0
    with path.open("rb") as file:

        def read(member: Member) -> bytes:
            file.seek(member.offset)
            return file.read(member.size)

        reader = SampleReader(file, name=path.name)
        for group in reader:
            samples += 1
            reason = None
            try:
                with naming(partial(sample_name, path.name, group.key)):
                    rows.append(describe(group, read, limits=limits))
            except BadSample as bad:
                reason = bad.reason
                quarantined.append(_quarantine_line(path, group, bad))
            edge = (group.key, reason not in (Reason.MISSING_IMAGE, Reason.MISSING_CAPTION))
            edges = [edge, edge] if not edges else [edges[0], edge]
            step(group.start)
        return Scan(rows, quarantined, samples, reader.ignored, edges)


def steps(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    """A function of the offset reached in the current shard, before which `done` bytes of `total` were read."""

    def step(offset: int) -> None:
        if progress:
            progress(done + offset, total)

    return step


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class _Build:
    """An index that grows shard by shard."""

    def __init__(
        self, folder: Path, shards: list[Path], limits: Limits, count_tokens: CountTokens | None, tokenizer: str | None
    ) -> None:
        self.entries: list[ShardEntry] = []
        self.quarantined: list[dict[str, Any]] = []
        self._folder = folder
        self._limits = limits
        self._count_tokens = count_tokens
        self._tokenizer = tokenizer
        self._names = [path.name for path in shards]
        self._samples = 0
        self._ignored = 0
        self._done = 0
        self._total = sum(path.stat().st_size for path in shards)
        self._edge: tuple[str, bool, str] | None = None  # last sample's key, whether complete, its shard
        self._made: list[Path] = []
        self._published = (folder / MANIFEST_NAME).exists()

    @property
    def accounts(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "indexed": sum(entry.rows for entry in self.entries),
            "quarantined": len(self.quarantined),
            "ignored_members": self._ignored,
        }

    def add(self, path: Path, progress: Progress | None) -> None:
        check_plain_name(path.name, f"folder '{path.parent}'")
        step = steps(progress, self._done, self._total)
        size = path.stat().st_size
        scan = scan_shard(path, limits=self._limits, step=step)
        self._check_edge(path, scan)
        encoded = encode(scan.rows, self._count_tokens)
        entry = encoded.entry(path.name, f"{path.stem}.index.arrow", size=size, sha256=file_sha256(path))
        self._write(entry.index, encoded.data)
        self.entries.append(entry)
        self.quarantined += scan.quarantined
        self._samples += scan.samples
        self._ignored += scan.ignored
        self._done += size
        step(size)

    def check(self, max_bad_share: float) -> None:
        bad = len(self.quarantined)
        if bad > max_bad_share * self._samples:
            reasons = Counter(line["reason"] for line in self.quarantined)
            first = self.quarantined[0]
            raise DataError(
                f"{bad} of {self._samples} samples cannot be used ({_counts(reasons)}), more than "
                f"{max_bad_share:.0%} of them; the first is shard '{first['shard']}', sample '{first['key']}': "
                f"{first['detail']}. Allow more with --max-bad-share, or mend the shards"
            )

    def publish(self, location: str) -> Manifest:
        if self._published:
            there = Manifest.read(self._folder)
            if there.tokenizer != self._tokenizer or list(there) != self.entries:
                raise self._in_the_way()
            return there if there.location == location else there.moved(location)
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.quarantined)
        write_whole(self._folder / QUARANTINE_NAME, lines.encode())
        return write_manifest(
            self._folder, self.entries, tokenizer=self._tokenizer, location=location, accounts=self.accounts
        )

    def withdraw(self) -> None:
        """Remove what this run wrote, unless it was published."""
        if self._published or not (self._folder / MANIFEST_NAME).exists():
            for path in self._made:
                path.unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        path = self._folder / name
        if path.exists() and path.read_bytes() == data:
            return
        if self._published:
            raise self._in_the_way()
        self._made.append(path)
        write_whole(path, data)

    def _in_the_way(self) -> DataError:
        there = Manifest.read(self._folder)
        other = "other contents"
        if [entry.name for entry in there] != self._names:
            other = f"other shards ({there.num_shards}, and {len(self._names)} are to be indexed)"
        elif there.tokenizer != self._tokenizer:
            other = f"another tokenizer ({there.tokenizer or 'none'}, and {self._tokenizer or 'none'} is given)"
        return DataError(
            f"folder '{self._folder}': its {MANIFEST_NAME} is of {other}; give another folder "
            f"with --out, or remove '{self._folder / MANIFEST_NAME}' and run this again"
        )

    def _check_edge(self, path: Path, scan: Scan) -> None:
        if not scan.edges:
            return
        (first, first_whole), (last, last_whole) = scan.edges
        if self._edge and self._edge[0] == first and not (self._edge[1] and first_whole):
            raise DataError(
                f"sample '{first}' ends shard '{self._edge[2]}' and starts shard '{path.name}': split over two shards; "
                "pack the tars again with whole samples"
            )
        self._edge = (last, last_whole, path.name)


def find_shards(source: Path) -> list[Path]:
    """The tars of a folder, sorted by name; or a tar itself.

    Raises:
        DataError: none there, or compressed ones.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"'{source}': no such file or folder")
    names = sorted(path.name for path in source.iterdir() if not path.name.startswith("."))
    if packed := [name for name in names if name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"))]:
        raise DataError(f"folder '{source}': '{packed[0]}' is compressed, which has no random access; unpack it first")
    shards = [source / name for name in names if name.endswith(".tar")]
    if not shards:
        raise DataError(f"folder '{source}': no .tar in it; `mmdata convert` makes shards of images and captions")
    return shards


def _quarantine_line(path: Path, group: Group, bad: BadSample) -> dict[str, Any]:
    return {
        "shard": path.name,
        "key": group.key,
        "offset": group.start,
        "reason": bad.reason.value,
        "detail": bad.detail,
    }


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
