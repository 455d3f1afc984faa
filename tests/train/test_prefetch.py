"""Batches ahead of the loop: the device's tensors, the loader's state as if nothing was taken ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata import Batch, Loader
from mmdata.convert import ConvertConfig, convert
from mmdata.train import DevicePrefetcher

AHEAD = "meta"  # a device that every torch has: its tensors hold nothing, so these tests look at the keys


@pytest.fixture
def settings(raw_corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """40 rows, 5 steps an epoch."""
    convert(raw_corpus / "captions.jsonl", tmp_path / "shards", ConvertConfig(train_tokenizer=300))
    shards = str(tmp_path / "shards")
    data = {"shards": shards, "tokenizer": f"{shards}/tokenizer", "global_batch_size": 8, "image_size": 16}
    return data | {"loading": {"num_workers": 1}, "text_buckets": 2}


def keys(batches: Any) -> list[list[str]]:
    return [batch["keys"] for batch in batches]


def test_prefetcher_on_a_cpu_hands_on_the_loaders_own_batches():
    batches: list[Any] = [{"valid": torch.ones(2)}, {"valid": torch.zeros(2)}]

    class Two:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Batch]:
            return iter(batches)

    prefetcher = DevicePrefetcher(Two(), "cpu")  # type: ignore[arg-type]
    assert len(prefetcher) == 2
    assert [id(batch) for batch in prefetcher] == [id(batch) for batch in batches]


def test_prefetcher_moves_tensors_and_nothing_else(settings: dict[str, Any]):
    batch = next(iter(DevicePrefetcher(Loader.from_config(settings), AHEAD)))
    assert {value.device.type for value in batch.values() if isinstance(value, torch.Tensor)} == {AHEAD}
    assert batch["pixel_values"].dtype == torch.uint8
    assert batch["keys"] == next(iter(Loader.from_config(settings)))["keys"]


@pytest.mark.parametrize("device", ["cpu", AHEAD])
def test_prefetcher_state_is_the_loaders_at_each_batch(settings: dict[str, Any], device: str):
    loader = Loader.from_config(settings)
    prefetcher = DevicePrefetcher(Loader.from_config(settings), device)
    for _ in range(2):
        assert prefetcher.state_dict() == loader.state_dict()
        for expected, found in zip(loader, prefetcher, strict=True):
            assert found["keys"] == expected["keys"]
            assert prefetcher.state_dict() == loader.state_dict()


@pytest.mark.parametrize("device", ["cpu", AHEAD])
@pytest.mark.parametrize("taken", range(1, 6))
@pytest.mark.sweep(keep=1)
def test_prefetcher_resumed_repeats_and_loses_nothing(settings: dict[str, Any], device: str, taken: int):
    whole = keys(Loader.from_config(settings))
    left = DevicePrefetcher(Loader.from_config(settings), device)
    iterator = iter(left)
    before = [next(iterator)["keys"] for _ in range(taken)]
    resumed = DevicePrefetcher(Loader.from_config(settings), device)
    resumed.load_state_dict(left.state_dict())
    after = keys(resumed) if taken < 5 else []
    assert before + after == whole
    left.load_state_dict(resumed.state_dict())  # also of an object that was a batch ahead
    assert keys(left) == keys(resumed)


def test_prefetcher_set_epoch_begins_where_the_loader_would(settings: dict[str, Any]):
    prefetcher, loader = DevicePrefetcher(Loader.from_config(settings), AHEAD), Loader.from_config(settings)
    iterator = iter(prefetcher)
    for _ in range(4):  # the loader has given its last batch by then
        next(iterator)
    prefetcher.set_epoch(0)
    assert keys(prefetcher) == keys(loader)
    prefetcher.set_epoch(7)
    loader.set_epoch(7)
    assert keys(prefetcher) == keys(loader)


@pytest.mark.parametrize("device", ["cpu", AHEAD])
@pytest.mark.sweep(keep=1)
def test_prefetcher_set_epoch_in_an_iteration_does_what_the_loaders_does(settings: dict[str, Any], device: str):
    loader, prefetcher = Loader.from_config(settings), DevicePrefetcher(Loader.from_config(settings), device)
    whole = [keys(loader) for _ in range(3)]
    for epoch in range(2):
        seen: list[list[str]] = []
        for batch in prefetcher:
            seen.append(batch["keys"])
            prefetcher.set_epoch(epoch if len(seen) < 5 else epoch + 1)  # naming the current one changes nothing
            assert prefetcher.state_dict()["epoch"] == epoch + (len(seen) == 5)
        assert seen == whole[epoch]
    prefetcher.set_epoch(1)
    for taken in range(1, 5):  # an epoch that is left early begins anew
        assert keys(islice(prefetcher, taken)) == whole[1][:taken]
    assert keys(prefetcher) == whole[1]
    for move in (lambda: prefetcher.set_epoch(0), lambda: prefetcher.load_state_dict(loader.state_dict())):
        older = iter(prefetcher)
        next(older)
        move()
        state = prefetcher.state_dict()
        with pytest.raises(RuntimeError, match=r"has ended early: .* moved the \w+'s position.*; iterate"):
            next(older)
        assert prefetcher.state_dict() == state
    assert state["epoch"] == 3
    assert prefetcher.state_dict() == loader.state_dict()


def test_prefetcher_error_comes_after_the_batches_before_it():
    class Two:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def __iter__(self) -> Iterator[Any]:
            yield {"keys": ["a"]}
            yield {"keys": ["b"]}
            raise OSError("disk is gone")

    iterator = iter(DevicePrefetcher(Two(), AHEAD))  # type: ignore[arg-type]
    assert [next(iterator)["keys"] for _ in range(2)] == [["a"], ["b"]]
    with pytest.raises(OSError, match="disk is gone"):
        next(iterator)


def test_prefetcher_adds_copies_to_the_loaders_clock(settings: dict[str, Any]):
    loader = Loader.from_config(settings)
    prefetcher = DevicePrefetcher(loader, AHEAD)
    assert prefetcher.stats is loader.stats
    assert len(list(prefetcher)) == 5
    assert loader.stats.transfer_s > 0
