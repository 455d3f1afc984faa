"""From settings to a plan: which lengths and shapes there are, and the buckets for them. Reads no image."""

from __future__ import annotations

import logging
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmdata.data_config import DataConfig, sources
from mmdata.errors import BadSample, DataError
from mmdata.loader.ahead import warn_of_small_cache
from mmdata.loader.limits import ensure_files, files_needed
from mmdata.loader.mixing import build_mixture
from mmdata.plan import (
    BucketPolicy,
    CaptionTokens,
    IndexRows,
    LengthAspectPolicy,
    NativePolicy,
    Plan,
    TokenBudgetPolicy,
    choose_image_shapes,
    choose_lengths,
    choose_lengths_by_shape,
)
from mmdata.plan.buckets import nearest_shapes
from mmdata.shards import Index, ShardCache, ShardStore, captions_of
from mmdata.shards.cache import GB
from mmdata.shards.columns import OLDEST_VERSION, hash64
from mmdata.shards.histogram import ASPECT_BINS, aspect_bin, pack_cells, unpack_cells
from mmdata.transform.text import Tokenizer

logger = logging.getLogger("mmdata")

CHUNK_ROWS = 4096

Lengths = Literal["index"] | CaptionTokens | None
"""Where caption lengths come from: the index, or counted anew; None where no policy asks for them."""


def open_index(data: DataConfig) -> Index:
    """The index of the shards that a section `data` names, with its cache for those behind URLs.

    Raises:
        ConfigError: this process may not open as many files as a loader over it needs.
    """
    cache = ShardCache(data.cache_dir, max_bytes=int(data.cache_gb * GB))
    index = Index.open([source.shards for source in sources(data)], cache=cache)
    warn_of_small_cache(index, data.window_rows)
    index.held_rows = max(index.held_rows, 4 * data.window_rows)
    _warn_of_missing_hashes(data, index)
    ensure_files(files_needed(data, index.manifest.num_shards))
    return index


def _warn_of_missing_hashes(data: DataConfig, index: Index) -> None:
    """Warn once for each index where images are loaded without being compared with their hashes."""
    old = [str(part.folder) for part in index.manifest.parts if part.schema == OLDEST_VERSION]
    if not old or data.check_images != "auto" or index.fingerprint in _warned_of:
        return
    _warned_of.add(index.fingerprint)
    logger.warning(
        "'%s': its index was made by an earlier mmdata and has no fast hashes: images are not compared with it when "
        "they are loaded. `mmdata index SHARDS --out FOLDER` makes a new one; data.check_images=always "
        "compares the SHA-256, which takes about 5 %% of a photo's time",
        old[0],
    )


_warned_of: set[str] = set()  # fingerprints of the indexes that this process has warned of


def build_plan(data: DataConfig, index: Index, tokenizer: Tokenizer, *, count_lengths: bool = False) -> Plan:
    """The plan that a section `data` describes.

    Caption lengths come from the index when it was made with this tokenizer; otherwise they are counted here, which
    reads every caption.

    Args:
        data: settings.
        index: of the shards.
        tokenizer: for the captions.
        count_lengths: know the lengths even where a single text length does not ask for them.

    Raises:
        DataError: the index has no rows, or a dataset of a mixture has none.
    """
    for part in index.manifest.parts:
        if part.rows == 0:
            raise DataError(
                f"shards '{part.folder}': no rows in the index; see __mmdata__/quarantine.jsonl there for those left "
                "out, or leave the dataset out of data.shards"
            )
    needed = count_lengths or not (isinstance(data.text_buckets, list) and len(data.text_buckets) == 1)
    lengths = caption_lengths(index, tokenizer) if needed else None
    rows = IndexRows(index, lengths=lengths, limit=data.limit)
    if data.global_batch_size > rows.starts[-1] and data.token_budget is None:
        logger.warning(
            "data.global_batch_size is %d, and there are %d rows: each batch is filled up with rows that are masked",
            data.global_batch_size,
            rows.starts[-1],
        )
    return Plan(
        rows,
        bucket_policy(data, index, lengths),
        global_batch_size=data.global_batch_size,
        seed=data.seed,
        shuffle=data.shuffle,
        window_rows=data.window_rows,
        num_lanes=data.num_lanes,
        mixture=build_mixture(data, index, rows),
    )


def bucket_policy(data: DataConfig, index: Index, lengths: Lengths) -> BucketPolicy:
    """The buckets that a section `data` describes; what is not set is chosen from the index.

    Args:
        data: settings.
        index: of the shards.
        lengths: of the captions; not None where text bounds are to be chosen.

    Raises:
        ValueError: a bucket's batch does not fit into the token budget.
    """
    if data.image_patches is not None:
        policy = NativePolicy(text_lengths(data, index, lengths), data.image_patches, patch_size=data.patch_size)
    elif data.max_shapes is not None:
        histogram = caption_histogram(index, lengths, max_length=data.max_length)
        policy = _shared_out(image_shapes(data, index), histogram, data.max_shapes)
    else:
        policy = LengthAspectPolicy(text_lengths(data, index, lengths), image_shapes(data, index))
    if data.token_budget is None:
        return policy
    return TokenBudgetPolicy(
        policy,
        data.token_budget,
        global_batch_size=data.global_batch_size,
        multiple=data.batch_multiple,
        patch_size=data.patch_size,
    )


