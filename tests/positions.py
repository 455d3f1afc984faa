"""What has a position: Loader, Stream and the batch samplers, each on 15 rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import mmdata
from mmdata.images import ImageInfo
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import train_tokenizer
from tests.flat_settings import grouped
from tests.shard_writer import ShardWriter

ROWS, STEPS = 15, 4  # of an epoch, in batches of 4
LENGTHS = [3, 9, 1, 4, 9, 2, 6, 5, 3, 5, 7, 2, 8, 4, 1]
KINDS = ["loader", "stream", "stream of passes", "bucket sampler", "two-stream sampler"]


@dataclass(frozen=True)
class Kind:
    """One of the things that have a position: `make(num_workers=…, seed=…)` makes one."""

    name: str
    make: Callable[..., Any]

    def give(self, batches: Any) -> list[Any]:
        """What batches hold, to be compared: rows, or keys with the sums of their pixels."""
        if self.name.endswith("sampler"):
            return list(batches)
        return [(b["keys"], b["pixel_values"].long().flatten(1).sum(1).tolist()) for b in batches]

    def epochs(self, count: int, **changes: Any) -> list[list[Any]]:
        """The first epochs of one that nobody disturbs."""
        made = self.make(**changes)
        return [self.give(made) for _ in range(count)]

    def at(self, epoch: int, step: int) -> Any:
        """One that has yielded so many batches of an epoch, and the iteration that yielded them."""
        made = self.make()
        for _ in range(epoch):
            list(made)
        iteration = iter(made)
        assert len([*islice(iteration, step)]) == step
        return made, iteration


def make_settings(folder: Path, photo: Callable[..., bytes]) -> dict[str, Any]:
    """The section `data` on 15 rows in two shards, with random crops."""
    captions = ["a red dog" + " and a cat" * (i % 4) for i in range(ROWS)]
    train_tokenizer(captions, folder / "tokenizer", vocab_size=300, max_length=32)
    with ShardWriter(folder / "shards", shard_rows=8) as writer:
        for i, caption in enumerate(captions):
            writer.write(Sample(f"{i:02d}", photo(24, 24, seed=i), ImageInfo("JPEG", 24, 24, 1), [caption]))
    data = {"shards": str(folder / "shards"), "tokenizer": str(folder / "tokenizer"), "global_batch_size": 4}
    return data | {"image_size": 16, "max_length": 32, "text_buckets": [32], "crop_scale": [0.3, 0.9]}


def make_kind(name: str, settings: dict[str, Any]) -> Kind:
    """One of KINDS."""

    def loader(**changes: Any) -> Any:
        return mmdata.Loader.from_config(grouped(**settings | changes))

    def stream(**changes: Any) -> Any:
        return mmdata.stream(
            None, grouped(**settings | changes), steps_per_epoch=STEPS + 1
        )  # epochs and passes end apart

    def passes(**changes: Any) -> Any:
        return mmdata.stream(None, grouped(**settings | changes))

    def bucket(*, num_workers: int = 0, **changes: Any) -> Any:
        return mmdata.BucketBatchSampler(LENGTHS, 4, bounds=[4, 9], **changes)

    def two_stream(*, num_workers: int = 0, **changes: Any) -> Any:
        return mmdata.TwoStreamBatchSampler(range(ROWS), [20, 21, 22], 6, 2, **changes)

    return Kind(name, dict(zip(KINDS, [loader, stream, passes, bucket, two_stream], strict=True))[name])


def reload(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes out of a file."""
    return json.loads(json.dumps(state))
