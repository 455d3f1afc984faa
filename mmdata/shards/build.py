"""Indexes foreign tars, which are only read. Samples in the tars = indexed + quarantined."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmdata.atomic import lock, write_whole
from mmdata.errors import ConfigError, DamagedShard, DataError
from mmdata.shards.columns.columns import SCHEMA_VERSION
from mmdata.shards.columns.encode import CountTokens, encode
from mmdata.shards.columns.labels import Labels, number_labels
from mmdata.shards.folder import INNER, MANIFEST_NAME, QUARANTINE_NAME, find_ledger, local_folder, manifest_prefix
from mmdata.shards.foreign import find_shards, guess_members, refuse_not_utf8
from mmdata.shards.images.decoder_warnings import sample_name
from mmdata.shards.images.probe import DEFAULT_LIMITS, Limits
from mmdata.shards.manifest.manifest import Manifest
from mmdata.shards.manifest.pages import ShardEntry, check_plain_name
from mmdata.shards.manifest.writer import write_manifest
from mmdata.shards.members import USUAL, Members
from mmdata.shards.recount import add_lengths, lacks_lengths_only
from mmdata.shards.samples import split_sample
from mmdata.shards.scan import Edge, Progress, Scan, scan_shard, steps
from mmdata.shards.staging import INDEX_END, TOKENIZER_NAME, Staging, identity_of
from mmdata.shards.texts import Loss, Losses

MAX_LISTED = 20
"""Damaged shards that an error lists."""


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
    """

    folder: Path
    manifest: Manifest
    accounts: dict[str, Any]
    lost: dict[Loss, str]
    quarantined: list[dict[str, Any]]
    guessed: bool = False
    only_counted: bool = False


MakeTokenizer = Callable[[Iterable[str], Path], tuple[CountTokens, str]]
"""Trains a tokenizer on captions, saves it in a folder, and gives its `count_tokens` and fingerprint."""


def build_index(
    source: str | os.PathLike[str],
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
) -> IndexReport:
    """Write index, manifest and quarantine list for a folder of tars, or for one tar.

    Memory holds the rows of one shard at a time. What is read of each tar is kept until the index is published, so a
    run that failed or was killed is continued by the next one. An existing index is left alone if it equals the new
    one, and is an error if it differs. An existing index without caption lengths gets those of the tokenizer, for which
    only captions are read.

    Samples with a label and no caption are indexed if no sample of the corpus has a caption, and quarantined otherwise.

    Args:
        source: folder (its `*.tar`, sorted by name) or a tar.
        out: folder in whose `__mmdata__` the files are written; default: the folder of the tars.
        count_tokens, tokenizer: as for `ShardWriter`.
        make_tokenizer: trains the tokenizer on the captions that were read, in place of the two.
        limits: images outside them are quarantined.
        members: which members are image, caption and label; None: the usual ones, or, where the first samples have no
            caption in them, the only one of the names that known corpora use (see `guess_captions`). The manifest keeps
            them.
        max_bad_share: largest share of quarantined samples.
        skip_damaged: index the samples before the damage of a damaged tar. They are counted, and the manifest names
            each damaged tar; without it all damaged tars are listed in one error.
        overwrite: replace an existing index that differs.
        progress: called with (bytes done, bytes in all).

    Raises:
        DataError: no tar, damaged ones, a sample split over two, another manifest in `out`, or too many samples
            quarantined; nothing is published then.
        ConfigError: `source` is a URL; or a tokenizer, and a corpus of labels only.
        OSError: `out` cannot be written; raised before any shard is read.
    """
    shards = find_shards(local_folder(source))
    folder = Path(out) if out is not None else shards[0].parent
    location = Path(os.path.relpath(shards[0].parent.resolve(), folder.resolve())).as_posix()
    for name in (*[path.name for path in shards], location):
        if not name.isascii():
            refuse_not_utf8(name)
    for path in shards:
        check_plain_name(path.name, f"folder '{path.parent}'")
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        _refuse_a_conversions_ledger(folder, overwrite=overwrite)
        found = guess_members(shards) if members is None else members
        staging = Staging(folder, {"limits": asdict(limits), "members": found.content()})
        staging.finish_killed_run()
        if not overwrite and lacks_lengths_only(folder, shards, tokenizer, make_tokenizer, members):
            manifest = add_lengths(
                folder, staging, count_tokens, tokenizer, make_tokenizer, location=location, progress=progress
            )
            return IndexReport(folder, manifest, dict(manifest.accounts or {}), {}, [], only_counted=True)
        build = _Build(folder, shards, limits, found, staging, version=_version(folder, overwrite=overwrite))
        build.read(progress, skip_damaged=skip_damaged)
        build.check(max_bad_share)
        new = staging.make_new()  # without what a killed run has left in it, such as its tokenizer
        if make_tokenizer is not None:
            count_tokens, tokenizer = make_tokenizer(build.captions(), new / INNER / TOKENIZER_NAME)
        manifest = build.finish(location, count_tokens, tokenizer, overwrite=overwrite)
    guessed = members is None and found != USUAL
    return IndexReport(folder, manifest, build.accounts, build.losses.first, build.quarantined, guessed=guessed)


