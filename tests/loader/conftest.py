"""A small corpus in shards, loaders over it, and the comparison of batches."""

from __future__ import annotations

import gc
import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import Tensor

from mmdata import Batch, Index, Loader
from mmdata.images import probe
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from tests.flat_settings import grouped
from tests.joins import load
from tests.shard_writer import ShardWriter

WORDS = ["a", "red", "blue", "green", "small", "large", "dog", "cat", "tree", "on", "under", "near", "the", "street"]
SHAPES = [(48, 48), (40, 64), (64, 40)]
FORMATS = ["JPEG", "PNG", "WEBP"]


@dataclass(frozen=True)
class Corpus:
    """`samples` in the shards of `folder` / shards, of at most 17 rows; the tokenizer lies beside them.

    `more` are settings of batches.
    """

    folder: Path
    samples: list[Sample]
    more: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def settings(self) -> dict[str, Any]:
        """A section `data` for it: several text lengths, three image shapes, random crops, two workers."""
        return {
            "shards": str(self.folder / "shards"),
            "tokenizer": str(self.folder / "tokenizer"),
            "global_batch_size": 8,
            "image_buckets": [[32, 32], [24, 40], [40, 24]],
            "max_length": 32,
            "text_buckets": 3,
            "crop_scale": [0.3, 0.9],
            "seed": 5,
            "loading": {"num_workers": 2},
            **self.more,
        }

    @property
    def index(self) -> Index:
        return Index.open(self.folder / "shards")

    def loader(self, *, rank: int = 0, world_size: int = 1, **changes: Any) -> Loader:
        """A loader with some settings changed; what they join is joined before."""
        return load(grouped(**{**self.settings, **changes}), rank=rank, world_size=world_size)

    def copy(self, folder: Path) -> Corpus:
        """The same corpus in another folder, to be damaged."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("joins"))  # of other tests
        return replace(self, folder=folder)

    def write_beside(self, folder: Path, samples: list[Sample]) -> None:
        """Other shards, indexed with the same tokenizer."""
        write(folder, samples, Tokenizer.load(self.folder / "tokenizer"))

    def table(self, file: Path, rows: Sequence[int] = range(50), **columns: Any) -> str:
        """A table of some rows, in this order, by their keys."""
        pyarrow.parquet.write_table(pa.table({"key": [self.samples[row].key for row in rows], **columns}), file)
        return str(file)

    def overwrite(self, row: int, kind: str, data: bytes) -> None:
        """Put bytes at the beginning of a row's member (kind: image or caption); its size stays."""
        shards, _ = self.index.locate(np.array([row]))
        columns = self.index.take(np.array([row]), [f"{kind}_offset", f"{kind}_bytes"])
        assert len(data) <= columns[f"{kind}_bytes"][0]
        with self.index.shard_path(int(shards[0])).open("r+b") as file:
            file.seek(int(columns[f"{kind}_offset"][0]))
            file.write(data)


@pytest.fixture(autouse=True, scope="module")
def _loaders_of_other_files_are_gone() -> None:
    """Those in a reference cycle have threads until they are collected, and tests here count threads."""
    gc.collect()


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Hypothesis leaves one for ever, and Python drops an interrupt that comes in it."""
    kept = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = kept


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, photo: Callable[..., bytes]) -> Corpus:
    """50 rows in shards of 17, 17 and 16: three formats and shapes, EXIF orientations, 1 to 3 captions, some labels."""
    folder = tmp_path_factory.mktemp("loader") / "corpus"
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for row in range(50):
        image = photo(*SHAPES[int(rng.integers(3))], seed=row, format=FORMATS[row % 3])
        if row % 9 == 0:
            image = turned(image, 6)
        lengths = rng.integers(3, 41, rng.integers(1, 4))
        captions = [f"picture {row} " + " ".join(rng.choice(WORDS, int(length))) for length in lengths]
        samples.append(Sample(f"{row:05d}", image, probe(image), captions, label=row if row % 7 == 0 else None))
    train_tokenizer([caption for s in samples for caption in s.captions], folder / "tokenizer", vocab_size=400)
    write(folder / "shards", samples, Tokenizer.load(folder / "tokenizer"))
    return Corpus(folder, samples)


@pytest.fixture(scope="session")
def second(corpus: Corpus, photo: Callable[..., bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of nine other rows, three captions each."""
    samples: list[Sample] = []
    for i in range(9):
        image = photo(90, 90 + i, seed=1000 + i)
        captions = [f"a red dog {i}", f"a small blue cat on the street {i}", f"a large tree near a dog {i}"]
        samples.append(Sample(f"second{i}", image, probe(image), captions))
    folder = tmp_path_factory.mktemp("second") / "shards"
    corpus.write_beside(folder, samples)
    return folder


