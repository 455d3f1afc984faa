"""Reads a tar strictly: each sample becomes a row, or a line of the quarantine list with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

from mmdata.errors import BadSample, DamagedShard, DataError, Reason
from mmdata.hashing import fast_hash, fast_hash_of
from mmdata.images.decoder_warnings import name_warnings, sample_name
from mmdata.images.probe import Limits
from mmdata.tars.block_reader import BlockReader, Digest
from mmdata.tars.captions import NO_CAPTION
from mmdata.tars.members import USUAL, Members
from mmdata.tars.row import IndexRow
from mmdata.tars.samples import (
    Group,
    HashMember,
    ReadMember,
    SampleReader,
    describe,
    image_member,
    split_sample,
    without_image,
)
from mmdata.tars.tar import Member, read_members
from mmdata.tars.texts import Loss, missing_caption

HASHED_BYTES = 2**24
"""Bytes of a member that are hashed at once: it may be larger than memory."""
TEXT_BYTES, MOST_TEXTS = 2**14, 16
"""Size and number of the members that are held until they are hashed."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Edge(NamedTuple):
    """The first or the last sample of a tar, whose other members may be in the tar before or after it.

    Attributes:
        key: of the sample.
        complete: whether it has an image, and a caption or a label.
        has_caption: whether it has a caption.
    """

    key: str
    complete: bool
    has_caption: bool


@dataclass(frozen=True)
class Scan:
    """The samples of a tar.

    Attributes:
        rows: of the usable samples; the label is -1 if it is a name. Rows of NO_CAPTION have a label and no caption:
            they are used only in a corpus of labels only (see `in_captioned_corpus`).
        starts: offset of each row's first member.
        labels: of the usable samples: class number, class name, or None.
        losses: (key, what was lost) of usable samples with losses.
        quarantined: entries of the other samples, as in `IndexReport`.
        imageless: rows of those of the other samples that have no image (see `in_corpus_without_images`).
        mute: offsets of those of the other samples that have a label and no caption: the missing caption is the reason
            in a corpus with captions, whatever their image is.
        samples: number of samples, counted independently of the two lists.
        ignored: members that belong to no sample.
        edges: the first and the last sample; empty if there is none.
        damage: the place from which the tar could not be read, and why; None for a whole tar.
    """

    rows: list[IndexRow] = field(default_factory=list[IndexRow])
    starts: list[int] = field(default_factory=list[int])
    labels: list[int | str | None] = field(default_factory=list["int | str | None"])
    losses: list[tuple[str, dict[Loss, str]]] = field(default_factory=list[tuple[str, dict[Loss, str]]])
    quarantined: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    imageless: list[IndexRow] = field(default_factory=list[IndexRow])
    mute: list[int] = field(default_factory=list[int])
    samples: int = 0
    ignored: int = 0
    edges: list[Edge] = field(default_factory=list[Edge])
    damage: DamagedShard | None = None

    @property
    def has_captions(self) -> bool:
        """Whether any usable sample has a caption."""
        return any(row.captions for row in self.rows)

    @property
    def has_mute(self) -> bool:
        """Whether any sample has a label and no caption."""
        return bool(self.mute) or any(row.caption_format == NO_CAPTION for row in self.rows)

    @property
    def may_lack_images(self) -> bool:
        """Whether no sample has an image, but maybe one in which the tar is damaged."""
        whole = [line for line in self.quarantined if line["reason"] != Reason.DAMAGED_SHARD]
        return not self.rows and len(whole) == len(self.imageless)

    def in_corpus_without_images(self) -> Scan:
        """The same samples as those of a corpus without images: each is a row."""
        starts = [line["offset"] for line in self.quarantined if line["reason"] != Reason.DAMAGED_SHARD]
        left_out = [line for line in self.quarantined if line["reason"] == Reason.DAMAGED_SHARD]
        rows = self.imageless
        return replace(
            self, rows=rows, starts=starts, labels=[None] * len(rows), quarantined=left_out, imageless=[], mute=[]
        )

    def without_sound_rows(self) -> Scan:
        """Without the rows that need no second look, so that memory holds those of one tar."""
        mute = [i for i, row in enumerate(self.rows) if not row.captions]
        rows, starts, labels = ([values[i] for i in mute] for values in (self.rows, self.starts, self.labels))
        return replace(self, rows=rows, starts=starts, labels=labels, losses=[], imageless=[])

    def in_captioned_corpus(self, shard: str, members: Members = USUAL) -> Scan:
        """The same samples as those of a corpus with captions: those without a caption are quarantined for that."""
        if not self.has_mute:
            return self
        bad = missing_caption(members)
        dropped = {i for i, row in enumerate(self.rows) if row.caption_format == NO_CAPTION}
        lines = [_quarantine_line(shard, self.rows[i].key, self.starts[i], bad) for i in sorted(dropped)]
        for line in self.quarantined:
            mute = line["offset"] in self.mute
            lines.append(_quarantine_line(shard, line["key"], line["offset"], bad) if mute else line)
        keys = {self.rows[i].key for i in dropped}
        kept = [i for i in range(len(self.rows)) if i not in dropped]
        return replace(
            self,
            rows=[self.rows[i] for i in kept],
            starts=[self.starts[i] for i in kept],
            labels=[self.labels[i] for i in kept],
            losses=[(key, lost) for key, lost in self.losses if key not in keys],
            quarantined=sorted(lines, key=lambda line: line["offset"]),
            imageless=[],
            mute=[],
            edges=[edge._replace(complete=edge.complete and edge.has_caption) for edge in self.edges],
        )


