"""Buckets: the few shapes that batches may have, and the policies that give each row a bucket.

A policy sees only numbers from the index, so a row's bucket is known before a byte of the row is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mmdata.index.columns import ASPECT_BINS, aspect_bin, aspect_ratio


class Bucket(NamedTuple):
    """The shape of a batch.

    Attributes:
        length: text length in tokens. A policy gives each row a bucket that holds its caption, as cut to `max_length`.
        height: of the images, in pixels; 0 if images keep their own aspect ratio.
        width: of the images, in pixels; 0 if images keep their own aspect ratio.
        patches: largest number of patches of an image, if images keep their own aspect ratio; otherwise 0.
        rows: of a global batch; 0: as many as the plan says.
        boxes: of an image, at most (`data.targets`); 0: none.
    """

    length: int
    height: int
    width: int
    patches: int = 0
    rows: int = 0
    boxes: int = 0

    @property
    def image(self) -> str:
        """The image shape in words: "224 × 288", height before width, or "256 patches"."""
        return f"{self.patches} patches" if self.patches else f"{self.height} × {self.width}"


class Shapes(NamedTuple):
    """What a policy knows of n rows.

    Attributes:
        length: int64 (n,), tokens of the caption chosen for this epoch, special ones included.
        height: int64 (n,), pixels as displayed.
        width: int64 (n,), pixels as displayed.
        boxes: int64 (n,), of `data.targets`; 0 without them.
    """

    length: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]
    boxes: NDArray[np.int64]


class BucketPolicy(Protocol):
    """Lists the buckets, and gives each row a bucket. A bucket may say how many `rows` its global batches have.

    A policy that looks at nothing but the text length and `mmdata.index.columns.aspect_bin` can declare
    `uses_cells = True`: its buckets are then counted from the manifest, and no row is looked at.

    Example, a custom policy: landscape and portrait, any text.

        class Upright:
            buckets = (Bucket(77, 224, 288), Bucket(77, 288, 224))

            def assign(self, shapes: Shapes) -> NDArray[np.int64]:
                return (shapes.height > shapes.width).astype(np.int64)
    """

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All shapes that a batch may have."""
        ...

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        """Positions in `buckets`, int64 (n,)."""
        ...


class LengthAspectPolicy:
    """Text length bounds × numbers of boxes × image shapes.

    A row goes to the image shape nearest in aspect ratio, which is known to about 1 % (`aspect_bin`), and to the
    smallest bounds that hold its caption and its boxes (the largest bound, if none does).

    Args:
        lengths: rising bounds, in tokens.
        image_shapes: (height, width) pairs, in pixels.
        boxes: rising bounds, numbers of boxes.

    Example:
        LengthAspectPolicy([16, 77], [(224, 224), (192, 256)]) has four buckets: 16 or 77 tokens with a square image or
        a wide one.
    """

    def __init__(
        self, lengths: Sequence[int], image_shapes: Sequence[tuple[int, int]], boxes: Sequence[int] = (0,)
    ) -> None:
        if not image_shapes or len(set(image_shapes)) != len(image_shapes):
            raise ValueError(f"image_shapes must be different (height, width) pairs: got {list(image_shapes)}")
        self._bounds = _Bounds(lengths, boxes)
        self.uses_cells = len(boxes) == 1  # the cells of a manifest know no boxes
        self.buckets = self._bounds.buckets([Bucket(0, *shape) for shape in image_shapes])
        self._shape_of_bin = nearest_shapes(image_shapes)

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        """Positions in `buckets`, int64 (n,)."""
        return self._bounds.assign(self._shape_of_bin[aspect_bin(shapes.height, shapes.width)], shapes)


