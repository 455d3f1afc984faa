"""Groups members of a WebDataset tar to samples, and samples to rows of the index. Every member is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from mmdata.errors import BadSample, DamagedShard, DataError, Reason
from mmdata.hashing import fast_hash, hash64
from mmdata.images.probe import Limits, probe, sniff
from mmdata.tars.captions import JSON, JSON_KEY, MAX_CAPTION_BYTES, NO_CAPTION, TXT
from mmdata.tars.members import USUAL, Members
from mmdata.tars.row import Place, Row
from mmdata.tars.tar import Member, split_name
from mmdata.tars.texts import Loss, TextKind, Texts, read_texts

IMAGE_EXTENSIONS = frozenset(
    ("jpg", "jpeg", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic", "heif", "hif", "jxl")
)
TEXT_MEMBERS: tuple[TextKind, ...] = ("json", "txt", "cls")
"""Extensions of the text members."""
MAX_IMAGE_BYTES = 2**28
"""Largest image file, 256 MiB: larger than any photo, small enough to be read whole."""

ReadMember = Callable[[Member], bytes]


@dataclass(frozen=True)
class Group:
    """The members of one sample.

    Attributes:
        key: their common stem, with its folder.
        start: offset of the first member's header.
        members: extension (lower case; everything after the first dot, as in "seg.png") -> member, in the tar's order.
    """

    key: str
    start: int
    members: dict[str, Member]


class SampleReader:
    """Iterates over the samples of a tar, strictly.

    Args:
        members: of the tar, from `read_members`.
        name: of the shard, for messages.

    Attributes:
        ignored: members so far that belong to no sample (no extension, `__meta__`).

    Raises (while iterating):
        DamagedShard: what `members` raises, a key that returns after another key, an extension twice in a sample.
    """

    def __init__(self, members: Iterable[Member], *, name: str) -> None:
        self._members = members
        self._name = name
        self._unfinished: Group | None = None  # the sample whose members are being read
        self._last: Group | None = None  # the sample yielded last
        self._groups = self._read()
        self._peeked: list[Group] = []
        self._peeked_damage: DamagedShard | None = None
        self.ignored = 0

    def peek(self, count: int) -> list[Group]:
        """The first `count` samples, or those before the damage of the tar; iterating yields them again."""
        try:
            self._peeked += islice(self._groups, count - len(self._peeked))
        except DamagedShard as error:
            self._peeked_damage = error
        return self._peeked

    def __iter__(self) -> Iterator[Group]:
        yield from self._peeked
        if self._peeked_damage is not None:
            raise self._peeked_damage
        yield from self._groups

    def _read(self) -> Iterator[Group]:
        starts: dict[str, int] = {}
        for member in self._members:
            split = split_name(member.name)
            if split is None:
                self.ignored += 1
                continue
            key, extension = split
            group = self._unfinished
            if group is None or key != group.key:
                if group is not None:
                    self._last = group
                    yield group
                if key in starts:
                    raise DamagedShard(
                        f"shard '{self._name}': sample '{key}' starts at byte {starts[key]} and comes back at byte "
                        f"{member.start}",
                        "other readers make two samples of it: pack the tar again, sorted by name",
                    )
                starts[key] = member.start
                group = self._unfinished = Group(key, member.start, {})
            if extension in group.members:
                raise DamagedShard(
                    f"shard '{self._name}': sample '{key}' has .{extension} at byte "
                    f"{group.members[extension].start} and again at byte {member.start}",
                    "remove one",
                )
            group.members[extension] = member
        if self._unfinished is not None:
            yield self._unfinished

    def at_damage(self, error: DamagedShard) -> tuple[Group | None, tuple[str, int] | None]:
        """What iterating did not yield because of its error.

        Returns:
            The sample before the damage, if all its members were read. Key and offset of the sample in which the damage
            lies, if it is known: nobody knows whether that sample is complete.
        """
        before, last, damaged = self._unfinished, self._last, error.sample
        if before is None or before is last:
            before = None
        elif damaged[0] in ("", before.key):
            before, damaged = None, (before.key, before.start)
        if not damaged[0] or (last is not None and damaged[0] == last.key):
            return before, None
        return before, damaged


def split_sample(key: str, shard: str, following: str) -> DataError:
    """The error for a sample whose members are in two tars."""
    return DataError(
        f"sample '{key}' ends shard '{shard}' and starts shard '{following}': split over two shards; "
        "pack the tars again with whole samples"
    )


class Described(NamedTuple):
    """A sample that can be used.

    Attributes:
        row: for the index; its label is -1 if `label` is a name.
        label: class number, class name, or None.
        losses: parts of its text files that could not be used.
    """

    row: Row
    label: int | str | None
    losses: dict[Loss, str]


def describe(
    group: Group, read: ReadMember, *, limits: Limits, needs_caption: bool = True, members: Members = USUAL
) -> Described:
    """The row of a sample: captions and label as `read_texts` reads them, the image as `image_member` chooses it.

    Args:
        group: the members.
        read: gives the bytes of one.
        limits: images outside them are not used.
        needs_caption: see `read_texts`.
        members: which members are image, caption and label.

    Raises:
        BadSample: the sample cannot be used; the reason says why.
    """
    if group.key.startswith("/") or ".." in group.key.split("/"):
        raise BadSample(Reason.OUTSIDE_ROOT, "the key is absolute or climbs out of its folder")
    texts = texts_of(group, read, needs_caption=needs_caption, members=members)
    image = image_member(group, read, members)
    data = read(image)
    info = probe(data, limits=limits)
    row = Row(
        key=group.key,
        image=Place(image.offset, image.size),
        **_caption_place(group, texts, members),
        info=info,
        label=texts.label if isinstance(texts.label, int) else -1,
        image_hash=hash64(data),
        image_xxh3=fast_hash(data),
        captions=texts.captions,
    )
    losses = texts.losses
    further = [f".{e}" for e, member in group.members.items() if e in IMAGE_EXTENSIONS and member is not image]
    if further and not members.image:
        losses = {**losses, Loss.SECOND_IMAGE: f"{', '.join(further)} beside '{image.name}', which is used"}
    return Described(row, texts.label, losses)


def _caption_place(group: Group, texts: Texts, members: Members) -> dict[str, Any]:
    """The columns that say where the captions of a row are."""
    if texts.source is None:
        return {"caption": Place(0, 0), "caption_format": NO_CAPTION}
    member = group.members[texts.source]
    # A selector's JSON may have any extension; without selectors JSON is .json.
    in_json = {s.extension for s in members.caption if s.key} if members.caption else {"json"}
    kind = TXT if texts.source not in in_json else JSON_KEY if members.caption else JSON
    return {"caption": Place(member.offset, member.size), "caption_format": kind}


def texts_of(group: Group, read: ReadMember, *, needs_caption: bool = True, members: Members = USUAL) -> Texts:
    """Captions, label and metadata of the .json, .txt and .cls members.

    Raises:
        BadSample: no member has a usable caption.
    """

    def read_member(kind: TextKind) -> bytes:
        member = group.members[kind]
        if member.size > MAX_CAPTION_BYTES:
            detail = f"'{member.name}': {member.size} bytes; at most {MAX_CAPTION_BYTES}"
            raise BadSample(Reason.CAPTION_TOO_LONG, detail)
        return read(member)

    named = [selector.extension for selector in (*members.caption, *members.label)]
    kinds = [kind for kind in (*TEXT_MEMBERS, *named) if kind in group.members]
    return read_texts(kinds, read_member, needs_caption=needs_caption, members=members)


def image_member(group: Group, read: ReadMember, members: Members = USUAL) -> Member:
    """The sample's image: the first member with an extension of an image, else the first with an image's magic bytes.

    Selectors in `members` take the place of the extensions of images; only members that they name are then looked at.

    Raises:
        BadSample: there is none, or it is larger than `MAX_IMAGE_BYTES`.
    """
    named = [member for extension, member in group.members.items() if extension in IMAGE_EXTENSIONS]
    if members.image:
        named = [group.members[one.extension] for one in members.image if one.extension in group.members]
        if not named:
            listed = " or ".join(one.words for one in members.image)
            raise BadSample(Reason.MISSING_IMAGE, f"no {listed} among {', '.join('.' + e for e in group.members)}")
    others = [member for extension, member in group.members.items() if extension not in TEXT_MEMBERS]
    for member in named[:1] or others:
        if member.size > MAX_IMAGE_BYTES:
            raise BadSample(Reason.IMAGE_TOO_LARGE, f"'{member.name}': {member.size} bytes")
        if named or sniff(read(member)):
            return member
    raise BadSample(Reason.MISSING_IMAGE, f"no image among {', '.join('.' + e for e in group.members)}")
