"""Buckets: the few shapes that batches may have, and the policies that give each row one of them.

A policy sees numbers of the index only, so a row's bucket is known before a byte of the row is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mmdata.shards.histogram import ASPECT_BINS, aspect_bin, aspect_ratio


class Bucket(NamedTuple):
    """The shape of a batch.

    Attributes:
        length: text length in tokens; longer captions are truncated to the longest bucket.
        height: of the images, in pixels; 0 where images keep their own shape.
        width: likewise.
        patches: of an image at most, where images keep their own shape; else 0.
    """

    length: int
    height: int
    width: int
    patches: int = 0


class Shapes(NamedTuple):
    """What a policy knows of n rows.

    Attributes:
        length: int64 (n,), tokens of the caption chosen for this epoch, special ones included.
        height: int64 (n,), pixels as displayed.
        width: int64 (n,), pixels as displayed.
    """

    length: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]


class BucketPolicy(Protocol):
    """Names the buckets, and gives each row one.

    A policy that looks at nothing but the text length and `mmdata.shards.histogram.aspect_bin` may say so with
    `uses_cells = True`: its buckets are then counted from the manifest, without a look at every row.

    Example, a policy of one's own: landscape and portrait, any text.

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
    """Text length bounds × image shapes.

    A row goes to the smallest bound that holds its caption (the largest, if none does) and to the image shape
    nearest in aspect ratio, which is known to about 1 % (`aspect_bin`).

    Args:
        lengths: rising bounds, in tokens.
        image_shapes: (height, width) pairs, in pixels.
    """

    uses_cells = True

    def __init__(self, lengths: Sequence[int], image_shapes: Sequence[tuple[int, int]]) -> None:
        if not lengths or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"lengths must rise: got {list(lengths)}")
        if not image_shapes or len(set(image_shapes)) != len(image_shapes):
            raise ValueError(f"image_shapes must be different (height, width) pairs: got {list(image_shapes)}")
        self._lengths = np.asarray(lengths, np.int64)
        log_aspects = np.log([width / height for height, width in image_shapes])
        distance = np.abs(np.log(aspect_ratio(np.arange(ASPECT_BINS)))[:, None] - log_aspects)
        self._shape_of_bin = distance.argmin(axis=1)  # (ASPECT_BINS,)
        self.buckets = tuple(Bucket(length, *shape) for shape in image_shapes for length in lengths)

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        """Positions in `buckets`, int64 (n,)."""
        bound = np.minimum(np.searchsorted(self._lengths, shapes.length), len(self._lengths) - 1)
        return self._shape_of_bin[aspect_bin(shapes.height, shapes.width)] * len(self._lengths) + bound


def choose_lengths(histogram: NDArray[np.int64], count: int) -> list[int]:
    """The text length bounds that leave the least padding.

    Args:
        histogram: captions of each length; entry i counts those of i tokens. The last entry that is not 0 is always
            a bound.
        count: bounds at most.

    Returns:
        Rising bounds, `count` or fewer.

    Example:
        Lengths 4 (ten captions), 5 (ten) and 20 (one), two bounds: [5, 20] pads 10 tokens; [4, 20] would pad 150.

    Method: dynamic programming over the longest length of each bound, O(count · len(histogram)²).
    """
    lengths = np.flatnonzero(histogram)
    if lengths.size == 0:
        raise ValueError("choose_lengths: the histogram is empty")
    captions_below = np.concatenate([[0.0], np.cumsum(np.asarray(histogram, np.float64)[lengths])])
    # group[i, j]: tokens of the captions of lengths i … j-1, all padded to the longest of them
    group = (captions_below[None, :] - captions_below[:, None]) * np.concatenate([[0], lengths])[None, :]
    group[np.tril_indices(len(group))] = np.inf
    # cost[j]: least tokens for the first j lengths, with as many bounds as rounds have passed
    cost = np.full(len(lengths) + 1, np.inf)
    cost[0] = 0.0
    begins: list[NDArray[np.int64]] = []
    for _ in range(min(count, len(lengths))):
        total = cost[:, None] + group
        begins.append(total.argmin(axis=0))
        cost = total.min(axis=0)
    bounds: list[int] = []
    end = len(lengths)
    for begin in reversed(begins):
        bounds.append(int(lengths[end - 1]))
        end = int(begin[end])
    return bounds[::-1]


def merge_groups(buckets: Sequence[Bucket]) -> list[tuple[list[int], list[int]]]:
    """Which buckets are merged with each other at the end of an epoch, in this order.

    First the longest texts of all image shapes, whose padding would cost most, with each other (some images then get
    the crop of another shape); then the buckets of each image shape; what is left fits into the next image shape.
    Where images keep their own shape, the next one has more patches.

    Returns:
        (group, targets): buckets, the longest text first, and for each the bucket that its rest goes to; the last group
        has no targets.

    Example:
        For (8, a), (16, a), (8, b), (16, b): [([1, 3], [1, 3]), ([1, 0], [3, 2]), ([3, 2], [])].
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for position in sorted(range(len(buckets)), key=lambda i: (-buckets[i].length, i)):
        shapes.setdefault(buckets[position][1:], []).append(position)  # (height, width, patches)
    groups = sorted(
        shapes.values(), key=lambda group: (buckets[group[0]].length, buckets[group[0]].patches, min(group))
    )
    longest = max(bucket.length for bucket in buckets)
    tops = [position for position, bucket in enumerate(buckets) if bucket.length == longest]
    tops.sort(key=lambda position: -buckets[position].patches)  # a batch has the bucket of its first row
    merges = [(tops, tops)] if len(tops) > 1 else []
    for group, following in itertools.pairwise(groups):
        # of the next shape, the shortest text that holds those of the bucket; the list falls, so the last that does
        fitting = [[b for b in following if buckets[b].length >= buckets[bucket].length][-1] for bucket in group]
        merges.append((group, fitting))
    return [*merges, (groups[-1], [])]