def nearest_shapes(image_shapes: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """For each aspect bin, the position of the (height, width) pair nearest in aspect ratio: int64 (ASPECT_BINS,)."""
    log_aspects = np.log([width / height for height, width in image_shapes])
    distance = np.abs(np.log(aspect_ratio(np.arange(ASPECT_BINS)))[:, None] - log_aspects)
    return distance.argmin(axis=1)


class _Bounds:
    """The bounds of text lengths and of numbers of boxes, for each kind of images.

    Args:
        lengths, boxes: of a policy.
    """

    def __init__(self, lengths: Sequence[int], boxes: Sequence[int]) -> None:
        self._lengths = _rising("lengths", lengths)
        self._boxes = _rising("boxes", boxes, least=0)

    def buckets(self, images: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets of some kinds of images, each with all of its bounds."""
        bounds = [(length, boxes) for boxes in self._boxes.tolist() for length in self._lengths.tolist()]
        return tuple(image._replace(length=length, boxes=boxes) for image in images for length, boxes in bounds)

    def assign(self, image: NDArray[np.int64], shapes: Shapes) -> NDArray[np.int64]:
        """Positions in `buckets` of n rows whose images are of these kinds, int64 (n,)."""
        boxes = image * len(self._boxes) + _smallest_bound(self._boxes, shapes.boxes)
        return boxes * len(self._lengths) + _smallest_bound(self._lengths, shapes.length)


def _rising(name: str, bounds: Sequence[int], *, least: int | None = None) -> NDArray[np.int64]:
    """The bounds of a policy, checked."""
    if not bounds or list(bounds) != sorted(set(bounds)) or (least is not None and bounds[0] < least):
        from_least = "" if least is None else f", from {least} on"
        raise ValueError(f"{name} must rise{from_least}: got {list(bounds)}")
    return np.asarray(bounds, np.int64)


def _smallest_bound(bounds: NDArray[np.int64], needed: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of n rows the position of the smallest bound that holds what it needs; of the largest, if none does."""
    if len(bounds) == 1:
        return np.zeros(len(needed), np.int64)
    return np.searchsorted(bounds, np.minimum(needed, bounds[-1]))


def fit_into_budget(
    buckets: Sequence[Bucket],
    token_budget: int,
    *,
    global_batch_size: int,
    multiple: int = 8,
    patch_size: int = 16,
) -> tuple[Bucket, ...]:
    """The buckets with as many rows in a batch as a budget of tokens allows.

    A row costs its bucket's text length plus its image's patches, padding included: what the towers compute.

    Args:
        buckets: of a policy.
        token_budget: largest number of tokens and patches in a global batch, over all ranks.
        global_batch_size: largest number of rows in a global batch.
        multiple: the rows of a batch are a multiple of this; the number of ranks must divide it.
        patch_size: side of a patch, in pixels; unused for buckets that give a number of patches.

    Raises:
        ValueError: `multiple` rows of a bucket do not fit.

    Example:
        65,536 tokens, patches of 16 and images of 224 × 224, thus 196 patches: 65,536 / (16 + 196) = 309.1, so 304 rows
        of 16 tokens, and 65,536 / (77 + 196) = 240.06, so 240 of 77 tokens.
    """
    tokens = [
        bucket.length + (bucket.patches or (bucket.height // patch_size) * (bucket.width // patch_size))
        for bucket in buckets
    ]
    most = max(tokens)
    if min(token_budget // most, global_batch_size) < multiple:
        bucket = buckets[tokens.index(most)]
        raise ValueError(
            f"{multiple} rows of {most} tokens and patches (text {bucket.length}, image {bucket.image}) do not fit "
            f"into token_budget {token_budget} and global_batch_size {global_batch_size}; set token_budget to "
            f"{multiple * most} or more"
        )
    rows = [min(token_budget // each, global_batch_size) // multiple * multiple for each in tokens]
    return tuple(bucket._replace(rows=count) for bucket, count in zip(buckets, rows, strict=True))


def merge_groups(buckets: Sequence[Bucket]) -> list[tuple[list[int], list[int]]]:
    """The groups of buckets whose leftover rows are merged, in order.

    The longest texts of all image shapes come first, because their padding would cost most; some images then get the
    crop of another shape. Then come the buckets of each image shape and number of boxes: the rows that they leave over
    go to the same shape with more boxes, then to the next shape. If images keep their own aspect ratio, the next shape
    has more patches.

    Returns:
        (group, targets) pairs: a group's buckets, longest text first, and for each of them the bucket that receives its
        leftover rows; the last group has no targets.

    Example:
        For (8, a), (16, a), (8, b), (16, b): [([1, 3], [1, 3]), ([1, 0], [3, 2]), ([3, 2], [])].
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for position in sorted(range(len(buckets)), key=lambda i: (-buckets[i].length, i)):
        bucket = buckets[position]
        shapes.setdefault((bucket.height, bucket.width, bucket.patches, bucket.boxes), []).append(position)

    def order(group: list[int]) -> tuple[int, ...]:
        first = buckets[group[0]]
        return first.length, first.patches, first.boxes, min(group)

    groups = sorted(shapes.values(), key=order)
    longest = max(bucket.length for bucket in buckets)
    merges: list[tuple[list[int], list[int]]] = []
    for boxes in sorted({bucket.boxes for bucket in buckets}):
        tops = [i for i, bucket in enumerate(buckets) if bucket.length == longest and bucket.boxes == boxes]
        # A batch has the bucket of its first row, so the bucket with the most patches comes first: it holds all images.
        tops.sort(key=lambda position: -buckets[position].patches)
        merges += [(tops, tops)] if len(tops) > 1 else []
    for number, group in enumerate(groups[:-1], 1):
        own = buckets[group[0]]

        def unfit(later: list[int], own: Bucket = own) -> tuple[bool, ...]:
            other = buckets[later[0]]
            return other.boxes < own.boxes, other.patches < own.patches, other[1:4] != own[1:4]

        following = min(groups[number:], key=unfit)  # the first of those that fit equally well
        # Its shortest bucket that holds the bucket's texts: lengths fall, so the last one that does.
        fitting = [[b for b in following if buckets[b].length >= buckets[bucket].length][-1] for bucket in group]
        merges.append((group, fitting))
    return [*merges, (groups[-1], [])]


class NativePolicy:
    """Text length bounds × numbers of boxes and of patches, for models that take images in their own aspect ratio
    (NaFlex).

    A row goes to the smallest bounds that hold its caption and its boxes, and to the smallest number of patches that
    holds its image at full size; to the largest, if none does.

    Args:
        lengths: rising bounds, in tokens.
        patches: rising numbers of patches.
        patch_size: side of a patch, in pixels.
        boxes: rising bounds, numbers of boxes.

    Example:
        patches (64, 256) of 16 pixels: an image of 100 × 130 pixels needs 7 · 9 = 63 and goes to 64; one of 100 × 150
        needs 7 · 10 = 70 and goes to 256; one of 1000 × 1500 goes to 256 too and is made smaller.

    Source: Tschannen et al. 2025, SigLIP 2, section 2.4.2 (arXiv:2502.14786).
    """

    def __init__(
        self, lengths: Sequence[int], patches: Sequence[int], *, patch_size: int, boxes: Sequence[int] = (0,)
    ) -> None:
        self._bounds, self._patches = _Bounds(lengths, boxes), _rising("patches", patches, least=1)
        if patch_size < 1:
            raise ValueError(f"patch_size must be 1 pixel or more: got {patch_size}")
        self._patch_size = patch_size
        self.buckets = self._bounds.buckets([Bucket(0, 0, 0, number) for number in patches])

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        """Positions in `buckets`, int64 (n,)."""
        needed = -(-shapes.height // self._patch_size) * -(-shapes.width // self._patch_size)
        return self._bounds.assign(_smallest_bound(self._patches, needed), shapes)
