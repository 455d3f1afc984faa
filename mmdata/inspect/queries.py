"""Sections of the report on what a trained model finds: captions as queries among the images of a validation set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmdata.batch import Batch
from mmdata.config import DataConfig
from mmdata.config.corpus import val_in_words
from mmdata.config.data import evaluation_data
from mmdata.errors import BadSample, DataError
from mmdata.index import Index, ShardStore
from mmdata.inspect.gallery import picture_of
from mmdata.inspect.page import FoundImage, Query, ReportSection
from mmdata.loader import Loader
from mmdata.loader.reader import RowReader
from mmdata.plan.from_config import num_rows
from mmdata.train.evaluation.embedding import embed
from mmdata.train.evaluation.retrieval import TIE

NUM_QUERIES, NUM_MISSES, NUM_FOUND = 12, 6, 5
BATCH_SIZE = 32
TITLE, TITLE_OF_MISSES = "What the model finds", "Worst misses"
THUMBNAIL = (160, 120)
"""Largest width and height of a thumbnail, in pixels."""


@dataclass(frozen=True)
class Retrieved:
    """What captions find among N images.

    Attributes:
        rows: int64 (N,), of the validation set.
        ids: int64 (N, 2), hashes of image and caption.
        ranks: int64 (N,), place of the first right image for the caption of each row, from 1. A tie counts against the
            model. Images with the same bytes, or with the same caption, are right too.
        nearest: int64 (N, K), positions of the nearest distinct images, best first.
        scores: float32 (N, K), their cosines.
        right: bool (N, K).
    """

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    ranks: NDArray[np.int64]
    nearest: NDArray[np.int64]
    scores: NDArray[np.float32]
    right: NDArray[np.bool_]


def queries(
    model: nn.Module,
    data: DataConfig,
    *,
    name: str,
    max_rows: int,
    max_seconds: float,
    autocast_dtype: torch.dtype | None = None,
) -> list[ReportSection]:
    """Twelve captions with the images they find, and the captions whose image the model finds last.

    Args:
        model: as `DualEncoder`, in eval mode.
        data: of the run; the images and captions are drawn from its validation set.
        name: of the run, for a sentence.
        max_rows: images to search; drawn at random, the same ones each time.
        max_seconds: after this time no further batch is embedded, so that a large model on a CPU still ends.
        autocast_dtype: as in `embed`.

    Raises:
        DataError: the validation set cannot be read.
        ConfigError: there is none.
    """
    changes = {"shuffle": True, "seed": 0, "num_lanes": 1, "targets": None}
    searched = evaluation_data(data).model_copy(update=changes)
    batch_size = min(BATCH_SIZE, max(1, num_rows(searched)))  # a larger batch would be filled up with masked rows
    searched = searched.model_copy(update={"global_batch_size": batch_size})
    loader = Loader.from_config(searched, rank=0, world_size=1)
    started = time.monotonic()

    def some() -> Iterator[Batch]:
        rows = 0
        for batch in loader:
            yield batch
            rows += int(batch["valid"].sum())
            if rows >= max_rows or time.monotonic() - started > max_seconds:
                return

    with loader:
        # A generator offers nothing but batches, so each row has one caption: that of its batch.
        features = embed(model, some(), autocast_dtype=autocast_dtype)
    if features.text is None or features.ids is None:
        raise DataError(f"'{val_in_words(data)}': the batches have no texts to search with")
    count = min(max_rows, len(features.rows))
    if not count:
        raise DataError(f"'{val_in_words(data)}': no row could be loaded")
    image, text, ids = (values[:count].cpu() for values in (features.image, features.text, features.ids))
    retrieved = retrieve(image, text, ids, rows=features.rows[:count].cpu())
    total = loader.plan.num_rows
    among = f"{count:,} images drawn from {total:,}" if count < total else f"all {total:,} images"
    note = f"Captions as queries to the model of {name}, among {among} of {val_in_words(data)}."
    if time.monotonic() - started > max_seconds:
        note += f" No more were embedded, as that took {max_seconds:.0f} s."
    return sections(retrieved, loader.index, note)


def retrieve(image: Tensor, text: Tensor, ids: Tensor, *, rows: Tensor) -> Retrieved:
    """Rank the images for each caption.

    Args:
        image, text: float32 (N, D), L2-normalised; row i of both belongs together.
        ids: int64 (N, 2), hashes of image and caption.
        rows: int64 (N,).
    """
    scores = text.float() @ image.float().T  # (N, N)
    right = (ids[:, None] == ids[None]).any(dim=2)
    # Rows with the same image are one image: the first of them stands for all.
    equal = (ids[:, None, 0] == ids[None, :, 0]).int()
    distinct = equal.argmax(dim=1) == torch.arange(len(ids))
    best = scores.masked_fill(~right, -torch.inf).amax(dim=1, keepdim=True)
    ranks = 1 + (~(scores < best - TIE) & ~right & distinct).sum(dim=1)
    shown = scores.nan_to_num(-2.0).masked_fill(~distinct, -torch.inf)
    top = shown.topk(min(NUM_FOUND, int(distinct.sum())), dim=1)
    found = right.gather(1, top.indices)
    return Retrieved(rows.numpy(), ids.numpy(), ranks.numpy(), top.indices.numpy(), top.values.numpy(), found.numpy())


def sections(retrieved: Retrieved, index: Index, note: str) -> list[ReportSection]:
    """Twelve different captions at even distances, and those with the largest ranks."""
    store = ShardStore(index)
    first = retrieved.ranks == 1
    top = retrieved.ranks <= NUM_FOUND
    note += f" The right image is the first for {first.mean():.1%} of them, among the first five for {top.mean():.1%}."
    different = np.sort(np.unique(retrieved.ids[:, 1], return_index=True)[1])  # an equal caption finds the same images
    chosen = different[np.unique(np.linspace(0, len(different) - 1, NUM_QUERIES).round().astype(np.int64))]
    worst = _worst(retrieved)
    why = "None: each caption finds its own image first."
    if worst:
        why = "The captions whose own image comes last. Often the caption is wrong, not the model: look at both."
    shown, misses = ([_query(retrieved, index, store, int(i)) for i in part] for part in (chosen, worst))
    return [ReportSection(TITLE, note, queries=shown), ReportSection(TITLE_OF_MISSES, why, queries=misses)]


def _worst(retrieved: Retrieved) -> list[int]:
    """Positions of the captions whose image has the largest ranks above 1; no image and no caption comes twice."""
    worst: list[int] = []
    images: set[int] = set()
    captions: set[int] = set()
    for i in np.argsort(-retrieved.ranks, kind="stable"):
        image, caption = retrieved.ids[i].tolist()
        if retrieved.ranks[i] > 1 and image not in images and caption not in captions:
            worst.append(int(i))
            images.add(image)
            captions.add(caption)
        if len(worst) == NUM_MISSES:
            break
    return worst


def _query(retrieved: Retrieved, index: Index, store: ShardStore, i: int) -> Query:
    rows = retrieved.rows[[i, *retrieved.nearest[i]]]
    samples = RowReader(index, store, rows, np.zeros(len(rows), np.int64))
    captions = [_caption(samples, place) for place in range(len(rows))]
    pictures = [picture_of(samples, place, size=THUMBNAIL) for place in range(len(rows))]
    found = [
        FoundImage(f"{place} · {score:.3f}", captions[place], bool(right), *pictures[place])
        for place, (score, right) in enumerate(zip(retrieved.scores[i], retrieved.right[i], strict=True), start=1)
    ]
    note = f"rank {retrieved.ranks[i]:,} of {len(retrieved.rows):,} · {samples.keys[0]}"
    return Query(captions[0], note, [FoundImage("wanted", captions[0], True, *pictures[0]), *found])


def _caption(samples: RowReader, i: int) -> str:
    try:
        return samples.caption(i)
    except BadSample as error:
        return f"({error})"
