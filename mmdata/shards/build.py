"""Indexes foreign tars, which are only read. Samples in the tars = indexed + quarantined."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdata.atomic import lock, write_whole
from mmdata.errors import DataError
from mmdata.safe_read import check_regular
from mmdata.shards.columns.columns import SCHEMA_VERSION
from mmdata.shards.columns.encode import CountTokens, encode
from mmdata.shards.columns.labels import Labels, number_labels
from mmdata.shards.folder import INNER, MANIFEST_NAME, QUARANTINE_NAME, find_ledger, local_folder, manifest_prefix
from mmdata.shards.images.decoder_warnings import sample_name
from mmdata.shards.images.probe import DEFAULT_LIMITS, Limits
from mmdata.shards.manifest.manifest import Manifest
from mmdata.shards.manifest.pages import ShardEntry, check_plain_name
from mmdata.shards.manifest.writer import write_manifest
from mmdata.shards.samples import split_sample
from mmdata.shards.scan import Progress, Scan, scan_shard, steps
from mmdata.shards.texts import Loss, Losses


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
    """

    folder: Path
    manifest: Manifest
    accounts: dict[str, Any]
    lost: dict[Loss, str]
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

    Memory holds the rows of one shard at a time. An existing index is left alone if it equals the new one, and is an
    error if it differs; it is never replaced.

    Args:
        source: folder (its `*.tar`, sorted by name) or a tar.
        out: folder in whose `__mmdata__` the files are written; default: the folder of the tars.
        count_tokens, tokenizer: as for `ShardWriter`.
        limits: images outside them are quarantined.
        max_bad_share: largest share of quarantined samples.
        progress: called with (bytes done, bytes in all).

    Raises:
        DataError: no tar, a damaged one, a sample split over two, another manifest in `out`, or too many samples
            quarantined; nothing is published then.
        ConfigError: `source` is a URL.
        OSError: `out` cannot be written; raised before any shard is read.
    """
    shards = find_shards(local_folder(source))
    folder = Path(out) if out is not None else shards[0].parent
    location = Path(os.path.relpath(shards[0].parent.resolve(), folder.resolve())).as_posix()
    for name in (*[path.name for path in shards], location):
        if not name.isascii():
            _refuse_not_utf8(name)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        _refuse_a_conversions_ledger(folder)
        build = _Build(folder, shards, limits, count_tokens, tokenizer)
        try:
            for path in shards:
                build.add(path, progress)
            build.check(max_bad_share)
            manifest = build.publish(location)
        except BaseException:
            build.withdraw()
            raise
    return IndexReport(folder, manifest, build.accounts, build.losses.first, build.quarantined)


def _refuse_a_conversions_ledger(folder: Path) -> None:
    """Raise DataError for a conversion's ledger without a manifest: an index would overwrite the ledger."""
    ledger = find_ledger(folder)
    if manifest_prefix(folder) is not None or not ledger.is_file():
        return
    with ledger.open("rb") as lines:
        first = lines.readline()
    if b'"shard"' not in first and b'"row"' in first:
        raise DataError(
            f"'{ledger}': lists the rows that a conversion left out, and its {MANIFEST_NAME} is gone; an index would "
            "write over the list. Convert again into an empty folder, or move the list away and index"
        )


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
        self.losses = Losses()
        self._labels = Labels()
        self._folder = folder
        self._limits = limits
        self._count_tokens = count_tokens
        self._tokenizer = tokenizer
        self._names = [path.name for path in shards]
        self._samples = 0
        self._ignored = 0
        self._done = 0
        self._total = sum(path.stat().st_size for path in shards)
        self._edge: tuple[str, bool, str] | None = None  # key of the last sample, whether it is complete, its shard
        self._made: list[Path] = []
        prefix = manifest_prefix(folder)
        self._published = prefix is not None
        self._inner = folder / (INNER if prefix is None else prefix)
        # An existing index is compared with one of the same version, so that old indexes stay valid.
        self._version = SCHEMA_VERSION if prefix is None else Manifest.read(folder).schema

    @property
    def accounts(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "indexed": sum(entry.rows for entry in self.entries),
            "quarantined": len(self.quarantined),
            "ignored_members": self._ignored,
            **({"lost": self.losses.as_dict()} if self.losses.counts else {}),
            **({"classes": self._labels.names} if self._labels.names else {}),
        }

    def add(self, path: Path, progress: Progress | None) -> None:
        check_plain_name(path.name, f"folder '{path.parent}'")
        step = steps(progress, self._done, self._total)
        size = path.stat().st_size
        scan = scan_shard(path, limits=self._limits, step=step)
        self._check_edge(path, scan)
        rows, names_lost = number_labels(scan.rows, scan.labels, self._labels)
        for key, lost in [*scan.losses, *names_lost]:
            self.losses.add(sample_name(path.name, key), lost)
        encoded = encode(rows, self._count_tokens, version=self._version)
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
            published = Manifest.read(self._folder)
            if published.tokenizer != self._tokenizer or list(published) != self.entries:
                raise self._differs_from_published()
            return published if published.location == location else published.moved(location)
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.quarantined)
        write_whole(self._inner / QUARANTINE_NAME, lines.encode())
        return write_manifest(
            self._folder, self.entries, tokenizer=self._tokenizer, location=location, accounts=self.accounts
        )

    def withdraw(self) -> None:
        """Remove what this run wrote, unless it was published."""
        if self._published or manifest_prefix(self._folder) is None:
            for path in self._made:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder is not empty
                self._inner.rmdir()

    def _write(self, name: str, data: bytes) -> None:
        path = self._inner / name
        if path.exists() and path.read_bytes() == data:
            return
        if self._published:
            raise self._differs_from_published()
        self._inner.mkdir(exist_ok=True)
        self._made.append(path)
        write_whole(path, data)

    def _differs_from_published(self) -> DataError:
        published, path = Manifest.read(self._folder), self._inner / MANIFEST_NAME
        other = "other contents"
        if [entry.name for entry in published] != self._names:
            other = f"other shards ({published.num_shards}, and {len(self._names)} are to be indexed)"
        elif published.tokenizer != self._tokenizer:
            other = f"another tokenizer ({published.tokenizer or 'none'}, and {self._tokenizer or 'none'} is given)"
        return DataError(
            f"folder '{self._folder}': its {MANIFEST_NAME} is of {other}; give another folder "
            f"with --out, or remove '{path}' and run this again"
        )

    def _check_edge(self, path: Path, scan: Scan) -> None:
        """Raise DataError for a split sample: the last shard ends with its key, and one of the parts is incomplete."""
        if not scan.edges:
            return
        (first, first_whole), (last, last_whole) = scan.edges
        if self._edge and self._edge[0] == first and not (self._edge[1] and first_whole):
            raise split_sample(first, self._edge[2], path.name)
        self._edge = (last, last_whole, path.name)


def find_shards(source: Path) -> list[Path]:
    """The tars of a folder, sorted by name; or the tar that `source` is.

    Raises:
        DataError: no tar, a compressed one, or one that is not a regular file.
    """
    if not source.exists():
        raise DataError(f"'{source}': no such file or folder")
    if not source.is_dir():
        check_regular(source, "shard")
        return [source]
    names = sorted(path.name for path in source.iterdir() if not path.name.startswith("."))
    if packed := [name for name in names if name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"))]:
        raise DataError(f"folder '{source}': '{packed[0]}' is compressed, which has no random access; unpack it first")
    shards = [source / name for name in names if name.endswith(".tar")]
    if not shards:
        raise DataError(f"folder '{source}': no .tar in it; `mmdata convert` makes shards of images and captions")
    for path in shards:
        check_regular(path, "shard")
    return shards


def _refuse_not_utf8(name: str) -> None:
    """Raise DataError for a name that is not UTF-8: a manifest is JSON and cannot hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        escaped = os.fsencode(name).decode("utf-8", "backslashreplace")
        raise DataError(
            f"'{escaped}': the name is not UTF-8, and a manifest cannot hold it; rename the file or folder first"
        ) from None


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