def _version(folder: Path, *, overwrite: bool) -> int:
    """An existing index is compared with one of the same version, so that old indexes stay valid."""
    return SCHEMA_VERSION if overwrite or manifest_prefix(folder) is None else Manifest.read(folder).schema


def _refuse_a_conversions_ledger(folder: Path, *, overwrite: bool) -> None:
    """Raise DataError where an index would overwrite a conversion, or the ledger of one without a manifest."""
    ledger = find_ledger(folder)
    if manifest_prefix(folder) is not None:
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


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class _Counts(NamedTuple):
    """What the accounts take of a `Scan`, without its rows."""

    rows: int
    mute: bool
    samples: int
    ignored: int
    quarantined: list[dict[str, Any]]
    edges: list[Edge]

    @classmethod
    def of(cls, scan: Scan) -> _Counts:
        return cls(len(scan.rows), scan.has_mute, scan.samples, scan.ignored, scan.quarantined, scan.edges)


class _Build:
    """An index that grows shard by shard: all tars are read first, and then encoded as the whole corpus decides."""

    def __init__(
        self,
        folder: Path,
        shards: list[Path],
        limits: Limits,
        members: Members,
        staging: Staging,
        *,
        version: int,
    ) -> None:
        self.quarantined: list[dict[str, Any]] = []
        self.losses = Losses()
        self._labels = Labels()
        self._folder, self._shards, self._limits, self._staging = folder, shards, limits, staging
        self._members = members
        self._version = version
        self._has_captions = False
        self._damaged: dict[str, str] = {}  # name of the tar to its damage
        self._read: list[_Counts] = []
        self._samples = self._ignored = self._indexed = 0

    @property
    def accounts(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "indexed": self._indexed,
            "quarantined": len(self.quarantined),
            "ignored_members": self._ignored,
            **({"members": self._members.content()} if self._members != USUAL else {}),
            **({"damaged_shards": self._damaged} if self._damaged else {}),
            **({"lost": self.losses.as_dict()} if self.losses.counts else {}),
            **({"classes": self._labels.names} if self._labels.names else {}),
        }

    def read(self, progress: Progress | None, *, skip_damaged: bool) -> None:
        """Read all tars, except those that an earlier run has read, and keep what was found in the staging folder.

        Raises:
            DataError: a tar is damaged and `skip_damaged` is False, which is found out after all were read; or a sample
                is split over two.
        """
        total, done = sum(path.stat().st_size for path in self._shards), 0
        damaged: list[DamagedShard] = []
        for path in self._shards:
            step = steps(progress, done, total)
            identity = identity_of(path)
            if (known := self._staging.load(path)) is None:
                known = scan_shard(path, limits=self._limits, members=self._members, step=step), file_sha256(path)
                self._staging.save(path, identity, *known)
            scan, _ = known
            if scan.damage:
                self._damaged[path.name] = scan.damage.what
                damaged.append(scan.damage)
            self._has_captions = self._has_captions or scan.has_captions
            self._read.append(_Counts.of(scan))
            done += identity["bytes"]
            step(identity["bytes"])
        if damaged and not skip_damaged:
            raise _damaged_shards(damaged, len(self._shards))
        self._count()

    def _count(self) -> None:
        """Count the samples as the whole corpus decides."""
        edge: tuple[Edge, str] | None = None  # the last sample, and its shard
        for path, counts in zip(self._shards, self._read, strict=True):
            if self._has_captions and counts.mute:
                counts = _Counts.of(self._scan(path)[0])
            edge = _check_edge(edge, path, counts.edges)
            self.quarantined += counts.quarantined
            self._samples += counts.samples
            self._ignored += counts.ignored
            self._indexed += counts.rows

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

    def captions(self) -> Iterator[str]:
        """The captions of all rows."""
        for _, scan, _ in self._scans():
            for row in scan.rows:
                yield from row.captions

    def finish(
        self, location: str, count_tokens: CountTokens | None, tokenizer: str | None, *, overwrite: bool
    ) -> Manifest:
        """Encode all shards, and publish the index; or compare it with the one that exists."""
        if tokenizer is not None and self._indexed and not self._has_captions:
            raise ConfigError(
                f"'{self._shards[0].parent}': {self._indexed:,} samples with labels and no captions, so there is "
                "nothing to tokenize: leave --tokenizer out, and data.tokenizer in the config; or make captions of the "
                'class names with `mmdata convert SOURCE OUT --caption-template "a photo of a {}."`'
            )
        published = None if overwrite or manifest_prefix(self._folder) is None else Manifest.read(self._folder)
        new = self._staging.new
        (new / INNER).mkdir(parents=True, exist_ok=True)
        entries = [self._encode(path, scan, sha256, new / INNER, count_tokens) for path, scan, sha256 in self._scans()]
        if published is not None:
            self._staging.remove()
            if published.tokenizer != tokenizer or list(published) != entries:
                raise self._differs(published, tokenizer)
            return published if published.location == location else published.moved(location)
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.quarantined)
        write_whole(new / INNER / QUARANTINE_NAME, lines.encode())
        write_manifest(new, entries, tokenizer=tokenizer, location=location, accounts=self.accounts)
        self._staging.publish()
        return Manifest.read(self._folder)

    def _scans(self) -> Iterator[tuple[Path, Scan, str]]:
        """The tars, what was read of each, and their SHA-256."""
        for path in self._shards:
            yield path, *self._scan(path)

    def _scan(self, path: Path) -> tuple[Scan, str]:
        """What was read of a tar, as the whole corpus decides, and its SHA-256."""
        known = self._staging.load(path)
        if known is None:
            raise DataError(f"shard '{path}': changed while it was indexed; run this again when it is complete")
        scan, sha256 = known
        return scan.in_captioned_corpus(path.name, self._members) if self._has_captions else scan, sha256

    def _encode(self, path: Path, scan: Scan, sha256: str, inner: Path, count_tokens: CountTokens | None) -> ShardEntry:
        rows, names_lost = number_labels(scan.rows, scan.labels, self._labels)
        for key, lost in [*scan.losses, *names_lost]:
            self.losses.add(sample_name(path.name, key), lost)
        encoded = encode(rows, count_tokens, version=self._version)
        entry = encoded.entry(path.name, f"{path.stem}{INDEX_END}", size=path.stat().st_size, sha256=sha256)
        write_whole(inner / entry.index, encoded.data)
        return entry

    def _differs(self, published: Manifest, tokenizer: str | None) -> DataError:
        other = "other contents"
        if [entry.name for entry in published] != [path.name for path in self._shards]:
            other = f"other shards ({published.num_shards}, and {len(self._shards)} are to be indexed)"
        elif published.tokenizer != tokenizer:
            own, given = (f"fingerprint {one}" if one else "none" for one in (published.tokenizer, tokenizer))
            other = f"another tokenizer ({own}; of the one given: {given})"
        replacing = "" if "run" in (published.accounts or {}) else "replace it with --overwrite, or "
        return DataError(
            f"folder '{self._folder}': its {MANIFEST_NAME} is of {other}; {replacing}give another folder with --out"
        )


def _check_edge(before: tuple[Edge, str] | None, path: Path, edges: list[Edge]) -> tuple[Edge, str] | None:
    """Raise DataError for a split sample: the last shard ends with its key, and one of the parts is incomplete.

    Returns:
        The last sample of this shard, or `before` if the shard has none.
    """
    if not edges:
        return before
    first, last = edges
    if before and before[0].key == first.key and not (before[0].complete and first.complete):
        raise split_sample(first.key, before[1], path.name)
    return last, path.name


def _damaged_shards(damaged: list[DamagedShard], num_shards: int) -> DataError:
    """One error for all damaged shards."""
    instead = "; or index what can be read of it with --skip-damaged, which counts what is lost"
    if len(damaged) == 1:
        return DataError(f"{damaged[0]}{instead}")
    listed = "; ".join(error.what for error in damaged[:MAX_LISTED])
    more = f"; and {len(damaged) - MAX_LISTED} more" if len(damaged) > MAX_LISTED else ""
    return DataError(
        f"{len(damaged)} of {num_shards} shards are damaged: {listed}{more}. Fetch or convert them again and run this "
        f"again, which reads only them{instead.replace(' of it', '')}"
    )


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
