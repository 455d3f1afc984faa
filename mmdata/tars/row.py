"""What a sample of a tar is to an index: where its members lie, and what they say."""

from __future__ import annotations

from dataclasses import dataclass

from mmdata.images.probe import ImageInfo


@dataclass(frozen=True)
class Place:
    """A member's payload in its shard: offset and size in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class Row:
    """What the index says of one sample. Of the captions, the index file holds only hashes and lengths."""

    key: str
    image: Place
    caption: Place
    caption_format: int
    info: ImageInfo
    label: int
    image_hash: int
    image_xxh3: int
    captions: list[str]