def _shared_out(shapes: list[tuple[int, int]], histogram: NDArray[np.int64], max_shapes: int) -> LengthAspectPolicy:
    """Text bounds for each image shape that has images, at most `max_shapes` in all."""
    by_shape = np.zeros((len(shapes), len(histogram)), np.int64)
    np.add.at(by_shape, nearest_shapes(shapes), histogram.T)
    bounds = choose_lengths_by_shape(by_shape, max_shapes)
    used = [shape for shape, rising in enumerate(bounds) if rising]
    return LengthAspectPolicy([bounds[shape] for shape in used], [shapes[shape] for shape in used])


def image_shapes(data: DataConfig, index: Index) -> list[tuple[int, int]]:
    """The (height, width) pairs that are set, or those that crop least."""
    if data.image_buckets != "auto":
        return data.image_buckets or [(data.image_size, data.image_size)]
    aspects = caption_histogram(index, None, max_length=data.max_length).sum(axis=0)
    return choose_image_shapes(aspects, data.num_image_buckets, image_size=data.image_size, patch_size=data.patch_size)


def text_lengths(data: DataConfig, index: Index, lengths: Lengths) -> list[int]:
    """The text length bounds that are set, or those that leave the least padding; the last is max_length or less."""
    if isinstance(data.text_buckets, list):
        return data.text_buckets
    histogram = np.bincount(lengths[1]) if isinstance(lengths, tuple) else index.manifest.token_histogram()
    cut = np.minimum(np.arange(len(histogram)), data.max_length)  # longer captions are cut
    return choose_lengths(np.bincount(cut, histogram).astype(np.int64), data.num_text_buckets)


def caption_histogram(index: Index, lengths: Lengths, *, max_length: int) -> NDArray[np.int64]:
    """Captions by length and aspect ratio: entry [i, j] counts those of i tokens with an image in aspect bin j.

    From the manifest's pages alone; lengths that are not in the index ask for the size of every image.

    Args:
        index: of the shards.
        lengths: of the captions.
        max_length: longer captions count as cut to so many tokens.

    Returns:
        int64 (max_length + 1, ASPECT_BINS).
    """
    counts = np.zeros((max_length + 1) * ASPECT_BINS)
    if isinstance(lengths, tuple):
        offsets, tokens = lengths
        rows = IndexRows(index, lengths=None)
        for start in range(0, len(index), CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, len(index))
            _, height, width = rows.shapes(np.arange(start, stop), 0)
            bins = np.repeat(aspect_bin(height, width), np.diff(offsets[start : stop + 1]))
            cut = np.minimum(tokens[offsets[start] : offsets[stop]], max_length)
            counts += np.bincount(pack_cells(cut, bins), minlength=len(counts))
    else:
        for _, cells, captions in index.manifest.cells():
            tokens, bins = unpack_cells(cells)
            counts += np.bincount(pack_cells(np.minimum(tokens, max_length), bins), captions, minlength=len(counts))
    return counts.reshape(-1, ASPECT_BINS).astype(np.int64)  # exact: float64 counts to 2^53


def caption_lengths(index: Index, tokenizer: Tokenizer) -> Literal["index"] | CaptionTokens:
    """Where the lengths of the captions are: in the index if this tokenizer counted them, else counted now.

    Raises:
        DataError: a caption is not the one that was indexed. A plan must not depend on what one rank's copy holds.
    """
    if index.manifest.tokenizer == tokenizer.fingerprint:
        return "index"
    # Where one of several folders lacks them, those of all are counted.
    for part in index.manifest.parts:
        if part.tokenizer != tokenizer.fingerprint:
            logger.warning(
                "%d rows of '%s': caption lengths are not in the index for this tokenizer and are counted now; "
                "`mmdata index %s --tokenizer … --out FOLDER` makes an index that holds them: then set data.shards to "
                "FOLDER",
                part.rows,
                part.folder,
                part.folder,
            )
    store = ShardStore(index)
    offsets, _ = index.lists("caption_hash")
    counts = [_count_chunk(index, store, tokenizer, start) for start in range(0, len(index), CHUNK_ROWS)]
    return offsets, np.concatenate([np.empty(0, np.int32), *counts])


def _count_chunk(index: Index, store: ShardStore, tokenizer: Tokenizer, start: int) -> NDArray[np.int32]:
    rows = np.arange(start, min(start + CHUNK_ROWS, len(index)))
    shards, _ = index.locate(rows)
    columns = index.take(rows, ["caption_offset", "caption_bytes", "caption_format"])
    offsets, hashes = index.take_lists(rows, "caption_hash")
    captions: list[str] = []
    for i, shard in enumerate(shards.tolist()):
        data = store.read(shard, int(columns["caption_offset"][i]), int(columns["caption_bytes"][i]))
        try:
            found = captions_of(data, int(columns["caption_format"][i]))
        except BadSample:
            found = []
        if [hash64(caption.encode()) for caption in found] != hashes[offsets[i] : offsets[i + 1]].tolist():
            raise DataError(
                f"shard '{index.shard_place(shard)}', sample '{index.keys(rows[i : i + 1])[0]}': the caption is not "
                "the one that was indexed; `mmdata verify` says what changed: fetch the shard again, or index it anew"
            )
        captions += found
    return np.asarray(tokenizer.count(captions), np.int32)