def scan_shard(
    path: Path,
    *,
    limits: Limits,
    members: Members = USUAL,
    step: Callable[[int], None] = lambda offset: None,
    name: str | None = None,
    digest: Digest | None = None,
) -> Scan:
    """Read a tar strictly.

    Args:
        path: of the tar.
        name: of the tar, for messages and the quarantine list; default: the file's name.
        limits: images outside them are quarantined.
        members: which members are image, caption and label.
        step: called with the offset of each sample.
        digest: gets all bytes of the file, also those behind damage; None: the file is not hashed.

    Returns:
        The samples; of a damaged tar those before the damage, and `Scan.damage`. The sample in which the damage lies is
        quarantined: nobody knows whether it is complete.
    """
    name = path.name if name is None else name
    with path.open("rb", buffering=0) as file:
        return scan_file(file, limits=limits, members=members, step=step, name=name, digest=digest)


def scan_file(
    file: BinaryIO,
    *,
    limits: Limits,
    members: Members,
    step: Callable[[int], None],
    name: str,
    digest: Digest | None = None,
) -> Scan:
    """Read a tar that is open; see `scan_shard`."""
    blocks = BlockReader(file, digest)
    texts: dict[int, bytes] = {}  # small members that were read, by offset: they are hashed next

    def read(member: Member) -> bytes:
        blocks.seek(member.offset)
        data = blocks.read(member.size)
        if len(data) <= TEXT_BYTES:
            if len(texts) == MOST_TEXTS:
                texts.clear()
            texts[member.offset] = data
        return data

    def hash_of(member: Member) -> int:
        if member.size <= HASHED_BYTES:
            data = texts.get(member.offset)
            return fast_hash(read(member) if data is None else data)
        blocks.seek(member.offset)
        sizes = (min(HASHED_BYTES, member.size - start) for start in range(0, member.size, HASHED_BYTES))
        return fast_hash_of(map(blocks.read, sizes))

    reader = SampleReader(read_members(blocks, name=name), name=name)
    scan = _Scanner(name, limits, members, hash_of)
    damage: DamagedShard | None = None
    try:
        for group in reader:
            scan.add(group, read)
            step(group.start)
    except DamagedShard as error:
        damage = error
        before, damaged = reader.at_damage(error)
        if before is not None:
            scan.add(before, read)
        if damaged is not None:
            scan.add_damaged(*damaged, error)
    blocks.drain()
    return scan.finish(reader.ignored, damage)


