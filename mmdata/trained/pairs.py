"""Compositional test sets: pairs of images and captions that differ in one thing, as batches for an evaluation.

A set is a JSONL file with a pair in each line (the form of Winoground):

    {"type": "colour", "image_0": "a.png", "image_1": "b.png", "caption_0": "a red …", "caption_1": "a blue …"}

The JSON files of SugarCrepe and ARO are taken as they are: one image with a true and a false caption, which is a pair
that names its image twice. Images lie in the file's folder, or in `images` or `val2017` there, which may be links.
Nothing outside these folders is read.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import DataConfig
from mmdata.errors import BadSample, DataError, Reason
from mmdata.images import probe
from mmdata.images.pillow import decode_pillow
from mmdata.images.pixels import EncodedImage, PixelTransform
from mmdata.loader.image_buffers import BatchPixels
from mmdata.loader.workers.buffers import BufferPool
from mmdata.plan import Bucket
from mmdata.safe_read import read_inside
from mmdata.tars import clean_caption
from mmdata.tars.samples import MAX_IMAGE_BYTES
from mmdata.text.tokenizer import Tokenizer, need_tokenizer

IMAGE_FOLDERS = ("images", "val2017")
"""Folders beside a set where Winoground and ARO have their images, and COCO those of SugarCrepe."""
SUFFIXES = (".png", ".jpg")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two images and their captions. caption_0 describes only image_0, and caption_1 only image_1.

    With one image, image_0 and image_1 are the same, caption_0 is true and caption_1 false.

    Attributes:
        type: what is swapped; Winoground's `collapsed_tag`, SugarCrepe's file, ARO's relation or attributes.
        image_0: path below a folder of images; Winoground leaves ".png" out.
        image_1: likewise.
        caption_0: a text.
        caption_1: a text.
        box: left, top, width and height in pixels of the part of the image that is meant, as ARO gives it; None: all.
        where: its place in the file, for messages.
    """

    type: str
    image_0: str
    image_1: str
    caption_0: str
    caption_1: str
    box: tuple[int, int, int, int] | None = None
    where: str

    @property
    def has_one_image(self) -> bool:
        """Whether both captions are of the same image."""
        return self.image_0 == self.image_1


class _Winoground(BaseModel):
    type: str = Field(validation_alias=AliasChoices("type", "collapsed_tag"))
    image_0: str
    image_1: str
    caption_0: str
    caption_1: str

    def pair(self, name: str, where: str) -> Pair:
        return Pair(**self.model_dump(), where=where)


class _SugarCrepe(BaseModel):
    filename: str
    caption: str
    negative_caption: str

    def pair(self, name: str, where: str) -> Pair:
        image, true, false = self.filename, self.caption, self.negative_caption
        return Pair(type=name, image_0=image, image_1=image, caption_0=true, caption_1=false, where=where)


class _Aro(BaseModel):
    image_path: str
    true_caption: str
    false_caption: str
    bbox_x: int
    bbox_y: int
    bbox_w: Annotated[int, Field(ge=1)]
    bbox_h: Annotated[int, Field(ge=1)]
    relation_name: str | None = None
    attributes: list[str] | None = None

    def pair(self, name: str, where: str) -> Pair:
        kind = self.relation_name or "_".join(self.attributes or []) or name
        box = (self.bbox_x, self.bbox_y, self.bbox_w, self.bbox_h)
        image, true, false = self.image_path, self.true_caption, self.false_caption
        return Pair(type=kind, image_0=image, image_1=image, caption_0=true, caption_1=false, box=box, where=where)


