"""From settings to a plan: which lengths and shapes there are, and the buckets for them. Reads no image."""

from __future__ import annotations

import logging
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.errors import BadSample, DataError
from mmdata.plan import CaptionTokens, IndexRows, LengthAspectPolicy, Plan, choose_lengths
from mmdata.shards import Index, ShardStore, captions_of
from mmdata.shards.columns import hash64
from mmdata.transform.text import Tokenizer

logger = logging.getLogger("mmdata")

CHUNK_ROWS = 4096


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
        DataError: the index has no rows.
    """
    if len(index) == 0:
        raise DataError(f"shards '{index.folder}': no rows in the index; see quarantine.jsonl there for those left out")
    needed = count_lengths or not (isinstance(data.text_buckets, list) and len(data.text_buckets) == 1)
    lengths = caption_lengths(index, tokenizer) if needed else None
    histogram = token_histogram(index, lengths) if data.text_buckets == "auto" else None
    shapes = data.image_buckets or [(data.image_size, data.image_size)]
    return Plan(
        IndexRows(index, lengths=lengths, limit=data.limit),
        LengthAspectPolicy(text_lengths(data, histogram), shapes),
        global_batch_size=data.global_batch_size,
        seed=data.seed,
        shuffle=data.shuffle,
        num_lanes=data.num_lanes,
    )


def text_lengths(data: DataConfig, histogram: NDArray[np.int64] | None) -> list[int]:
    """The text length bounds that are set, or those that leave the least padding; the last is max_length or less.

    Args:
        data: settings.
        histogram: entry i counts the captions of i tokens; needed where no bounds are set.
    """
    if isinstance(data.text_buckets, list):
        return data.text_buckets
    assert histogram is not None
    cut = np.minimum(np.arange(len(histogram)), data.max_length)  # longer captions are cut
    return choose_lengths(np.bincount(cut, histogram).astype(np.int64), data.num_text_buckets)


def token_histogram(index: Index, lengths: Literal["index"] | CaptionTokens | None) -> NDArray[np.int64]:
    """Captions by length; entry i counts those of i tokens."""
    if isinstance(lengths, tuple):
        return np.bincount(lengths[1])
    return index.manifest.token_histogram()


def caption_lengths(index: Index, tokenizer: Tokenizer) -> Literal["index"] | CaptionTokens:
    """Where the lengths of the captions are: in the index if this tokenizer counted them, else counted now.

    Raises:
        DataError: a caption is not the one that was indexed. A plan must not depend on what one rank's copy holds.
    """
    if index.manifest.tokenizer == tokenizer.fingerprint:
        return "index"
    logger.warning(
        "%d rows of '%s': caption lengths are not in the index for this tokenizer and are counted now; "
        "`mmdata index %s --tokenizer … --out FOLDER` makes an index that holds them: then set data.shards to FOLDER",
        len(index),
        index.folder,
        index.folder,
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
                f"shard '{index.shard_path(shard)}', sample '{index.keys(rows[i : i + 1])[0]}': the caption is not the "
                "one that was indexed; `mmdata verify` says what changed: fetch the shard again, or index it anew"
            )
        captions += found
    return np.asarray(tokenizer.count(captions), np.int32)
