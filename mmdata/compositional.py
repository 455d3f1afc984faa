"""Compositional test sets: pairs of images and captions that differ in one thing, as batches for an evaluation.

A set is a JSONL file with a pair in each line (the form of Winoground). Image paths are relative to its folder, and
nothing outside that folder is read:

    {"type": "colour", "image_0": "a.png", "image_1": "b.png", "caption_0": "a red …", "caption_1": "a blue …"}
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from mmdata.batch import Batch
from mmdata.config import DataConfig
from mmdata.errors import BadSample, DataError
from mmdata.loader.buffer_pool import BufferPool
from mmdata.loader.image_buffers import batch_pixels
from mmdata.plan import Bucket
from mmdata.safe_read import read_inside
from mmdata.shards import clean_caption, probe
from mmdata.shards.samples import MAX_IMAGE_BYTES
from mmdata.transform.pixels import EncodedImage, PixelTransform
from mmdata.transform.text import Tokenizer, need_tokenizer


class Pair(BaseModel):
    """Two images and their captions. caption_0 describes only image_0, and caption_1 only image_1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    image_0: str
    image_1: str
    caption_0: str
    caption_1: str


def read_pairs(path: str | os.PathLike[str]) -> list[Pair]:
    """Read a set.

    Raises:
        DataError: no such file, an empty one, or a line that is not a pair (its number is named).
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"pairs '{file}': no such file; expected JSONL, one pair a line (see mmdata.compositional)")
    pairs: list[Pair] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                pairs.append(Pair.model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "line"
                raise DataError(f"pairs '{file}', line {number}: {where}: {first['msg']}") from error
    if not pairs:
        raise DataError(f"pairs '{file}': the file is empty")
    return pairs


def load_pairs(
    path: str | os.PathLike[str], data: DataConfig, *, batch_size: int = 64, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Batch, list[str]]]:
    """Batches of a set, in its order.

    Args:
        path: the JSONL file.
        data: tokenizer, max_length and image size. Images get the eval transform: a square of `image_size`, or the
            largest number of `image_patches` where that is set.
        batch_size: pairs in a batch, over all ranks.
        rank: 0 … world_size-1.
        world_size: processes that share each batch.

    Yields:
        A batch of 2P rows, row 2i (image_0, caption_0) and 2i + 1 (image_1, caption_1) of pair i; and the P types. With
        several ranks the batch holds this rank's share of the pairs. All ranks have the same number of rows; rows
        without a pair are not valid. The types are always all P.

    Raises:
        DataError: an image or caption cannot be used: no pair is left out of a test set.
        ValueError: `batch_size` below 1, or no such rank.
    """
    if batch_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"batch_size must be 1 or more, and rank 0 to world_size-1: got {batch_size}, rank {rank} of {world_size}"
        )
    pairs = read_pairs(path)
    tokenizer = need_tokenizer(data, to="score pairs")
    for start in range(0, len(pairs), batch_size):
        part = pairs[start : start + batch_size]
        of_rank = -(-len(part) // world_size)
        own = part[rank * of_rank : (rank + 1) * of_rank]
        batch = _batch(Path(path), start + rank * of_rank, own, data, tokenizer, num_pairs=of_rank)
        yield batch, [pair.type for pair in part]


def _batch(
    path: Path, start: int, pairs: list[Pair], data: DataConfig, tokenizer: Tokenizer, *, num_pairs: int
) -> Batch:
    """A batch of `num_pairs` pairs, the first of which are `pairs`, from line `start` (counted from 0) on."""
    root = os.path.realpath(path.parent)
    transform = PixelTransform("eval", patch_size=data.patch_size, exact=data.decode != "fast")
    bucket = Bucket(data.max_length, data.image_size, data.image_size)
    if data.image_patches is not None:
        bucket = Bucket(data.max_length, 0, 0, data.image_patches[-1])
    pixels = batch_pixels(bucket, 2 * num_pairs, BufferPool(), transform)
    captions: list[str] = []
    for i, pair in enumerate(pairs):
        for side, (name, caption) in enumerate(((pair.image_0, pair.caption_0), (pair.image_1, pair.caption_1))):
            row = 2 * i + side
            try:
                encoded = read_inside(root, name, max_bytes=MAX_IMAGE_BYTES)
                info = probe(encoded)
                image = EncodedImage(encoded, info.format, info.orientation, row, checked=True)
                pixels.write(pixels.decode(image, epoch=0), row, number=row, epoch=0)
                captions.append(clean_caption(caption))
            except (BadSample, OSError) as error:
                raise DataError(f"pairs '{path}', line {start + i + 1}, side {side}: {error}") from error
    length = min(max(tokenizer.count(captions), default=1), tokenizer.max_length)
    shape = (2 * num_pairs, length)
    input_ids, attention_mask = np.full(shape, tokenizer.pad_id, np.int64), np.zeros(shape, np.int64)
    input_ids[: len(captions)], attention_mask[: len(captions)] = tokenizer.encode(captions, length)
    attention_mask[:, 0] = 1  # attention over no position gives NaN, also in rows that are not valid
    places = np.arange(2 * num_pairs)
    is_filled = places < len(captions)
    rows = np.where(is_filled, 2 * start + places, -1)
    valid = torch.from_numpy(is_filled)
    return Batch(
        **pixels.entries(valid),
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        valid=valid,
        rows=torch.from_numpy(rows),
        keys=[f"{row // 2}_{row % 2}" if row >= 0 else "" for row in rows.tolist()],
    )
