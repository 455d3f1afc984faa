"""Reads a tar strictly: each sample becomes a row of the index, or a line of the list of left-out rows."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mmdata.errors import BadSample, DamagedShard, DataError, Reason
from mmdata.hashing import fast_hash, fast_hash_of, hash64
from mmdata.images.probe import FORMATS, Limits, probe
from mmdata.system import read_at, read_into
from mmdata.tars.captions import JSON, JSON_KEY, NO_CAPTION, TXT
from mmdata.tars.members import USUAL, Members
from mmdata.tars.samples import (
    IMAGE_EXTENSIONS,
    Group,
    ReadMember,
    SampleReader,
    image_member,
    split_sample,
    texts_of,
)
from mmdata.tars.tar import Member, read_members
from mmdata.tars.texts import Loss, SampleTexts, missing_caption

NO_IMAGE = 255
"""The `image_format` of a row without an image."""
READ_BYTES = 2**18
"""Bytes that are read of a tar at once."""
HELD_BYTES = 2**26
"""Payloads of the last members that are held until their sample is complete; an image before them is read again."""

NO_MEMBER = Member("", 0, 0, 0)


class IndexedMember(NamedTuple):
    """A member of a sample that is not its image.

    Attributes:
        extension: as in `Group.members`.
        offset, size: of the payload, in bytes.
        xxh3: `fast_hash` of the payload.
    """

    extension: str
    offset: int
    size: int
    xxh3: int


class IndexRow(NamedTuple):
    """What the index says of one sample: its columns, by name (see `mmdata.index.columns`).

    Of the captions, the index holds only hashes and lengths. `members` are all but the image.
    """

    key: str
    image_offset: int = 0
    image_bytes: int = 0
    image_format: int = NO_IMAGE
    caption_offset: int = 0
    caption_bytes: int = 0
    caption_format: int = NO_CAPTION
    height: int = 0
    width: int = 0
    orientation: int = 1
    label: int = -1
    image_hash: int = 0
    image_xxh3: int = 0
    captions: Sequence[str] = ()
    members: Sequence[IndexedMember] = ()


class ScannedSample(NamedTuple):
    """A sample of a tar, as a corpus of images with captions or labels has it.

    Attributes:
        row: for the index; only key and members of a sample that cannot be used. Its label is -1 if `label` is a name.
        start: offset of the first member.
        label: class number, class name, or None.
        losses: parts of its text members that could not be used.
        fault: reason and detail; None for a sample that can be used.
        has_image: whether a member is its image, usable or not.
        has_caption: whether its texts hold a caption, usable or not.
    """

    row: IndexRow
    start: int
    label: int | str | None
    losses: dict[Loss, str]
    fault: tuple[Reason, str] | None
    has_image: bool
    has_caption: bool

    @property
    def is_damaged(self) -> bool:
        """Whether the tar is damaged in it."""
        return self.fault is not None and self.fault[0] is Reason.DAMAGED_SHARD

    @property
    def may_be_a_part(self) -> bool:
        """Whether it lacks what another tar may hold."""
        return not self.has_image or (self.fault is not None and self.fault[0] is Reason.MISSING_CAPTION)


@dataclass(frozen=True)
class Scan:
    """The samples of a tar.

    Attributes:
        shard: name of the tar.
        samples: all of them, in order.
        ignored: members that belong to no sample.
        damage: the place from which the tar could not be read, and why; None for a whole tar.
    """

    shard: str
    samples: list[ScannedSample] = field(default_factory=list[ScannedSample])
    ignored: int = 0
    damage: DamagedShard | None = None

    @property
    def usable(self) -> list[ScannedSample]:
        """The samples that become rows. Those of NO_CAPTION do in a corpus of labels only; see `of_corpus`."""
        return [sample for sample in self.samples if sample.fault is None]

    @property
    def quarantined(self) -> list[dict[str, Any]]:
        """The other samples, as lines of the list of left-out rows."""
        return [
            {
                "shard": self.shard,
                "key": sample.row.key,
                "offset": sample.start,
                "reason": sample.fault[0].value,
                "detail": sample.fault[1],
            }
            for sample in self.samples
            if sample.fault is not None
        ]

    @property
    def rows(self) -> list[IndexRow]:
        """Those of the usable samples."""
        return [sample.row for sample in self.usable]

    @property
    def losses(self) -> list[tuple[str, dict[Loss, str]]]:
        """(key, what was lost) of the usable samples with losses."""
        return [(sample.row.key, sample.losses) for sample in self.usable if sample.losses]

    @property
    def edges(self) -> list[ScannedSample]:
        """The first and the last sample, whose other members may be in the tar before or after; empty without any."""
        whole = [sample for sample in self.samples if not sample.is_damaged]
        return [whole[0], whole[-1]] if whole else []

    @property
    def has_captions(self) -> bool:
        """Whether any usable sample has a caption."""
        return any(sample.row.captions for sample in self.usable)

    @property
    def may_lack_images(self) -> bool:
        """Whether no sample has an image, but maybe one in which the tar is damaged."""
        return all(not sample.has_image for sample in self.samples if not sample.is_damaged)

    def of_corpus(self, *, captions: bool = False, images: bool = True, members: Members = USUAL) -> Scan:
        """The same samples as those of a corpus with captions, where one without is left out; or without images."""

        def judged(sample: ScannedSample) -> ScannedSample:
            if sample.is_damaged:
                return sample
            if not images:
                row = IndexRow(sample.row.key, members=sample.row.members)
                return sample._replace(row=row, label=None, losses={}, fault=None)
            if captions and not sample.has_caption:
                bad = missing_caption(members)
                return sample._replace(losses={}, fault=(bad.reason, bad.detail))
            return sample

        return replace(self, samples=[judged(sample) for sample in self.samples])

    def without_sound_rows(self) -> Scan:
        """The edges, and the samples that some corpus leaves out; of their rows the keys alone."""
        edges = self.edges
        kept = [s for s in self.samples if s.fault is not None or not s.has_caption or any(s is edge for edge in edges)]
        return replace(self, samples=[sample._replace(row=IndexRow(sample.row.key)) for sample in kept])


def scan_shard(
    shard: Path | int,
    *,
    limits: Limits,
    name: str,
    members: Members = USUAL,
    step: Callable[[int], object] = lambda offset: None,
    on_bytes: Callable[[memoryview], object] | None = None,
) -> Scan:
    """Read a tar strictly, once, from front to back.

    Args:
        shard: path of the tar, or a descriptor, which is closed.
        limits: images outside them are not used.
        name: of the tar, for messages and the list of left-out rows.
        members: which members are image, caption and label.
        step: called with the offset of each sample.
        on_bytes: called with all bytes of the file, in order, also with those behind damage; None: these are not read.

    Returns:
        The samples; of a damaged tar those before the damage, and `Scan.damage`. The sample in which the damage lies is
        left out: nobody knows whether it is complete.
    """
    samples: list[ScannedSample] = []
    damage: DamagedShard | None = None
    with _File(shard, on_bytes) as file:
        tar = _TarInPassing(file)
        reader = SampleReader(tar.hashed(read_members(tar, name=name)), name=name)
        try:
            for group in reader:
                samples.append(scan_sample(group, tar.payload, limits=limits, members=members))
                tar.forget()
                step(group.start)
        except DamagedShard as error:
            damage = error
            key, start = error.sample
            if key:
                fault = (Reason.DAMAGED_SHARD, error.what)
                samples.append(ScannedSample(IndexRow(key), start, None, {}, fault, has_image=True, has_caption=True))
        if on_bytes is not None:
            tar.seek(tar.size)
    return Scan(name, samples, reader.ignored, damage)


class _File(io.FileIO):
    """A file from its first byte on; it shows all that is read of it."""

    def __init__(self, file: Path | int, on_bytes: Callable[[memoryview], object] | None) -> None:
        super().__init__(file)
        self._on_bytes = on_bytes
        self._at = 0

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer. Others may read by the same descriptor, whose own position is of no use."""
        count = read_into(self.fileno(), buffer, self._at)
        self._at += count
        if self._on_bytes is not None:
            self._on_bytes(memoryview(buffer)[:count])
        return count


