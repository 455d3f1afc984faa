"""What a sample of a tar is to an index: where its members lie, and what they say."""

from __future__ import annotations

from typing import NamedTuple

from mmdata.images.probe import FORMATS, ImageInfo

NO_IMAGE = 255
"""The `image_format` of a row without an image: its other columns of an image, and its captions, are empty."""


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
    image_offset: int
    image_bytes: int
    image_format: int
    caption_offset: int
    caption_bytes: int
    caption_format: int
    height: int
    width: int
    orientation: int
    label: int
    image_hash: int
    image_xxh3: int
    captions: list[str]
    members: list[IndexedMember]

    @property
    def info(self) -> ImageInfo:
        """What the header of the image says."""
        return ImageInfo(FORMATS[self.image_format], self.height, self.width, self.orientation)
