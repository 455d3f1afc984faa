"""Makes an index in its staging folder: of tars, which are read first and then encoded as the whole corpus decides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from mmdata.errors import ConfigError, DamagedShard, DataError, sample_name
from mmdata.files import write_whole
from mmdata.images.probe import Limits
from mmdata.index.columns import ShardColumns
from mmdata.index.encode import CountTokens, Labels, encode, number_labels, with_tokens
from mmdata.index.manifest import Manifest, ShardEntry
from mmdata.index.staging import TOKENIZER_NAME, IndexStaging, ReadTar
from mmdata.index.tars import READERS, Tars, ignore
from mmdata.index.writer import ManifestWriter
from mmdata.processes import Step, map_concurrently, map_in_processes, workers_for
from mmdata.progress import Bar, Progress
from mmdata.storage.folder import INNER, QUARANTINE_NAME
from mmdata.tars.members import USUAL, Members
from mmdata.tars.scan import Edges, Scan, scan_shard
from mmdata.tars.texts import Losses

MAX_LISTED = 20
"""Damaged shards that an error lists."""

MakeTokenizer = Callable[[Iterable[str], Path], tuple[CountTokens, str]]
"""Trains a tokenizer on captions, saves it in a folder, and gives its `count_tokens` and fingerprint."""


class Counting:
    """Counts the captions of an index: by a tokenizer, or by one that is trained on them, or not at all.

    Args:
        count_tokens, tokenizer, make: see `build_index`.

    Attributes:
        tokenizer: its fingerprint, as given; that of the trained one, once it is trained.
    """

    def __init__(self, count_tokens: CountTokens | None, tokenizer: str | None, make: MakeTokenizer | None) -> None:
        self.tokenizer = "a new one" if make is not None else tokenizer
        self._count_tokens, self._make = count_tokens, make

    def train(self, captions: Iterable[str], folder: Path) -> None:
        """Train the tokenizer, if it is to be trained, and save it in the folder of an index in progress."""
        if self._make is not None:
            self._count_tokens, self.tokenizer = self._make(captions, folder / INNER / TOKENIZER_NAME)

    def count(self, columns: ShardColumns, captions: list[str]) -> ShardColumns:
        """The columns of a shard with the lengths of its captions, if they are counted."""
        return columns if self._count_tokens is None else with_tokens(columns, captions, self._count_tokens)


def nothing_to_tokenize(name: str, rows: int, *, has_images: bool) -> ConfigError:
    if not has_images:
        return ConfigError(f"'{name}': samples without images, so nothing to tokenize: omit --tokenizer")
    return ConfigError(
        f"'{name}': {rows:,} samples with labels and no captions, so there is nothing to tokenize: leave --tokenizer "
        "out, and data.tokenizer in the config; or make captions of the class names with "
        '`mmdata convert SOURCE OUT --caption-template "a photo of a {}."`'
    )


class TarFacts(NamedTuple):
    """What the corpus wants to know of a tar.

    Attributes:
        bytes, samples: of the tar.
        scan: see `Scan.without_sound_rows`. None for a tar without captions: all samples of a corpus of labels would be
            in it.
        damage, has_captions, may_lack_images: see `Scan`.
    """

    bytes: int
    samples: int
    scan: Scan | None
    damage: DamagedShard | None
    has_captions: bool
    may_lack_images: bool


@dataclass(frozen=True)
class TarReader:
    """Reads the tars of an index, and keeps what was found in the staging folder.

    Attributes:
        tars: to be indexed.
        staging: of the index.
        limits, members, skip_damaged: see `build_index`.
    """

    tars: Tars
    staging: IndexStaging
    limits: Limits
    members: Members
    skip_damaged: bool

    def identity(self, number: int) -> dict[str, Any]:
        """All that decides what is found in a tar."""
        settings = {"limits": asdict(self.limits), "members": self.members.content()}
        return {**settings, **self.tars.identity(number)}

    def __call__(self, number: int, step: Step) -> TarFacts:
        """Read a tar, unless an earlier run has read it."""
        identity, name = self.identity(number), self.tars.names[number]
        known = self.staging.load(name, identity)
        # A URL's identity is the same when a whole tar has replaced the damaged one.
        if known is None or (known.scan.damage and self.tars.are_remote and not self.skip_damaged):
            with self.tars.at_hand(number, step) as (path, known_sha256):
                digest = sha256()
                scan = scan_shard(
                    path,
                    limits=self.limits,
                    members=self.members,
                    step=ignore if self.tars.are_remote else step,
                    name=name,
                    on_bytes=None if known_sha256 else digest.update,
                )
                columns = encode([sample.row for sample in scan.samples])
                known = ReadTar(scan, columns, known_sha256 or digest.hexdigest(), path.stat().st_size)
            self.staging.save(name, identity, known)
        self.tars.let_go(number)
        scan, has_captions = known.scan, known.scan.has_captions
        kept = scan.without_sound_rows() if has_captions else None
        return TarFacts(known.bytes, len(scan.samples), kept, scan.damage, has_captions, scan.may_lack_images)

    def result(self, number: int) -> ReadTar:
        """What was read of a tar.

        Raises:
            DataError: the tar has changed since.
        """
        name = self.tars.names[number]
        if (read := self.staging.load(name, self.identity(number))) is None:
            place = f"{self.tars}/{name}"
            raise DataError(f"shard '{place}': changed while it was indexed; run this again when it is complete")
        return read


class Builder:
    """Makes the index of tars.

    Args:
        reader: of the tars.
        classes: names of the classes by label, for tars whose labels are numbers; None: not known.

    Attributes:
        quarantined: see `IndexReport`.
        losses: parts of text members that could not be used.
    """

    def __init__(self, reader: TarReader, classes: list[str] | None) -> None:
        self.quarantined: list[dict[str, Any]] = []
        self.losses = Losses()
        self._labels = Labels()
        self._reader, self._tars, self._classes = reader, reader.tars, classes
        self._has_captions = self._lacks_images = False
        self._damaged: dict[str, str] = {}  # name of the tar to its damage
        self._samples = self._ignored = self._indexed = 0

    @property
    def accounts(self) -> dict[str, Any]:
        """See `IndexReport`."""
        return {
            "samples": self._samples,
            "indexed": self._indexed,
            "quarantined": len(self.quarantined),
            "ignored_members": self._ignored,
            **({"members": members.content()} if (members := self._reader.members) != USUAL else {}),
            **({"damaged_shards": self._damaged} if self._damaged else {}),
            **({"lost": self.losses.as_dict()} if self.losses.counts else {}),
            **({"classes": classes} if (classes := self._labels.names or self._classes) else {}),
        }

    def read(self, progress: Progress | None, num_workers: int | None) -> None:
        """Read all tars, except those that an earlier run has read, and keep what was found in the staging folder.

        Raises:
            DataError: a tar is damaged, and damaged ones are not skipped, which is found out after all were read; or a
                sample is split over two.
        """
        found: list[TarFacts] = []
        bar = Bar(progress, self._tars.sizes)
        for number, facts in enumerate(self._each(bar, num_workers)):
            bar.finish(number, facts.bytes)
            found.append(facts)
        damaged = {number: facts.damage for number, facts in enumerate(found) if facts.damage is not None}
        self._damaged = {self._tars.names[number]: damage.what for number, damage in damaged.items()}
        if damaged and not self._reader.skip_damaged:
            raise self._damaged_shards([self._placed(*one) for one in damaged.items()])
        self._has_captions = any(facts.has_captions for facts in found)
        # Whoever names the member of the image has images.
        self._lacks_images = not self._reader.members.image and all(facts.may_lack_images for facts in found)
        edges = Edges()
        for number, facts in enumerate(found):
            scan = self._tar(number).scan if facts.scan is None else self._judged(facts.scan)
            if (split := edges.add(scan.shard, scan.edges)) is not None:
                raise split
            self.quarantined += scan.quarantined
            self._samples += facts.samples
            self._ignored += scan.ignored

    def _each(self, bar: Bar, num_workers: int | None) -> Iterator[TarFacts]:
        """What was found in each tar, in row order."""
        names = self._tars.names
        numbers = range(len(names))
        if self._tars.are_remote:

            def read(number: int) -> TarFacts:
                facts = self._reader(number, bar.steps(number))
                bar.finish(number, facts.bytes)  # here: of a tar that is read, the size is known before those before it
                return facts

            return map_concurrently(read, numbers, threads=min(READERS, len(names)), end=self._tars.close)
        workers = workers_for(sum(size or 0 for size in self._tars.sizes), num_workers)
        return map_in_processes(self._reader, numbers, names=names, workers=workers, step=bar.steps)

    def check(self, max_bad_share: float) -> None:
        """Raise DataError if more than this share of the samples cannot be used."""
        bad = len(self.quarantined)
        if bad > max_bad_share * self._samples:
            reasons = Counter(line["reason"] for line in self.quarantined)
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            first = self.quarantined[0]
            remedy = "Allow more with --max-bad-share, or mend the shards"
            if bad == self._samples:
                remedy = (
                    "If this is a packed folder, with a table beside the pictures, and no WebDataset, unpack it and "
                    "run `mmdata convert` on the folder; if captions are elsewhere in the samples, name them with "
                    "--caption"
                )
            raise DataError(
                f"{bad} of {self._samples} samples cannot be used ({counts}), more than "
                f"{max_bad_share:.0%} of them; the first is shard '{first['shard']}', sample '{first['key']}': "
                f"{first['detail']}. {remedy}"
            )

    def publish(self, location: str, counting: Counting) -> Manifest:
        """Encode all shards, and publish the index."""
        usable = self._samples - len(self.quarantined)
        if counting.tokenizer is not None and usable and not self._has_captions:
            raise nothing_to_tokenize(str(self._tars), usable, has_images=not self._lacks_images)
        new, names = self._reader.staging.make_new(), self._tars.names
        rows = (row for number in range(len(names)) for row in self._tar(number).scan.rows)
        counting.train((caption for row in rows for caption in row.captions), new)
        writer = ManifestWriter(new)
        for number, name in enumerate(names):
            tar = self._tar(number)
            labels = [sample.label for sample in tar.scan.usable]
            columns, names_lost = number_labels(tar.usable, labels, self._labels)
            for key, lost in [*tar.scan.losses, *names_lost]:
                self.losses.add(sample_name(name, key), lost)
            columns = counting.count(columns, [caption for row in tar.scan.rows for caption in row.captions])
            self._indexed += len(columns)
            writer.add(ShardEntry.of(columns, name, size=tar.bytes, sha256=tar.sha256), columns.data)
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.quarantined).encode()
        write_whole(new / INNER / QUARANTINE_NAME, lines)
        # The accounts come last: by now all names of classes are known.
        writer.close(tokenizer=counting.tokenizer, location=location, accounts=self.accounts)
        return self._reader.staging.publish()

    def _tar(self, number: int) -> ReadTar:
        """What was read of a tar, as the whole corpus decides."""
        read = self._reader.result(number)
        return replace(read, scan=self._judged(read.scan))

    def _judged(self, scan: Scan) -> Scan:
        images, members = not self._lacks_images, self._reader.members
        return scan.of_corpus(captions=self._has_captions, images=images, members=members)

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