class _TarInPassing:
    """A tar that is read once, from front to back; see `mmdata.tars.tar.Seekable`."""

    def __init__(self, file: _File) -> None:
        self._file = io.BufferedReader(file, READ_BYTES)
        self._at = 0
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self.size = os.fstat(file.fileno()).st_size

    def seek(self, offset: int, whence: int = 0) -> int:
        """Read up to an offset that lies ahead; or tell the size of the file, with SEEK_END."""
        if whence == os.SEEK_END:
            return self.size
        assert offset >= self._at
        while self._at < offset and self.read(min(READ_BYTES, offset - self._at)):
            pass
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes, fewer at the end."""
        data = self._file.read(size)
        self._at += len(data)
        return data

    def hashed(self, members: Iterable[Member]) -> Iterator[Member]:
        """The members with the hashes of their payloads, which are held while there is room."""
        for name, offset, size, start, split, _ in members:
            if size > HELD_BYTES // 4:
                sizes = (min(READ_BYTES, size - done) for done in range(0, size, READ_BYTES))
                yield Member(name, offset, size, start, split, fast_hash_of(map(self.read, sizes)))
                continue
            data = self.read(size)
            while self._held and self._held_bytes + size > HELD_BYTES:
                self._held_bytes -= len(self._held.pop(next(iter(self._held))))
            self._held[offset] = data
            self._held_bytes += size
            yield Member(name, offset, size, start, split, fast_hash(data))

    def forget(self) -> None:
        """Hold no payload but the last, which may be of the next sample."""
        for offset in [*self._held][:-1]:
            self._held_bytes -= len(self._held.pop(offset))

    def payload(self, member: Member) -> bytes:
        """The bytes of a member that was read."""
        held = self._held.get(member.offset)
        return read_at(self._file.fileno(), member.size, member.offset) if held is None else held


def scan_sample(group: Group, read: ReadMember, *, limits: Limits, members: Members = USUAL) -> ScannedSample:
    """What an index says of a sample: texts as `read_texts` reads them, the image that `image_member` chooses.

    Args:
        group: the members.
        read: gives the bytes of one.
        limits: images outside them are not used.
        members: which members are image, caption and label.
    """
    fault: BadSample | None = None
    has_caption = has_image = True
    texts, row = SampleTexts([], None, None), IndexRow(group.key)
    try:
        if group.key.startswith("/") or ".." in group.key.split("/"):
            raise BadSample(Reason.OUTSIDE_ROOT, "the key is absolute or climbs out of its folder")
        texts = texts_of(group, read, needs_caption=False, members=members)
        has_caption = bool(texts.captions)
    except BadSample as bad:
        fault, has_caption = bad, bad.reason is not Reason.MISSING_CAPTION
    image = None
    try:
        image = image_member(group, read, members)
        if fault is None:
            row = _row(group, image, read(image), texts, limits=limits, members=members)
    except BadSample as bad:
        fault, has_image = fault or bad, bad.reason is not Reason.MISSING_IMAGE
    if fault is not None:
        bare = IndexRow(group.key, members=_indexed(group))
        return ScannedSample(bare, group.start, None, {}, (fault.reason, fault.detail), has_image, has_caption)
    losses = texts.losses
    further = [f".{e}" for e, member in group.members.items() if e in IMAGE_EXTENSIONS and member is not image]
    if image is not None and further and not members.image:
        losses = {**losses, Loss.SECOND_IMAGE: f"{', '.join(further)} beside '{image.name}', which is used"}
    return ScannedSample(row, group.start, texts.label, losses, None, has_image, has_caption)


def _row(group: Group, image: Member, data: bytes, texts: SampleTexts, *, limits: Limits, members: Members) -> IndexRow:
    info = probe(data, limits=limits)
    caption = NO_MEMBER if texts.source is None else group.members[texts.source]
    return IndexRow(
        key=group.key,
        image_offset=image.offset,
        image_bytes=image.size,
        image_format=FORMATS.index(info.format),
        caption_offset=caption.offset,
        caption_bytes=caption.size,
        caption_format=_caption_format(texts, members),
        height=info.height,
        width=info.width,
        orientation=info.orientation,
        label=texts.label if isinstance(texts.label, int) else -1,
        image_hash=hash64(data),
        image_xxh3=image.xxh3,
        captions=texts.captions,
        members=_indexed(group, but=image),
    )


def _indexed(group: Group, *, but: Member | None = None) -> list[IndexedMember]:
    return [
        IndexedMember(extension, member.offset, member.size, member.xxh3)
        for extension, member in group.members.items()
        if member is not but
    ]


def _caption_format(texts: SampleTexts, members: Members) -> int:
    if texts.source is None:
        return NO_CAPTION
    # A selector's JSON may have any extension; without selectors JSON is .json.
    in_json = {s.extension for s in members.caption if s.key} if members.caption else {"json"}
    return TXT if texts.source not in in_json else JSON_KEY if members.caption else JSON


class Edges:
    """Finds samples whose members stand in two tars, of tars in their order."""

    def __init__(self) -> None:
        self._last: tuple[ScannedSample, str] | None = None  # the last sample, and its tar

    def add(self, shard: str, edges: Sequence[ScannedSample]) -> DataError | None:
        """Look at the next tar, by `Scan.edges`; the error if its first sample begins in the tar before."""
        if not edges:
            return None
        before, (first, last) = self._last, edges
        self._last = last, shard
        if before is None or before[0].row.key != first.row.key:
            return None
        is_split = before[0].may_be_a_part or first.may_be_a_part
        return split_sample(first.row.key, before[1], shard) if is_split else None
