"""The section data.targets: what is known of parts of an image, and follows its crop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmdata.config.settings import Count, Positive, Settings, Share

SOURCES = ("boxes", "box_labels", "box_texts", "keypoints", "masks")
"""Settings that name members; in this order a row's values are checked."""
OF_CROPS = {"min_visible", "keep_boxes", "keypoint_swaps"}
"""Settings that say how boxes follow a crop; others say what is read."""


class TargetsConfig(Settings):
    """Boxes, key points and masks of each image, in the pixels of the batch: they follow its crop and flip. A source is
    a member of the sample, as in `fields`; `json:boxes.category` has a value for each object of a list."""

    boxes: str | None = None
    """Source of the boxes: a list of four numbers each, or of objects with such a `bbox`, as `mmdata convert` writes
    them. A row whose JSON gives another size than the image has is masked."""
    box_format: Literal["xywh", "xyxy", "relative"] = "xywh"
    """What the four numbers are. xywh: left, top, width and height in pixels, as COCO's. xyxy: left, top, right and
    bottom in pixels. relative: left, top, right and bottom from 0 to 1."""
    box_pixels: Literal["original", "file", "upright"] = "original"
    """Of which image the pixels are. original: the image before `--resize` and its EXIF orientation, whose size is
    original_height × original_width in the JSON beside the boxes, or height × width. file: the image in the shard,
    before its EXIF orientation. upright: that image as displayed, as a detector sees it."""
    box_labels: str | None = None
    """Source of a class for each box: whole numbers, or names of `box_classes`; -1 for a box without one."""
    box_classes: list[str] | None = None
    """Names of the classes 0, 1, …, where `box_labels` are names. A box of another class is left out."""
    box_texts: str | None = None
    """Source of a phrase for each box, which `tokenizer` tokenizes. A box may have none."""
    box_text_length: Positive = 16
    """Number of tokens of each phrase in a batch; longer ones are cut."""
    keypoints: str | None = None
    """Source of the key points of each box: x, y and visibility of each point, in pixels, in one list or in lists of
    three. A point outside the crop has visibility 0, and so have those of a box without any."""
    keypoint_swaps: list[tuple[Count, Count]] | None = None
    """Pairs of key points, from 0, that a horizontal flip exchanges, such as left and right eye."""
    masks: str | None = None
    """Source of masks. A member `seg.png`: a class for each pixel of the image in the shard (`box_pixels`: file, or
    upright); a palette's colours are not used. `json:boxes.segmentation`: run lengths or polygons of each box, as
    COCO's."""
    min_visible: Share = 0.25
    """Share of a box's area that a crop must keep; a box with less of it, or with none, is left out."""
    keep_boxes: bool = False
    """Random crops hold all boxes of their image, whatever `crop_scale` says."""
    box_buckets: Positive | Annotated[list[Positive], Field(min_length=1)] = 1
    """Numbers of boxes that batches have room for: each row goes to the smallest that holds its boxes. A number: choose
    up to so many, of 100 boxes at most, that leave the least padding. Of more boxes the largest are kept."""

    @property
    def is_joined(self) -> bool:
        """Whether a source lies in joined tars."""
        return any(str(getattr(self, name)).startswith("join:") for name in SOURCES)

    @model_validator(mode="after")
    def _check(self) -> TargetsConfig:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if "boxes" not in given and given not in ([], ["masks"]):
            raise ValueError(f"{given[0]} are those of boxes: set boxes to their source, such as json:boxes")
        if not given:
            raise ValueError("set boxes or masks to their source, such as json:boxes or seg.png")
        if isinstance(self.box_buckets, list) and sorted(set(self.box_buckets)) != self.box_buckets:
            raise ValueError(f"box_buckets must rise: got {self.box_buckets}")
        return self
