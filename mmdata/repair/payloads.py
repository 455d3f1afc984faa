"""Finds damaged payloads: images that do not decode, texts of zeros, and what is not the content that was indexed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmdata.errors import BadSample, Reason
from mmdata.hashing import fast_hash, hash64
from mmdata.images.probe import NO_LIMITS, probe, sniff
from mmdata.index.manifest import Manifest
from mmdata.repair.accounts import Dropped
from mmdata.tars.members import USUAL, Members
from mmdata.tars.samples import IMAGE_EXTENSIONS, MAX_IMAGE_BYTES, Group, texts_of
from mmdata.tars.tar import Member

TEXT_EXTENSIONS = frozenset(("txt", "json", "cls", "caption", "text", "cap"))
"""Last parts of the extensions of captions, labels and metadata."""
_UNCHECKABLE = (Reason.UNSUPPORTED_FORMAT, Reason.IMAGE_TOO_LARGE)

CheckImage = Callable[[bytes], None]
"""Raises BadSample for the bytes of an image that is damaged."""


def check_header(data: bytes) -> None:
    """A `CheckImage` that reads only the image's header."""
    probe(data, limits=NO_LIMITS)


def is_image(extension: str) -> bool:
    """Whether an extension is that of an image: "jpg", "seg.png"."""
    return extension.rpartition(".")[2] in IMAGE_EXTENSIONS


def is_text(extension: str) -> bool:
    """Whether an extension is that of a caption, a label or metadata: "txt", "meta.json"."""
    return extension.rpartition(".")[2] in TEXT_EXTENSIONS


@dataclass(frozen=True)
class Indexed:
    """The hashes of one tar in its index, by key.

    Attributes:
        members: which members the index was made of.
        images: XXH3 and the first 64 bits of the SHA-256 of the image; the first is 0 in old indexes.
        captions: hash64 of each caption.
    """

    members: Members
    images: Mapping[str, tuple[int, int]]
    captions: Mapping[str, list[int]]


NOT_INDEXED = Indexed(USUAL, {}, {})


def read_indexed(manifest: Manifest, shard: int) -> Indexed:
    """The hashes of a tar; raises DataError if its index is damaged."""
    columns = manifest.columns(shard)
    columns.check()
    keys: list[str] = columns.keys.to_pylist()
    slow = columns.fixed("image_hash").tolist()
    fast = columns.fixed("image_xxh3").tolist() if columns.has_fast_hash else [0] * len(keys)
    offsets, hashes = columns.lists("caption_hash")
    captions = {key: hashes[offsets[i] : offsets[i + 1]].tolist() for i, key in enumerate(keys)}
    return Indexed(manifest.members, dict(zip(keys, zip(fast, slow, strict=True), strict=True)), captions)


class Payloads:
    """Looks at payloads.

    Args:
        check_image: tells a damaged image; None: images are not looked at.

    Attributes:
        unchecked: images that cannot be decoded here.
    """

    def __init__(self, check_image: CheckImage | None) -> None:
        self._check_image = check_image
        self.unchecked = 0

    def fault(self, extension: str, member: Member, read: Callable[[Member], bytes]) -> tuple[Dropped, str] | None:
        """Why a member cannot be kept; None for a sound one, or one of which this cannot be known."""
        if self._check_image is None:
            return None
        if is_text(extension):
            data = read(member) if member.size <= MAX_IMAGE_BYTES else b"\1"
            zeros = bool(data) and not data.strip(b"\0")
            return (Dropped.ONLY_ZEROS, f"{member.size} bytes, all of them zero") if zeros else None
        if not is_image(extension):
            return None
        if member.size > MAX_IMAGE_BYTES:
            self.unchecked += 1
            return None
        try:
            self._check_image(read(member))
        except BadSample as bad:
            if bad.reason not in _UNCHECKABLE:
                return Dropped.DAMAGED_IMAGE, str(bad)
            self.unchecked += 1
        return None


def has_image_magic(member: Member, read: Callable[[Member], bytes]) -> bool:
    """Whether a member with an extension of no image starts as one."""
    return sniff(read(Member(member.name, member.offset, min(member.size, 64), member.start))) is not None


def changed(indexed: Indexed, group: Group, read: Callable[[Member], bytes], *, is_partial: bool) -> dict[str, str]:
    """Extensions of members of a sample that are not what was indexed, each with what differs.

    Args:
        indexed: hashes of the sample's tar.
        group: the sample's members.
        read: gives the bytes of one.
        is_partial: whether the sample lost members; its captions may then come from another one.
    """
    found: dict[str, str] = {}
    if (hashes := indexed.images.get(group.key)) is not None:
        named = [selector.extension for selector in indexed.members.image]
        images = [one for one in group.members if one in named or (not named and one in IMAGE_EXTENSIONS)]
        data = read(group.members[images[0]]) if images else b""
        if images and (fast_hash(data) != hashes[0] if hashes[0] else hash64(data) != hashes[1]):
            found[images[0]] = "the image is not the one that was indexed"
    if group.key in indexed.captions and not is_partial:
        try:
            texts = texts_of(group, read, needs_caption=False, members=indexed.members)
        except BadSample as bad:
            kinds = [one for one in group.members if is_text(one)]
            return found | dict.fromkeys(kinds[:1], f"its captions were indexed, and cannot be read: {bad}")
        if [hash64(one.encode()) for one in texts.captions] != indexed.captions[group.key] and texts.source:
            found[texts.source] = "the captions are not those that were indexed"
    return found
