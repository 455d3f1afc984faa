"""The loaders that mmdata is compared with, written as in their documentation. A process measures one of them."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2

from mmdata.config import DataConfig
from mmdata.config.images import ImagesConfig
from mmdata.config.texts import TextsConfig
from mmdata.index import Index, ShardStore
from mmdata.loader import Loader
from mmdata.loader.corpus import open_index
from mmdata.loader.reader import RowReader
from mmdata.processes import most_workers
from mmdata.tables.select import select_rows
from mmdata.tables.selection import row_chunks
from mmdata.text.tokenizer import locate_tokenizer

WARM_UP = 3
"""Batches that are not timed: workers start, and hand over the batches that they made in that time."""
SHUFFLED = {"bufsize": 5000, "initial": 1000}
"""OpenCLIP's buffer of samples."""
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


def main() -> None:
    """Print the samples per second of the loader that stdin names: {"data": {…}, "name": …, "steps": …}."""
    settings = json.load(sys.stdin)
    batches = LOADERS[settings["name"]](DataConfig.model_validate(settings["data"]))
    print(samples_per_s(batches, settings["steps"]), flush=True)
    os._exit(0)  # do not wait for workers of the loader, which was left in mid-epoch


def samples_per_s(batches: Iterable[int], steps: int) -> float:
    """Rows per second of an endless iterator of batch sizes."""
    counts = iter(batches)
    for _ in range(WARM_UP):
        next(counts)
    started = time.perf_counter()
    rows = sum(next(counts) for _ in range(steps))
    return rows / (time.perf_counter() - started)


def mmdata_batches(data: DataConfig) -> Iterator[int]:
    """mmdata's Loader."""
    loader = Loader.from_config(data, rank=0, world_size=1)
    while True:
        for batch in loader:
            yield int(batch["valid"].sum())


def webdataset_batches(data: DataConfig) -> Iterable[int]:
    """The pipeline of OpenCLIP's training program and of webdataset's documentation."""
    webdataset: Any = importlib.import_module("webdataset")  # it has no types
    index = open_index(data)
    paths = [str(index.shard_path(shard)) for shard in range(index.num_shards)]
    skip = webdataset.ignore_and_continue
    samples: Any = webdataset.WebDataset(paths, shardshuffle=100 if data.shuffle else False, handler=skip)
    if data.shuffle:
        samples = samples.shuffle(SHUFFLED["bufsize"], initial=SHUFFLED["initial"])
    batches = (
        samples.decode("pilrgb", handler=skip)
        .rename(image="jpg;jpeg;png;webp;gif;bmp;tiff;tif", text="txt;json", handler=skip)
        .map_dict(image=transform(data), text=partial(_encode_one, tokenizer(data), data.max_length), handler=skip)
        .to_tuple("image", "text")
        .batched(data.global_batch_size, partial=False)
        .repeat()
    )
    loader = webdataset.WebLoader(
        batches, batch_size=None, shuffle=False, num_workers=most_workers(data.loading.num_workers)
    )
    return (len(images) for images, _ in loader)


def torch_batches(data: DataConfig) -> Iterable[int]:
    """A map-style Dataset and the DataLoader of torch."""
    loader: DataLoader[Any] = DataLoader(
        PeerRows(data),
        batch_size=data.global_batch_size,
        shuffle=data.shuffle,
        num_workers=most_workers(data.loading.num_workers),
        persistent_workers=most_workers(data.loading.num_workers) > 0,
        collate_fn=partial(_collate, tokenizer(data), data.max_length),
    )
    while True:
        for images, _ in loader:
            yield len(images)


class PeerRows(Dataset[tuple[Tensor, str]]):
    """The rows that a plan would plan: a float image and its caption."""

    def __init__(self, data: DataConfig) -> None:
        self._index: Index = open_index(data)
        self._store = ShardStore(self._index)
        self._transform = transform(data)
        selection = select_rows(data, self._index)
        all_rows = row_chunks(selection, len(self._index))
        self._rows = np.concatenate([np.empty(0, np.int64), *all_rows])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[Tensor, str]:
        sample = RowReader(self._index, self._store, self._rows[[number]], np.array([0]))
        image = Image.open(io.BytesIO(sample.stored_image(0).data)).convert("RGB")
        return self._transform(image), sample.caption(0)


def transform(data: ImagesConfig) -> Callable[[Image.Image], Tensor]:
    """The crop of the settings, by torchvision, and CLIP's normalisation."""
    bicubic, side = InterpolationMode.BICUBIC, data.image_size
    crop: list[Any] = (
        [v2.RandomResizedCrop(side, scale=data.crop_scale, interpolation=bicubic)]
        if data.transform == "train"
        else [v2.Resize(side, interpolation=bicubic), v2.CenterCrop(side)]
    )
    return v2.Compose([*crop, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def tokenizer(data: TextsConfig) -> Any:
    """The tokenizer of the settings, loaded by transformers."""
    from transformers import AutoTokenizer

    assert data.tokenizer is not None, "see `check_comparable`"
    found = AutoTokenizer.from_pretrained(locate_tokenizer(data.tokenizer))
    if found.pad_token is None:
        found.pad_token = found.eos_token
    return found


def _encode_one(tokenizer: Any, length: int, caption: Any) -> Tensor:
    if isinstance(caption, dict):  # of a JSON member
        caption = caption.get("captions", caption.get("caption"))
    text = caption[0] if isinstance(caption, list) else caption
    return tokenizer(text, max_length=length, padding="max_length", truncation=True, return_tensors="pt").input_ids[0]


def _collate(tokenizer: Any, length: int, samples: list[tuple[Tensor, str]]) -> tuple[Tensor, Any]:
    captions = [caption for _, caption in samples]
    texts = tokenizer(captions, max_length=length, padding=True, truncation=True, return_tensors="pt")
    return torch.stack([image for image, _ in samples]), dict(texts)


LOADERS: dict[str, Callable[[DataConfig], Iterable[int]]] = {
    "mmdata": mmdata_batches,
    "webdataset": webdataset_batches,
    "torch": torch_batches,
}

if __name__ == "__main__":
    main()