def read_pairs(path: str | os.PathLike[str]) -> list[Pair]:
    """Read a set.

    Raises:
        DataError: no such file, an empty one, or a line or entry that is not a pair (its number or key is named).
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"pairs '{file}': no such file; expected JSONL, one pair a line (see mmdata.trained.pairs)")
    content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        whole: Any = json.loads(content)
    except (ValueError, RecursionError):
        whole = None  # several lines
    if isinstance(whole, list):
        kind, entries = _Aro, {f"entry {i}": entry for i, entry in enumerate(cast("list[object]", whole))}
    elif isinstance(whole, dict) and not whole.keys() & {"image_0", "caption_0"}:
        kind, entries = _SugarCrepe, {f"entry '{key}'": one for key, one in cast("dict[str, object]", whole).items()}
    else:
        lines = content.removesuffix(b"\n").split(b"\n") if content else []
        kind, entries = _Winoground, {f"line {number}": line for number, line in enumerate(lines, 1)}
    pairs = [_checked(kind, entry, where, file) for where, entry in entries.items()]
    if not pairs:
        raise DataError(f"pairs '{file}': the file is empty")
    if len({pair.has_one_image for pair in pairs}) > 1:
        raise DataError(f"pairs '{file}': some pairs have two images and some have one: make a file of each kind")
    return pairs


def _checked(kind: type[_Winoground | _SugarCrepe | _Aro], entry: object, where: str, file: Path) -> Pair:
    try:
        found = kind.model_validate_json(entry if isinstance(entry, bytes) else json.dumps(entry))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or where.partition(" ")[0]
        raise DataError(f"pairs '{file}', {where}: {place}: {first['msg']}") from error
    return found.pair(file.stem, where)


def load_pairs(
    path: str | os.PathLike[str], data: DataConfig, *, batch_size: int = 64, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Batch, list[str]]]:
    """Batches of a set, in its order.

    Args:
        path: of the set.
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
    roots = [os.path.realpath(path.parent / name) for name in ("", *IMAGE_FOLDERS)]
    transform = PixelTransform("eval", patch_size=data.patch_size, exact=data.decode == "exact")
    bucket = Bucket(data.max_length, data.image_size, data.image_size)
    if data.image_patches is not None:
        bucket = Bucket(data.max_length, 0, 0, data.image_patches[-1])
    pixels = BatchPixels(bucket, 2 * num_pairs, BufferPool(), transform)
    captions: list[str] = []
    for i, pair in enumerate(pairs):
        for side, (name, caption) in enumerate(((pair.image_0, pair.caption_0), (pair.image_1, pair.caption_1))):
            row = 2 * i + side
            try:
                encoded, _ = read_inside(*_place_of(name, roots), max_bytes=MAX_IMAGE_BYTES)
                info = probe(encoded)
                image = EncodedImage(encoded, info.format, info.orientation, row, checked=True)
                if pair.box is None:
                    decoded = pixels.decode(image, epoch=0)
                else:
                    shape = None if bucket.patches else (bucket.height, bucket.width)
                    decoded = transform.choose_part(_cropped(image, pair.box), shape=shape, patches=bucket.patches)
                pixels.write(decoded, row, number=row, epoch=0)
                captions.append(clean_caption(caption))
            except (BadSample, OSError) as error:
                raise DataError(f"pairs '{path}', {pair.where}, side {side}: {error}") from error
    length = min(max(tokenizer.count(captions), default=1), tokenizer.max_length)
    shape = (2 * num_pairs, length)
    input_ids, attention_mask = np.full(shape, tokenizer.pad_id, np.int64), np.zeros(shape, np.int64)
    input_ids[: len(captions)], attention_mask[: len(captions)] = tokenizer.encode(captions, length)
    attention_mask[:, 0] = 1  # attention over no position gives NaN, also in rows that are not valid
    places = np.arange(2 * num_pairs)
    is_filled = places < len(captions)
    rows = np.where(is_filled, 2 * start + places, -1)
    valid = torch.from_numpy(is_filled)
    entries: dict[str, Any] = {
        **pixels.entries(valid),
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "valid": valid,
        "rows": torch.from_numpy(rows),
        "keys": [f"{row // 2}_{row % 2}" if row >= 0 else "" for row in rows.tolist()],
    }
    return cast(Batch, entries)


def _place_of(name: str, roots: list[str]) -> tuple[str, str]:
    """The folder of images that holds a name, and the name with the suffix that it may lack."""
    for root in roots:
        for suffix in ("", *SUFFIXES):
            if os.path.isfile(os.path.join(root, name + suffix)):
                return root, name + suffix
    return roots[0], name  # which says what is wrong with it


def _cropped(image: EncodedImage, box: tuple[int, int, int, int]) -> Tensor:
    """The pixels of a box, uint8 (3, h, w), without what lies outside the image; EXIF orientation is not applied."""
    left, top, width, height = box
    whole = decode_pillow(image.data, image.format)
    part = whole[max(0, top) : max(0, top + height), max(0, left) : max(0, left + width)]
    if not part.size:
        size = f"{whole.shape[1]} x {whole.shape[0]}"
        raise BadSample(Reason.CORRUPT_IMAGE, f"the box {list(box)} lies outside the image of {size} pixels")
    return torch.from_numpy(part.copy()).permute(2, 0, 1)
