"""Shards, and a server on loopback that serves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mmdata.images import probe
from mmdata.storage import attempts
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from tests.flat_settings import grouped
from tests.shard_writer import ShardWriter
from tests.storage import servers as servers_of_tests

NUM_SAMPLES = 38


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests are repeated without a minute of waiting."""
    monkeypatch.setattr(attempts, "WAIT_S", 0.001)


@pytest.fixture(autouse=True)
def _cache_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tars behind URLs are fetched into a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def targets_in(member: str) -> dict[str, Any]:
    """A setting `targets` for the samples of `shards` (json) and of `uneven` (boxes.json)."""
    labels = {"box_labels": f"{member}:boxes.category", "box_classes": ["cat", "dog"]}
    return {"boxes": f"{member}:boxes", **labels, "box_texts": f"{member}:boxes.phrase", "box_buckets": [1, 3]}


def boxes_of_sample(i: int) -> list[dict[str, Any]]:
    """Up to three boxes, two of them on all images."""
    boxes = [[2, 3, 12, 9], [5, 4, 10 + i % 5, 12], [0, 0, 60, 60]][: i % 4]
    return [{"bbox": box, "category": "dog", "phrase": f"a dog {i}"} for box in boxes]


def captions_of_sample(i: int) -> list[str]:
    """One to three captions, of 2 to 40 words."""
    return [f"picture {i} of" + " a red dog" * ((7 * i + 5 * j) % 13) for j in range(1 + i % 3)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> str:
    """A tokenizer's folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    captions = [caption for i in range(NUM_SAMPLES) for caption in captions_of_sample(i)]
    train_tokenizer(captions, folder, vocab_size=300, max_length=48)
    return str(folder)


@pytest.fixture(scope="session")
def shards(tmp_path_factory, photo, tokenizer) -> Path:
    """Four indexed shards of ten, ten, ten and eight samples; three formats, three shapes, labels on every fourth."""
    folder = tmp_path_factory.mktemp("corpus") / "shards"
    counter = Tokenizer.load(tokenizer, max_length=48)
    with ShardWriter(folder, shard_rows=10, count_tokens=counter.count, tokenizer=counter.fingerprint) as writer:
        for i in range(NUM_SAMPLES):
            height, width = ((24, 24), (20, 32), (32, 20))[i % 3]
            image = photo(height, width, seed=i, format=("JPEG", "PNG", "WEBP")[i % 3])
            label = i if i % 4 == 0 else None
            writer.write(
                Sample(f"{i:04d}", image, probe(image), captions_of_sample(i), label, {"boxes": boxes_of_sample(i)})
            )
    return folder


@pytest.fixture
def config(tokenizer):
    """`config(**changes) -> dict`: a section data without `shards`."""

    def make(**changes: object) -> dict[str, object]:
        settings = {
            "tokenizer": tokenizer,
            "global_batch_size": 4,
            "image_size": 16,
            "max_length": 48,
            "text_buckets": 3,
            "transform": "eval",
        }
        return grouped(**settings | changes)

    return make


@pytest.fixture
def uneven(tmp_path, tar, photo):
    """`uneven(5, 50, …) -> folder`: shards of so many samples; keys are numbers, counted on through all shards."""

    def make(*sizes: int) -> Path:
        number = 0
        for shard, size in enumerate(sizes):
            members = []
            for i in range(number, number + size):
                image = photo(24, 20 + 12 * (i % 2), seed=i)
                members += [(f"{i:04d}.jpg", image), (f"{i:04d}.txt", (f"picture {i}" + " red" * (i % 9)).encode())]
                members.append((f"{i:04d}.boxes.json", json.dumps({"boxes": boxes_of_sample(i)}).encode()))
            number += size
            (tmp_path / f"{shard}.tar").write_bytes(tar(members))
        return tmp_path

    return make


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """`serve(folder) -> "http://…"`: a real server, until the test ends."""
    with ExitStack() as servers:
        yield lambda folder: servers.enter_context(servers_of_tests.serve(folder)).url
