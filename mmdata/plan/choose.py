"""Chooses the shapes of batches: of settings, and those that pad and crop least for the counts of a corpus.

Reads no image.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.config.targets import TargetsConfig
from mmdata.config.texts import TextsConfig
from mmdata.index import Index
from mmdata.index.columns import ASPECT_BINS, aspect_bin, aspect_ratio, pack_cells, unpack_cells
from mmdata.plan.buckets import BucketPolicy, LengthAspectPolicy, NativePolicy, fit_into_budget
from mmdata.plan.captions import CaptionSources, NoTexts, ShardCaptions
from mmdata.plan.rows import IndexRows
from mmdata.tables.selection import Selection, row_chunks

MOST_BOXES = 100
"""Largest room for boxes that is chosen; more is given as a list of `box_buckets`."""
LEAST_PROBABILITY = 1e-9
"""Captions of sources that are less probable count as this."""


def bucket_policy(
    data: DataConfig,
    index: Index,
    captions: CaptionSources,
    *,
    selection: Selection | None = None,
    boxes: NDArray[np.int32] | None = None,
) -> BucketPolicy:
    """The buckets that a section `data` describes; bounds and shapes that are not set are chosen from the index.

    Args:
        data: settings.
        index: of the shards.
        captions: of the rows; their tokens are counted if text bounds are to be chosen.
        selection: the rows that the choice looks at; None: all of the index.
        boxes: how many each of these rows has; None: batches have no boxes.

    Raises:
        ValueError: a bucket's batch does not fit into the token budget.
    """
    bounds = text_lengths(data, index, captions, selection=selection)
    room = [0] if boxes is None or data.targets is None else box_bounds(data.targets, boxes)
    if data.image_patches is not None:
        policy = NativePolicy(bounds, data.image_patches, patch_size=data.patch_size, boxes=room)
    else:
        policy = LengthAspectPolicy(bounds, image_shapes(data, index, selection=selection), room)
    if data.token_budget is not None:
        policy.buckets = fit_into_budget(
            policy.buckets,
            data.token_budget,
            global_batch_size=data.global_batch_size,
            multiple=data.row_multiple,
            patch_size=data.patch_size,
        )
    return policy


def image_shapes(data: DataConfig, index: Index, *, selection: Selection | None = None) -> list[tuple[int, int]]:
    """The (height, width) pairs that the settings name, or those that crop least."""
    if not isinstance(data.image_buckets, int):
        return data.image_buckets or [(data.image_size, data.image_size)]
    captions = CaptionSources.in_turn(ShardCaptions(index) if index.captions else NoTexts(index))
    aspects = caption_histogram(index, captions, max_length=data.max_length, selection=selection).sum(axis=0)
    return choose_image_shapes(aspects, data.image_buckets, image_size=data.image_size, patch_size=data.patch_size)


def text_lengths(
    data: TextsConfig, index: Index, captions: CaptionSources, *, selection: Selection | None = None
) -> list[int]:
    """The text length bounds that the settings name, or those that leave the least padding; at most max_length."""
    if not captions.has_texts:
        return [0]
    if isinstance(data.text_buckets, list):
        return data.text_buckets
    if selection is None and captions.in_histograms == "tokens":
        histogram = index.token_histogram()
        cut = np.minimum(np.arange(len(histogram)), data.max_length)  # longer captions are cut
        counts = np.bincount(cut, histogram, minlength=data.max_length + 1).astype(np.int64)
    else:
        counts = caption_histogram(index, captions, max_length=data.max_length, selection=selection).sum(axis=1)
    return choose_lengths(counts, data.text_buckets)


def box_bounds(targets: TargetsConfig, counts: NDArray[np.int32]) -> list[int]:
    """The numbers of boxes that the settings name, or those that leave the least padding; from 1 to MOST_BOXES.

    Args:
        targets: settings.
        counts: int32 (n,), how many boxes each row has.
    """
    if isinstance(targets.box_buckets, list):
        return targets.box_buckets
    return choose_lengths(np.bincount(np.clip(counts, 1, MOST_BOXES)), targets.box_buckets)


def caption_histogram(
    index: Index, captions: CaptionSources, *, max_length: int, selection: Selection | None = None
) -> NDArray[np.int64]:
    """Captions by length and aspect ratio: entry [i, j] counts those of i tokens with an image in aspect bin j.

    Reads the manifest's histograms where they tell; else the size of every image. Captions of several sources count by
    the probability of their source, rounded up.

    Args:
        index: of the shards.
        captions: of the rows; captions that are not counted have 0 or 1 tokens.
        max_length: longer captions count as this long.
        selection: the rows whose captions are counted; None: all rows.

    Returns:
        int64 (max_length + 1, ASPECT_BINS).
    """
    counts = np.zeros((max_length + 1) * ASPECT_BINS)
    if selection is None and captions.in_histograms is not None:
        for _, cells, number in index.cells():
            tokens, bins = unpack_cells(cells)
            tokens = np.minimum(tokens, max_length if captions.in_histograms == "tokens" else 0)
            counts += np.bincount(pack_cells(tokens, bins), number, minlength=len(counts))
        return counts.reshape(-1, ASPECT_BINS).astype(np.int64)  # exact: float64 counts to 2^53
    rows = IndexRows(index, captions)
    for numbers in row_chunks(selection, len(index)):
        bins = aspect_bin(*rows.sizes(numbers))
        for probability, of_rows, tokens in captions.all_tokens(numbers):
            cells = pack_cells(np.minimum(tokens, max_length), bins[of_rows])
            # A caption that is never drawn, or hardly ever, needs its place, too.
            counts += np.bincount(cells, minlength=len(counts)) * max(probability, LEAST_PROBABILITY)
    return np.ceil(counts).reshape(-1, ASPECT_BINS).astype(np.int64)


def choose_image_shapes(
    aspects: NDArray[np.int64], count: int, *, image_size: int, patch_size: int, tolerance: float = 0.1
) -> list[tuple[int, int]]:
    """The image shapes of about `image_size`² pixels that crop the least area of the images.

    An image of aspect ratio a, in a shape of aspect ratio s, keeps min(a / s, s / a) of its area.

    Args:
        aspects: int64 (256,), images of each aspect bin (`mmdata.index.columns.aspect_bin`).
        count: largest number of shapes; fewer are chosen if more would not crop less.
        image_size: side of a square in pixels; no shape has more patches than the square.
        patch_size: side of a patch, in pixels; divides the sides of all shapes.
        tolerance: share of the square's patches that a shape may lack. Of shapes of equal aspect ratio the one with the
            most patches is taken.

    Returns:
        (height, width) pairs in pixels, from the tallest to the widest.

    Raises:
        ValueError: `aspects` counts no image, or image_size is no multiple of patch_size.

    Example:
        224 pixels in patches of 16 allow 177 to 14 · 14 = 196 patches. For images of 4:3 (width : height) and of 3:4,
        count 2: [(256, 192), (192, 256)], 16 · 12 = 192 patches each; one of 1:1 would cut off a quarter of each image.

    """
    if image_size < patch_size or image_size % patch_size:
        raise ValueError(
            f"image_size {image_size} is no multiple of patch_size {patch_size}: image shapes consist of whole patches"
        )
    present = np.flatnonzero(aspects)
    if not len(present):
        raise ValueError("choose_image_shapes: the histogram of aspect ratios is empty")
    grids = _grids((image_size // patch_size) ** 2, tolerance)
    # In logarithms the crop is a distance: min(a / s, s / a) = exp(-|log a - log s|).
    log_shapes = np.log([columns / rows for rows, columns in grids])  # (C,), rising
    log_bins = np.log(aspect_ratio(np.arange(ASPECT_BINS)))
    # A shape beyond the images' own aspect ratios crops more the farther it lies: one on each side is enough.
    first = max(int(np.searchsorted(log_shapes, log_bins[present[0]], side="right")) - 1, 0)
    last = int(np.searchsorted(log_shapes, log_bins[present[-1]])) + 1
    chosen = _least_cropped(log_shapes[first:last], log_bins, aspects, count)
    return [(rows * patch_size, columns * patch_size) for rows, columns in (grids[first + shape] for shape in chosen)]


def _grids(patches: int, tolerance: float) -> list[tuple[int, int]]:
    """(rows, columns) of (1 - tolerance) · patches to `patches` patches, in order of aspect ratio, each ratio once."""
    fewest = int(np.ceil((1 - tolerance) * patches - 1e-9))  # 1e-9: 0.9 · 10 is 9, whatever the rounding
    grids = [
        (rows, columns)
        for rows in range(1, patches + 1)
        for columns in range(max(1, -(-fewest // rows)), patches // rows + 1)
    ]
    largest = {columns / rows: (rows, columns) for rows, columns in grids}  # rows rise: the last has the most patches
    return [largest[aspect] for aspect in sorted(largest)]


def _least_cropped(
    log_shapes: NDArray[np.float64], log_bins: NDArray[np.float64], images: NDArray[np.int64], count: int
) -> list[int]:
    """Positions of at most `count` shapes that keep the most area, if each bin goes to the nearest of them.

    Args:
        log_shapes: (C,), logarithms of the shapes' aspect ratios, rising.
        log_bins: (N,), logarithms of the bins' aspect ratios, rising.
        images: (N,), images in each bin.
        count: at least 1.

    Method: the cheapest path over the shapes. Bins are split at borders, so the area that a set of shapes keeps is what
    its last shape keeps of all bins, plus what each border gains: the area that the shape before the border keeps of
    the bins below it, less what the next shape would keep of them.
    """
    kept = images * np.exp(-np.abs(log_shapes[:, None] - log_bins))  # (C, N) area that each shape keeps of each bin
    below = np.concatenate([np.zeros((len(kept), 1)), np.cumsum(kept, axis=1)], axis=1)  # (C, N + 1) of bins < n
    border = np.searchsorted(log_bins, (log_shapes[:, None] + log_shapes) / 2)  # (C, C) first bin nearer to the second
    shape = np.arange(len(kept))
    cost = np.full((len(kept) + 2, len(kept) + 2), np.inf)  # from a point before the shapes to one behind them
    cost[0, 1:-1] = 0.0
    cost[1:-1, 1:-1] = below[shape, border] - below[shape[:, None], border]
    cost[1:-1, -1] = images.sum() - below[:, -1]
    cost[np.tril_indices(len(cost))] = np.inf  # the next shape is wider
    return [point - 1 for point in cheapest_path(cost, count + 1)[1:-1]]


def choose_lengths(histogram: NDArray[np.int64], count: int) -> list[int]:
    """The bounds, of text lengths or of numbers of boxes, that leave the least padding.

    Args:
        histogram: (L,), captions by length: entry i counts those of i tokens. The longest length that occurs is always
            a bound.
        count: largest number of bounds.

    Returns:
        Rising bounds, `count` or fewer.

    Raises:
        ValueError: the histogram is empty.

    Example:
        Lengths 4 (ten captions), 5 (ten) and 20 (one), two bounds: [5, 20] pads 10 tokens; [4, 20] would pad 150.

    Method: the cheapest path over the lengths at which bounds end, O(count · lengths²).
    """
    if not np.any(histogram):
        raise ValueError("choose_lengths: the histogram is empty")
    lengths = np.flatnonzero(histogram)
    captions_below = np.concatenate([[0.0], np.cumsum(np.asarray(histogram, np.float64)[lengths])])
    # group[i, j]: tokens of the captions of lengths i … j-1, all padded to the longest of them
    group = (captions_below[None, :] - captions_below[:, None]) * np.concatenate([[0], lengths])[None, :]
    group[np.tril_indices(len(group))] = np.inf
    return [int(lengths[end - 1]) for end in cheapest_path(group, count)[1:]]


def cheapest_path(cost: NDArray[np.float64], steps: int) -> list[int]:
    """The cheapest way from the first of n points to the last; of equally cheap ones that of the fewest steps.

    Args:
        cost: (n, n), of a step from i to j; inf where there is none.
        steps: largest number of steps.

    Returns:
        The points on the way, the first and the last among them.

    Method: dynamic programming over the points that so many steps reach, O(steps · n²).
    """
    total = np.full(len(cost), np.inf)  # least cost of each point, with as many steps as rounds have passed
    total[0] = 0.0
    least, path = np.inf, [0]
    rounding = 1e-9 * cost[np.isfinite(cost)].max()
    before: list[NDArray[np.int64]] = []  # of each round: the point before each point
    for _ in range(min(steps, len(cost) - 1)):
        longer = total[:, None] + cost
        before.append(longer.argmin(axis=0))
        total = longer.min(axis=0)
        if total[-1] < least - rounding:
            least, path = float(total[-1]), [len(cost) - 1]
            for points in reversed(before):
                path.append(int(points[path[-1]]))
    return path[::-1]
