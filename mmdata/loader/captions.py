"""All captions of some rows, for an evaluation; a batch has one caption a row. Reads no image."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mmdata.batch import CaptionBatch
from mmdata.errors import BadSample, DataError
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.samples import IndexSamples
from mmdata.tars.captions import filled


def all_captions(maker: BatchMaker, rows: NDArray[np.int64]) -> CaptionBatch:
    """All captions, in their template, of each row that has several; none of a row that has one, or without texts.

    Where rows draw their captions from sources, each has the one of its batch alone.

    Args:
        maker: has index, shards and tokenizer.
        rows: int64 (n,), row numbers in the index, each once.

    Raises:
        DataError: a caption is not the one that was indexed.
    """
    offsets, _ = maker.index.take_lists(rows, "caption_hash")
    counts = np.diff(offsets)
    counts[counts == 1] = 0  # the batch has it already
    tokenizer = maker.tokenizer
    if tokenizer is None or maker.captions is not None:
        counts[:] = 0
    of_rows = np.repeat(rows, counts)  # (T,)
    # A row of n captions has each of them once in n passes: pass 0, 1, … of each row, [0, 1, 0, 1, 2] for 2 and 3.
    passes = np.arange(len(of_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    samples = IndexSamples(maker.index, maker.store, of_rows, passes)
    texts = [filled(maker.text_transform.template, _caption(samples, i)) for i in range(len(of_rows))]
    input_ids = attention_mask = np.empty((0, 1), np.int64)
    if tokenizer is not None and texts:
        length = min(max(tokenizer.count(texts)), tokenizer.max_length)
        input_ids, attention_mask = tokenizer.encode(texts, length)
        attention_mask[:, 0] = 1  # attention over no token is NaN
    return CaptionBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        caption_hash=torch.from_numpy(np.array(samples.caption_hashes(), np.int64)),
        rows=torch.from_numpy(of_rows),
    )


def _caption(samples: IndexSamples, i: int) -> str:
    try:
        return samples.caption(i)
    except BadSample as error:
        raise DataError(
            f"shard '{samples.shard(i)}', sample '{samples.keys[i]}': {error}; an evaluation needs all captions of "
            "the rows it counts"
        ) from error
