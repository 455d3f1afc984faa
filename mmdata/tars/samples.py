"""Groups the members of a WebDataset tar to samples, and makes of each a row of the index or the reason why not.

Every member and every sample is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mmdata.errors import BadSample, DamagedShard, DataError, Reason
from mmdata.images.probe import sniff
from mmdata.tars.captions import MAX_CAPTION_BYTES
from mmdata.tars.members import USUAL, Members
from mmdata.tars.tar import Member
from mmdata.tars.texts import ReadText, SampleTexts, TextKind, read_label, read_texts

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
        DamagedShard: what `members` raises, a key that returns after another key, an extension twice in a sample. Its
            `sample` is the one of which nobody knows whether it is complete; all before it were yielded.
    """

    def __init__(self, members: Iterable[Member], *, name: str) -> None:
        self._members = members
        self._name = name
        self.ignored = 0

    def __iter__(self) -> Iterator[Group]:
        starts: dict[str, int] = {}
        group: Group | None = None
        try:
            for member in self._members:
                if member.split is None:
                    self.ignored += 1
                    continue
                key, extension = member.split
                if group is None or key != group.key:
                    if group is not None:
                        yield group
                        group = None
                    if key in starts:
                        raise DamagedShard(
                            f"shard '{self._name}': sample '{key}' starts at byte {starts[key]} and comes back at byte "
                            f"{member.start}",
                            "other readers make two samples of it: pack the tar again, sorted by name",
                        )
                    starts[key] = member.start
                    group = Group(key, member.start, {})
                if extension in group.members:
                    raise DamagedShard(
                        f"shard '{self._name}': sample '{key}' has .{extension} at byte "
                        f"{group.members[extension].start} and again at byte {member.start}",
                        "remove one",
                    )
                group.members[extension] = member
        except DamagedShard as error:
            if group is not None and error.sample[0] not in ("", group.key):
                yield group  # the damage lies in the sample behind it
            elif group is not None:
                error.sample = (group.key, group.start)
            raise
        if group is not None:
            yield group


def texts_of(group: Group, read: ReadMember, *, needs_caption: bool = True, members: Members = USUAL) -> SampleTexts:
    """Captions, label and metadata of the .json, .txt and .cls members.

    Raises:
        BadSample: no member has a usable caption.
    """
    return read_texts(*_text_members(group, read, members), needs_caption=needs_caption, members=members)


def label_of(group: Group, read: ReadMember, members: Members = USUAL) -> int | str | None:
    """The label that `texts_of` gives; None if it cannot be used."""
    return read_label(*_text_members(group, read, members), members)


def _text_members(group: Group, read: ReadMember, members: Members) -> tuple[list[TextKind], ReadText]:
    """The kinds of text that a sample has, and what reads one."""

    def read_member(kind: TextKind) -> bytes:
        member = group.members[kind]
        if member.size > MAX_CAPTION_BYTES:
            detail = f"'{member.name}': {member.size} bytes; at most {MAX_CAPTION_BYTES}"
            raise BadSample(Reason.CAPTION_TOO_LONG, detail)
        return read(member)

    named = [selector.extension for selector in (*members.caption, *(members.label or ()))]
    return [kind for kind in (*TEXT_MEMBERS, *named) if kind in group.members], read_member


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
            if not named:
                continue  # a film, or features
            raise BadSample(Reason.IMAGE_TOO_LARGE, f"'{member.name}': {member.size} bytes")
        if named or sniff(read(member)):
            return member
    raise BadSample(Reason.MISSING_IMAGE, f"no image among {', '.join('.' + e for e in group.members)}")


def split_sample(key: str, shard: str, following: str) -> DataError:
    """The error for a sample whose members are in two tars."""
    return DataError(
        f"sample '{key}' ends shard '{shard}' and starts shard '{following}': split over two shards; "
        "pack the tars again with whole samples"
    )
