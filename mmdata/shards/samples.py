"""Members to samples, samples to rows: what anyone's WebDataset tar means here. Every member is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from mmdata.errors import BadSample, DataError, Reason
from mmdata.shards.captions import JSON, MAX_CAPTION_BYTES, TXT, captions_of, parse_json
from mmdata.shards.columns import Place, Row, hash64
from mmdata.shards.probe import Limits, probe, sniff
from mmdata.shards.tar import Member, read_members, split_name
from mmdata.shards.unread import unread_format

IMAGE_EXTENSIONS = frozenset(("jpg", "jpeg", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic"))
_NOT_IMAGES = frozenset(("txt", "json", "cls"))
MAX_IMAGE_BYTES = 2**28  # 256 MiB: larger than any photo, small enough to be read whole

ReadMember = Callable[[Member], bytes]


@dataclass(frozen=True)
class Group:
    """The members of one sample.

    Attributes:
        key: their common stem, with its folder.
        start: offset of the first one's header.
        members: extension (lower case, "seg.png" where there are several dots) -> member, in the tar's order.
    """

    key: str
    start: int
    members: dict[str, Member]


class SampleReader:
    """Iterates over the samples of a tar, strictly.

    Attributes:
        ignored: members seen so far that belong to no sample (no extension, `__meta__`).

    Raises (while iterating):
        DataError: all that `read_members` refuses, a key that comes back later, an extension twice in a sample.
    """

    def __init__(self, file: BinaryIO, *, name: str) -> None:
        self._file = file
        self._name = name
        self.ignored = 0

    def __iter__(self) -> Iterator[Group]:
        starts: dict[str, int] = {}
        group: Group | None = None
        for member in read_members(self._file, name=self._name):
            split = split_name(member.name)
            if split is None:
                self.ignored += 1
                continue
            key, extension = split
            if group is None or key != group.key:
                if group is not None:
                    yield group
                if key in starts:
                    raise DataError(
                        f"shard '{self._name}': sample '{key}' starts at byte {starts[key]} and comes back at byte "
                        f"{member.start}; other readers make two samples of it: pack the tar again, sorted by name"
                    )
                starts[key] = member.start
                group = Group(key, member.start, {})
            if extension in group.members:
                raise DataError(
                    f"shard '{self._name}': sample '{key}' has .{extension} at byte "
                    f"{group.members[extension].start} and again at byte {member.start}; remove one"
                )
            group.members[extension] = member
        if group is not None:
            yield group


def describe(group: Group, read: ReadMember, *, limits: Limits) -> Row:
    """The index row of a sample.

    Its image is the first member with an image's extension, else the first with an image's magic bytes. Its captions
    are the JSON member's "captions", else the .txt member, else the JSON member's "caption". Its label is the .cls
    member, else the JSON member's "label" where that is a whole number from 0.

    Raises:
        BadSample: the sample cannot be used; the reason says why.
    """
    if group.key.startswith("/") or ".." in group.key.split("/"):
        raise BadSample(Reason.OUTSIDE_ROOT, "the key is absolute or climbs out of its folder")
    image = image_member(group, read)
    data = read(image)
    info = probe(data, limits=limits)
    metadata: dict[str, Any] = {}
    if document := group.members.get("json"):
        metadata = parse_json(read(_bounded(document)))
    caption, caption_format = _caption_member(group, metadata)
    return Row(
        key=group.key,
        image=Place(image.offset, image.size),
        caption=Place(caption.offset, caption.size),
        caption_format=caption_format,
        info=info,
        label=_label(group, metadata, read),
        image_hash=hash64(data),
        captions=captions_of(read(_bounded(caption)), caption_format),
    )


def image_member(group: Group, read: ReadMember) -> Member:
    """The member that is the sample's image: see `describe`.

    Raises:
        BadSample: there is none, or it is larger than `MAX_IMAGE_BYTES`.
    """
    named = [member for extension, member in group.members.items() if extension in IMAGE_EXTENSIONS]
    others = [member for extension, member in group.members.items() if extension not in _NOT_IMAGES]
    not_read: list[Member] = []  # images, but of a format that has no decoder here: `probe` says which
    for member in named[:1] or others:
        if member.size > MAX_IMAGE_BYTES:
            raise BadSample(Reason.IMAGE_TOO_LARGE, f"'{member.name}': {member.size} bytes")
        if named or sniff(data := read(member)):
            return member
        if unread_format(data):
            not_read.append(member)
    if not_read:
        return not_read[0]
    raise BadSample(Reason.MISSING_IMAGE, f"no image among {', '.join('.' + e for e in group.members)}")


def _caption_member(group: Group, metadata: dict[str, Any]) -> tuple[Member, int]:
    if "captions" in metadata:
        return group.members["json"], JSON
    if "txt" in group.members:
        return group.members["txt"], TXT
    if "caption" in metadata:
        return group.members["json"], JSON
    seen = ", ".join("." + extension for extension in group.members)
    raise BadSample(Reason.MISSING_CAPTION, f'no .txt and no JSON "captions" or "caption" among {seen}')


def _bounded(member: Member) -> Member:
    if member.size > MAX_CAPTION_BYTES:
        raise BadSample(Reason.CAPTION_TOO_LONG, f"'{member.name}': {member.size} bytes; at most {MAX_CAPTION_BYTES}")
    return member


def _label(group: Group, metadata: dict[str, Any], read: ReadMember) -> int:
    if (member := group.members.get("cls")) is None:
        label = metadata.get("label")  # a word in others' JSON: only a class number is one of ours
        return label if type(label) is int and 0 <= label < 2**63 else -1
    text = read(_bounded(member)).strip()
    digits = text.lstrip(b"0") or text[-1:]
    if not text.isdigit() or len(digits) > 19 or int(digits) >= 2**63:  # Python refuses to parse thousands of digits
        raise BadSample(Reason.BROKEN_ROW, f"'{member.name}': not a class number: {text[:20]!r}")
    return int(digits)