class _Scanner:
    """The samples of a tar so far."""

    def __init__(self, name: str, limits: Limits, members: Members, hash_of: HashMember) -> None:
        self._name, self._limits, self._members, self._hash_of = name, limits, members, hash_of
        self._scan = Scan()
        self._samples = 0

    def add(self, group: Group, read: ReadMember) -> None:
        """Examine a sample."""
        scan = self._scan
        self._samples += 1
        try:
            with name_warnings(partial(sample_name, self._name, group.key)):
                row, label, lost = describe(
                    group,
                    read,
                    limits=self._limits,
                    needs_caption=False,
                    members=self._members,
                    hash_of=self._hash_of,
                )
            scan.rows.append(row)
            scan.starts.append(group.start)
            scan.labels.append(label)
            edge = Edge(group.key, True, bool(row.captions))
            if lost:
                scan.losses.append((group.key, lost))
        except BadSample as bad:
            scan.quarantined.append(_quarantine_line(self._name, group.key, group.start, bad))
            if mute := self._lacks_caption(group, read):
                scan.mute.append(group.start)
            if self._lacks_image(group, read):
                scan.imageless.append(without_image(group, self._hash_of))
            complete = bad.reason not in (Reason.MISSING_IMAGE, Reason.MISSING_CAPTION)
            edge = Edge(group.key, complete, complete and not mute)
        scan.edges[:] = [edge, edge] if not scan.edges else [scan.edges[0], edge]

    def _lacks_image(self, group: Group, read: ReadMember) -> bool:
        try:
            image_member(group, read, self._members)
        except BadSample as bad:
            return bad.reason is Reason.MISSING_IMAGE
        return False

    def _lacks_caption(self, group: Group, read: ReadMember) -> bool:
        """Whether a bad sample would be quarantined for its missing caption in a corpus with captions."""
        try:
            describe(group, read, limits=self._limits, members=self._members)
        except BadSample as bad:
            return bad.reason is Reason.MISSING_CAPTION
        return False

    def add_damaged(self, key: str, start: int, error: DamagedShard) -> None:
        """Quarantine the sample in which the tar is damaged."""
        self._samples += 1
        bad = BadSample(Reason.DAMAGED_SHARD, error.what)
        self._scan.quarantined.append(_quarantine_line(self._name, key, start, bad))

    def finish(self, ignored: int, damage: DamagedShard | None) -> Scan:
        """The samples, when the tar has ended."""
        scan = self._scan
        return replace(scan, samples=self._samples, ignored=ignored, damage=damage)


class Edges:
    """Finds samples whose members stand in two tars, of tars in their order."""

    def __init__(self) -> None:
        self._last: tuple[Edge, str] | None = None  # the last sample, and its tar

    def add(self, shard: str, edges: Sequence[Edge]) -> DataError | None:
        """Look at the next tar; the error if the tar before ends with the first sample of this one, in parts."""
        if not edges:
            return None
        before, (first, last) = self._last, edges
        self._last = last, shard
        if before is not None and before[0].key == first.key and not (before[0].complete and first.complete):
            return split_sample(first.key, before[1], shard)
        return None


class Bar:
    """Reports progress over tars that are read in any order.

    Args:
        progress: called with (bytes done, bytes in all); may be None.
        sizes: of the tars, in bytes; those not known yet are taken to be as large as the others on average.
    """

    def __init__(self, progress: Progress | None, sizes: Sequence[int | None]) -> None:
        self._progress, self._sizes = progress, [*sizes]
        self._offsets = [0] * len(sizes)
        self._done = 0
        self._total = sum(size or 0 for size in sizes)
        self._unknown = {number for number, size in enumerate(sizes) if size is None}
        self._lock = Lock()

    def steps(self, number: int) -> Callable[[int], None]:
        """A callback for the offsets that are reached in a tar."""
        return partial(self._reach, number)

    def finish(self, number: int, size: int) -> None:
        """Count a whole tar of `size` bytes."""
        self._sizes[number] = size
        self._reach(number, size)

    def _reach(self, number: int, offset: int) -> None:
        with self._lock:
            if number in self._unknown and (size := self._sizes[number]) is not None:
                self._unknown.remove(number)
                self._total += size
            self._done += offset - self._offsets[number]
            self._offsets[number] = offset
            if self._progress:
                total = self._total * len(self._sizes) // max(len(self._sizes) - len(self._unknown), 1)
                self._progress(self._done, max(total, self._done))


def _quarantine_line(shard: str, key: str, start: int, bad: BadSample) -> dict[str, Any]:
    return {"shard": shard, "key": key, "offset": start, "reason": bad.reason.value, "detail": bad.detail}