@pytest.fixture(scope="session")
def labelled(corpus: Corpus, photo: Callable[..., bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of forty rows with labels 0 to 4, every fifth caption the same."""
    samples: list[Sample] = []
    for i in range(40):
        image = photo(40, 40, seed=2000 + i)
        caption = "a dog" if i % 5 == 0 else f"cat {i}" + " on the street" * (i % 4)
        samples.append(Sample(f"{i:04d}", image, probe(image), [caption], label=i % 5))
    folder = tmp_path_factory.mktemp("labelled") / "shards"
    corpus.write_beside(folder, samples)
    return folder


TARGETS = {
    "boxes": "json:boxes",
    "box_labels": "json:boxes.category",
    "box_classes": ["cat", "dog"],
    "box_texts": "json:boxes.phrase",
    "keypoints": "json:boxes.keypoints",
    "keypoint_swaps": [[0, 1]],
    "box_buckets": 2,
}
"""Of the samples of `boxed`."""


def with_boxes(corpus: Corpus, folder: Path) -> Corpus:
    """The corpus with up to four boxes in the JSON of each sample, in another folder."""
    samples: list[Sample] = []
    for row, sample in enumerate(corpus.samples):
        boxes = [
            {
                "bbox": [5 * k, 3 * k, 12 + row % 7, 16],
                "category": "dog" if k % 2 else "cat",
                "phrase": f"a small dog {row + k}",
                "keypoints": [5 * k + 2, 3 * k + 2, 2, 5 * k + 9, 3 * k + 9, 1],
            }
            for k in range(row % 5)
        ]
        samples.append(replace(sample, extra={"boxes": boxes}))
    corpus.write_beside(folder / "shards", samples)
    shutil.copytree(corpus.folder / "tokenizer", folder / "tokenizer")
    return Corpus(folder, samples, {"targets": TARGETS})


@pytest.fixture(scope="session")
def boxed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of `with_boxes`."""
    return with_boxes(corpus, tmp_path_factory.mktemp("boxed")).folder / "shards"


def turned(image: bytes, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    opened = Image.open(io.BytesIO(image))
    opened.save(buffer, opened.format, exif=exif)
    return buffer.getvalue()


def write(folder: Path, samples: list[Sample], tokenizer: Tokenizer) -> None:
    with ShardWriter(folder, shard_rows=17, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint) as writer:
        for sample in samples:
            writer.write(sample)


@pytest.fixture(scope="session")
def same() -> Callable[[Batch, Batch], bool]:
    """`same(a, b)`: two batches are equal in every entry, bit for bit."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return a == b

    def compare(a: Batch, b: Batch) -> bool:
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)

    return compare


@pytest.fixture(scope="session")
def join() -> Callable[[list[Batch]], Batch]:
    """`join(batches)`: the batches of all ranks as one."""

    def concatenate(batches: list[Batch]) -> Batch:
        joined: Any = {}
        for key, value in batches[0].items():
            parts: list[Any] = [batch[key] for batch in batches]
            joined[key] = torch.cat(parts) if isinstance(value, Tensor) else list(chain(*parts))
        return joined

    return concatenate


def rows_of(loader: Loader) -> list[int]:
    """The rows of the current epoch as they come, padding left out."""
    return [row for batch in loader for row in batch["rows"].tolist() if row >= 0]


def texts_of(loader: Loader, epoch: int = 0) -> dict[int, str]:
    """The caption of each row in an epoch."""
    loader.set_epoch(epoch)
    pairs = (pair for batch in loader for pair in zip(batch["rows"].tolist(), batch["captions"], strict=True))
    return {row: text for row, text in pairs if row >= 0}


def placed(settings: Any, folder: Path) -> Any:
    """Settings whose texts say FOLDER, with the folder in its place."""
    if isinstance(settings, dict):
        return {name: placed(value, folder) for name, value in settings.items()}
    if isinstance(settings, list):
        return [placed(value, folder) for value in settings]
    return settings.replace("FOLDER", str(folder)) if isinstance(settings, str) else settings
