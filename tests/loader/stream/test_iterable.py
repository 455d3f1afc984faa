"""Batches of an iterable of WebDataset samples: those of the real package, as their user shuffles and filters them."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from torch import Tensor

import mmdata
from mmdata.errors import ConfigError, DataError
from tests.loader.stream.conftest import NUM_SAMPLES

ALL = sorted(f"{i:04d}" for i in range(NUM_SAMPLES))


def urls(shards: Path) -> list[str]:
    return [str(path) for path in sorted(shards.glob("*.tar"))]


def keys(stream: Any) -> list[str]:
    return [key for batch in stream for key in batch["keys"] if key]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_webdataset_gives_the_rows_of_a_stream(shards: Path, config: Any, num_workers: int):
    settings = config(num_workers=num_workers, text_buckets=[48])
    stream = mmdata.stream(wds.WebDataset(urls(shards), shardshuffle=False), settings)
    expected = {
        k: p for b in mmdata.stream(shards, settings) for k, p in zip(b["keys"], b["pixel_values"], strict=True)
    }
    batches = [*stream]
    assert sorted(key for batch in batches for key in batch["keys"] if key) == ALL
    for batch in batches:
        for key, pixels in zip(batch["keys"], batch["pixel_values"], strict=True):
            assert not key or bool((pixels == expected[key]).all())
    assert sorted(keys(stream)) == ALL, "the next epoch is another iteration"
    assert repr(stream).startswith("Stream(the iterable, batches of 4 rows")


def test_a_pipeline_of_ones_own_gives_bucketed_and_padded_batches(shards: Path, config: Any):
    pipeline = wds.DataPipeline(
        wds.SimpleShardList(urls(shards)),
        wds.tarfile_to_samples(),
        wds.shuffle(10, initial=10),
        wds.select(lambda sample: sample["__key__"] != "0007"),
    )
    batches = [*mmdata.stream(pipeline, config())]
    assert sorted(key for batch in batches for key in batch["keys"] if key) == [key for key in ALL if key != "0007"]
    assert len({batch["input_ids"].shape[1] for batch in batches}) > 1
    assert sum(int((~batch["valid"]).sum()) for batch in batches) == -37 % 4


def test_the_order_is_the_users_without_shuffle(shards: Path, config: Any):
    settings = config(shuffle=False, text_buckets=[48])
    found = keys(mmdata.stream(wds.WebDataset(urls(shards), shardshuffle=False), settings))
    assert found == ALL


def test_an_endless_iterable_may_repeat_keys_and_needs_steps(shards: Path, config: Any):
    endless = wds.WebDataset(urls(shards), resampled=True)
    stream = mmdata.stream(endless, config(), steps_per_epoch=30)
    assert len(stream) == 30
    for _ in range(2):
        counts = Counter(keys(stream))
        assert counts.total() == 120
        assert max(counts.values()) > 1
    stream.close()


def test_buffers_are_let_go(shards: Path, config: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mmdata.loader.growing.tars.BUFFER_ROWS", 4)
    endless = wds.WebDataset(urls(shards), resampled=True)
    with mmdata.stream(endless, config(num_workers=2, text_buckets=1), steps_per_epoch=200) as stream:
        held = [len(stream._plan._tars.source._files) for _ in stream]
    assert max(held) < 20, "of a hundred and more"


@pytest.mark.parametrize("num_samples", [4, 8])
def test_passes_may_be_shorter_than_what_is_prefetched(photo: Any, config: Any, num_samples: int):
    samples = [{"__key__": f"{i}", "jpg": photo(20, 16, seed=i), "txt": f"picture {i}"} for i in range(num_samples)]

    def slow(image: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
        time.sleep(0.01)
        return torch.zeros(3, *size, dtype=torch.uint8)

    settings = config(num_workers=1, prefetch_batches=6, text_buckets=1, transform=slow)
    with mmdata.stream(Samples(samples), settings) as stream:
        for _ in range(6):
            assert sorted(map(int, keys(stream))) == list(range(num_samples))


def test_bad_samples_are_in_the_ledger(photo: Any, config: Any):
    samples = [
        {"__key__": "a", "jpg": photo(20, 20), "txt": "a dog"},
        {"__key__": "b", "jpg": b"<html>", "txt": b"no image"},
        {"__key__": "c", "jpg": photo(20, 20)[:-200], "txt": "cut"},
        {"__key__": "d", "JPG": photo(20, 20, seed=1), "json": json.dumps({"caption": "a cat"}).encode()},
    ]
    stream = mmdata.stream(Samples(samples), config(max_bad_share=0.9))
    (batch,) = stream
    assert sorted(key for key, ok in zip(batch["keys"], batch["valid"].tolist(), strict=True) if ok) == ["a", "d"]
    assert {(entry.key, entry.reason) for entry in stream.ledger} == {("b", "not_an_image"), ("c", "corrupt_image")}


@pytest.mark.parametrize("image", [b"<html>", slice(-200)])  # left out, masked
def test_the_end_by_bad_samples_names_no_row_and_no_shards(photo: Any, config: Any, image: Any):
    pixels = photo(20, 20)
    samples = [
        {"__key__": "a", "jpg": pixels, "txt": "a dog"},
        {"__key__": "b", "jpg": image if isinstance(image, bytes) else pixels[image], "txt": "a cat"},
    ]
    with pytest.raises(DataError, match=r"1 of 2 rows could not be used .* max_bad_share 5") as caught:
        list(mmdata.stream(Samples(samples), config()))
    assert "replay" not in str(caught.value)
    assert "verify" not in str(caught.value)


class Samples:
    """An iterable that is no list, which would be one of names of shards."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            lambda d: d.decode("pil"),
            r"sample '0000': '\w+' is of type \w+, and a stream takes .*leave out \.decode\(\)",
        ),
        (lambda d: d.decode("torchrgb"), r"is of type Tensor, .*leave out \.decode\(\)"),
        (
            lambda d: d.to_tuple("txt"),
            r"as WebDataset does, dictionaries with __key__ .*got tuple; leave out \.to_tuple",
        ),
    ],
)
def test_samples_that_are_decoded_or_no_samples_are_refused(shards: Path, config: Any, dataset: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        mmdata.stream(dataset(wds.WebDataset(urls(shards), shardshuffle=False)), config())


def test_a_key_that_no_tar_can_hold_is_named(config: Any, photo: Any):
    samples = [{"__key__": key, "jpg": photo(16, 16), "txt": b"a dog"} for key in ("short", "k" * 300)]
    with pytest.raises(ConfigError, match=r"^stream: sample 'k+.*: 'jpg' of .* bytes .* \(name is too long\): give "):
        mmdata.stream(Samples(samples), config())


def test_an_iterable_without_a_usable_sample_is_an_error(config: Any):
    with pytest.raises(DataError, match=r"^stream: no sample in the iterable$"):
        mmdata.stream(Samples([]), config())


def test_a_generator_gives_one_pass_and_the_next_is_an_error(photo: Any, config: Any):
    samples = ({"__key__": f"{i}", "jpg": photo(20, 20, seed=i), "txt": f"picture {i}"} for i in range(6))
    stream = mmdata.stream(samples, config())
    assert len([*stream]) == 2
    with pytest.raises(DataError, match="no sample in pass 1; an iterable must give its samples again in each pass"):
        list(stream)


def test_a_state_skips_what_was_given_and_says_what_it_relies_on(shards: Path, config: Any, caplog: Any):
    def make() -> mmdata.Loader:
        return mmdata.stream(wds.WebDataset(urls(shards), shardshuffle=False), config(transform="train"))

    expected = [batch["keys"] for batch in make()]
    running = make()
    list(islice(running, 3))
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
    assert "the samples of the first 3 batches of the iterable are read again and dropped: it must give" in caplog.text
    assert [batch["keys"] for batch in resumed] == expected[3:]
    other = mmdata.stream(wds.WebDataset(urls(shards)[1:], shardshuffle=False), config(transform="train"))
    with pytest.raises(ConfigError, match=r"an iterable that gives the same samples in the same order \(seed its"):
        other.load_state_dict(running.state_dict())


def test_ranks_have_iterables_of_their_own_and_equal_steps(shards: Path, config: Any):
    names = urls(shards)
    with pytest.raises(ConfigError, match=r"world_size is 2, and ranks whose iterables .*give steps_per_epoch"):
        mmdata.stream(wds.WebDataset(names[:2], shardshuffle=False), config(), rank=0, world_size=2)
    for rank in range(2):
        dataset = wds.WebDataset(names[rank::2], shardshuffle=False)
        stream = mmdata.stream(dataset, config(), rank=rank, world_size=2, steps_per_epoch=8)
        batches = [*stream]
        assert [len(batch["keys"]) for batch in batches] == [2] * 8
        assert {int(key) // 10 % 2 for batch in batches for key in batch["keys"] if key} == {rank}
        assert (stream.rank, stream.world_size, stream.batch_size) == (rank, 2, 2)


def test_another_process_cannot_iterate(config: Any):
    with pytest.raises(ConfigError, match=r"another process cannot iterate .* or give the names of the shards"):
        mmdata.stream(Samples([]), config(num_processes=1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pass_that_is_left_and_begun_again_may_have_other_samples_in_the_same_tars(
    photo: Any, config: Any, monkeypatch: pytest.MonkeyPatch, num_workers: int
):
    monkeypatch.setattr("mmdata.loader.growing.tars.BUFFER_ROWS", 4)
    samples = [{"__key__": f"{i}", "jpg": photo(20, 16 + i, seed=i), "txt": f"picture {i}"} for i in range(40)]

    class Shuffled:
        def __iter__(self) -> Any:
            samples.reverse()
            return iter(samples)

    stream = mmdata.stream(Shuffled(), config(num_workers=num_workers, text_buckets=1))
    for steps in (1, 4, 7):
        stream.set_epoch(0)
        list(islice(stream, steps))
    stream.set_epoch(0)
    for _ in range(2):
        assert sorted(map(int, keys(stream))) == list(range(40))
    assert not [*stream.ledger]
