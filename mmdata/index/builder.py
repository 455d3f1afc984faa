"""An index that grows shard by shard: all tars are read first, and then encoded as the whole corpus decides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmdata.atomic import write_whole
from mmdata.errors import ConfigError, DamagedShard, DataError
from mmdata.images.pillow import sample_name
from mmdata.images.probe import Limits
from mmdata.index.encode import CountTokens, encode
from mmdata.index.labels import Labels, number_labels
from mmdata.index.manifest import Manifest
from mmdata.index.manifest_writer import ManifestWriter
from mmdata.index.pages import ShardEntry
from mmdata.index.staging import IndexStaging, ReadTar
from mmdata.index.tars import Tars
from mmdata.processes import map_in_processes, workers_for
from mmdata.progress import Bar, Progress
from mmdata.storage.concurrently import map_concurrently
from mmdata.storage.folder import INNER, MANIFEST_NAME, QUARANTINE_NAME, has_manifest
from mmdata.tars.members import USUAL, Members
from mmdata.tars.scan import Edges, Scan, ScannedSample
from mmdata.tars.texts import Losses

MAX_LISTED = 20
"""Damaged shards that an error lists."""


class _Counts(NamedTuple):
    """What the accounts take of a `Scan`, without its rows."""

    rows: int
    has_captions: bool
    has_mute: bool
    may_lack_images: bool
    samples: int
    ignored: int
    quarantined: list[dict[str, Any]]
    edges: list[ScannedSample]

    @classmethod
    def of(cls, scan: Scan) -> _Counts:
        has = (scan.has_captions, scan.has_mute, scan.may_lack_images)
        return cls(len(scan.usable), *has, len(scan.samples), scan.ignored, scan.quarantined, scan.edges)


class _FoundTar(NamedTuple):
    """What was found in a tar of so many bytes."""

    counts: _Counts
    damage: DamagedShard | None
    bytes: int


@dataclass(frozen=True)
class _TarScanner:
    """Reads a tar, unless an earlier run has read it, and keeps what was found in the staging folder."""

    tars: Tars
    staging: IndexStaging
    limits: Limits
    members: Members
    skip_damaged: bool

    def identity(self, number: int) -> dict[str, Any]:
        """All that decides what is found in a tar."""
        settings = {"limits": asdict(self.limits), "members": self.members.content()}
        return {**settings, **self.tars.identity(number)}

    def __call__(self, number: int, step: Callable[[int], None]) -> _FoundTar:
        """Read a tar."""
        identity, name = self.identity(number), self.tars.names[number]
        known = self.staging.load(name, identity)
        # A URL's identity is the same when a whole tar has replaced the damaged one.
        if known is None or (known.scan.damage and self.tars.are_remote and not self.skip_damaged):
            known = self.tars.read(number, limits=self.limits, members=self.members, step=step)
            self.staging.save(name, identity, known)
        return _FoundTar(_Counts.of(known.scan), known.scan.damage, known.bytes)


class IndexBuilder:
    """Reads tars, and makes the index of them.

    Args:
        folder: of the index.
        tars: to be indexed.
        limits, members: see `build_index`.
        staging: of the folder.
        classes: names of the classes by label, for tars whose labels are numbers; None: not known.
        skip_damaged, num_workers: see `build_index`.

    Attributes:
        quarantined: see `IndexReport`.
        losses: parts of text members that could not be used.
    """

    def __init__(
        self,
        folder: Path,
        tars: Tars,
        limits: Limits,
        members: Members,
        staging: IndexStaging,
        *,
        classes: list[str] | None = None,
        skip_damaged: bool = False,
        num_workers: int | None = None,
    ) -> None:
        self.quarantined: list[dict[str, Any]] = []
        self.losses = Losses()
        self._labels = Labels()
        self._folder, self._tars, self._staging, self._num_workers = folder, tars, staging, num_workers
        self._reader = _TarScanner(tars, staging, limits, members, skip_damaged)
        self._members, self._classes = members, classes
        self._has_captions = self._lacks_images = False
        self._damaged: dict[str, str] = {}  # name of the tar to its damage
        self._read: list[_Counts] = []
        self._samples = self._ignored = self._indexed = 0

    @property
    def accounts(self) -> dict[str, Any]:
        """See `IndexReport`."""
        return {
            "samples": self._samples,
            "indexed": self._indexed,
            "quarantined": len(self.quarantined),
            "ignored_members": self._ignored,
            **({"members": self._members.content()} if self._members != USUAL else {}),
            **({"damaged_shards": self._damaged} if self._damaged else {}),
            **({"lost": self.losses.as_dict()} if self.losses.counts else {}),
            **({"classes": classes} if (classes := self._labels.names or self._classes) else {}),
        }

    def read(self, progress: Progress | None) -> None:
        """Read all tars, except those that an earlier run has read, and keep what was found in the staging folder.

        Raises:
            DataError: a tar is damaged, and damaged ones are not skipped, which is found out after all were read; or a
                sample is split over two.
        """
        bar = Bar(progress, self._tars.sizes)
        damaged: list[DamagedShard] = []
        for number, (counts, damage, _) in enumerate(self._each(bar)):
            if damage:
                self._damaged[self._tars.names[number]] = damage.what
                damaged.append(self._placed(number, damage))
            self._has_captions = self._has_captions or counts.has_captions
            self._read.append(counts)
        if damaged and not self._reader.skip_damaged:
            raise self._damaged_shards(damaged)
        self._count()

    def _each(self, bar: Bar) -> Iterator[_FoundTar]:
        """What was found in each tar, in row order."""
        numbers = range(len(self._tars.names))
        if self._tars.are_remote:

            def read(number: int) -> _FoundTar:
                found = self._reader(number, bar.steps(number))
                bar.finish(number, found.bytes)
                return found

            yield from map_concurrently(read, numbers, threads=self._tars.threads, end=self._tars.close)
            return
        workers = workers_for(sum(size or 0 for size in self._tars.sizes), self._num_workers)
        names = self._tars.names
        for number, one in enumerate(
            map_in_processes(self._reader, numbers, names=names, workers=workers, step=bar.steps)
        ):
            bar.finish(number, one.bytes)
            yield one

    def _count(self) -> None:
        """Count the samples as the whole corpus decides."""
        edges = Edges()
        # Whoever names the member of the image has images.
        self._lacks_images = not self._members.image and all(counts.may_lack_images for counts in self._read)
        for number, counts in enumerate(self._read):
            if self._lacks_images or (self._has_captions and counts.has_mute):
                counts = _Counts.of(self._scan(number).scan)
            if (split := edges.add(self._tars.names[number], counts.edges)) is not None:
                raise split
            self.quarantined += counts.quarantined
            self._samples += counts.samples
            self._ignored += counts.ignored
            self._indexed += counts.rows

    def check(self, max_bad_share: float) -> None:
        """Raise DataError if more than this share of the samples cannot be used."""
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
        for number in range(len(self._tars.names)):
            for row in self._scan(number).scan.rows:
                yield from row.captions

    def finish(
        self, location: str, count_tokens: CountTokens | None, tokenizer: str | None, *, overwrite: bool
    ) -> Manifest:
        """Encode all shards, and publish the index; or compare it with the one that exists."""
        if tokenizer is not None and self._indexed and not self._has_captions:
            if self._lacks_images:
                raise ConfigError(f"'{self._tars}': samples without images, so nothing to tokenize: omit --tokenizer")
            raise ConfigError(
                f"'{self._tars}': {self._indexed:,} samples with labels and no captions, so there is "
                "nothing to tokenize: leave --tokenizer out, and data.tokenizer in the config; or make captions of the "
                'class names with `mmdata convert SOURCE OUT --caption-template "a photo of a {}."`'
            )
        published = None if overwrite or not has_manifest(self._folder) else Manifest.read(self._folder)
        new = self._staging.new
        writer = ManifestWriter(new)
        for number in range(len(self._tars.names)):
            writer.add(*self._encode(number, count_tokens))
        manifest = writer.finish(tokenizer=tokenizer, location=location, accounts=self.accounts)
        if published is not None:
            self._staging.remove()
            if published.root != manifest.root:
                raise self._differs(published, tokenizer)
            return published if published.location == location else published.moved(location)
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.quarantined)
        write_whole(new / INNER / QUARANTINE_NAME, lines.encode())
        writer.publish(manifest)
        self._staging.publish()
        return Manifest.read(self._folder)

    def _scan(self, number: int) -> ReadTar:
        """What was read of a tar, as the whole corpus decides."""
        name = self._tars.names[number]
        read = self._staging.load(name, self._reader.identity(number))
        if read is None:
            place = f"{self._tars}/{name}"
            raise DataError(f"shard '{place}': changed while it was indexed; run this again when it is complete")
        if self._lacks_images:
            return read._replace(scan=read.scan.of_corpus(images=False))
        if self._has_captions:
            return read._replace(scan=read.scan.of_corpus(captions=True, members=self._members))
        return read

    def _encode(self, number: int, count_tokens: CountTokens | None) -> tuple[ShardEntry, bytes]:
        name, (scan, sha256, size) = self._tars.names[number], self._scan(number)
        rows, names_lost = number_labels(scan.rows, scan.labels, self._labels)
        for key, lost in [*scan.losses, *names_lost]:
            self.losses.add(sample_name(name, key), lost)
        encoded = encode(rows, count_tokens)
        return encoded.entry(name, size=size, sha256=sha256), encoded.data

    def _placed(self, number: int, damage: DamagedShard) -> DamagedShard:
        """The damage for the user, who knows a tar behind a URL by its URL."""
        if not self._tars.are_remote:
            return damage
        what = damage.what.replace(f"shard '{self._tars.names[number]}'", f"shard '{self._tars.place(number)}'", 1)
        return DamagedShard(what, "is it whole on its server? Run this again when it is, which reads only what it must")

    def _damaged_shards(self, damaged: list[DamagedShard]) -> DataError:
        """One error for all damaged shards."""
        instead = "; or index what can be read of it with --skip-damaged, which counts what is lost"
        if len(damaged) == 1:
            return DataError(f"{damaged[0]}{instead}")
        listed = "; ".join(error.what for error in damaged[:MAX_LISTED])
        more = f"; and {len(damaged) - MAX_LISTED} more" if len(damaged) > MAX_LISTED else ""
        mend = "When they are whole on their server" if self._tars.are_remote else "Fetch or convert them again and"
        return DataError(
            f"{len(damaged)} of {len(self._tars.names)} shards are damaged: {listed}{more}. {mend} run this again, "
            f"which reads only them{instead.replace(' of it', '')}"
        )

    def _differs(self, published: Manifest, tokenizer: str | None) -> DataError:
        other = "other contents"
        if [entry.name for entry in published] != self._tars.names:
            other = f"other shards ({published.num_shards}, and {len(self._tars.names)} are to be indexed)"
        elif published.tokenizer != tokenizer:
            own, given = (f"fingerprint {one}" if one else "none" for one in (published.tokenizer, tokenizer))
            other = f"another tokenizer ({own}; of the one given: {given})"
        replacing = "" if "run" in (published.accounts or {}) else "replace it with --overwrite, or "
        return DataError(
            f"folder '{self._folder}': its {MANIFEST_NAME} is of {other}; {replacing}give another folder with --out"
        )


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
