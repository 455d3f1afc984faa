"""Streams give the loader's batches from shards without an index."""

from __future__ import annotations

import logging
from itertools import chain

import pytest
import torch

import mmdata
from mmdata.batch import Batch
from mmdata.errors import ConfigError, DataError
from mmdata.loader.stream import Stream

from .conftest import targets_in

NUM_SAMPLES = 38


def valid_rows(batches: list[Batch], *names: str) -> dict[str, tuple[torch.Tensor, ...]]:
    """Key -> its row of each named tensor; every key once."""
    rows: dict[str, tuple[torch.Tensor, ...]] = {}
    for batch in batches:
        for i in batch["valid"].nonzero().flatten().tolist():
            key = batch["keys"][i]
            assert key not in rows
            rows[key] = tuple(batch[name][i] for name in names)  # type: ignore[literal-required]
    return rows


def keys_in_order(batches: list[Batch]) -> list[list[str]]:
    return [batch["keys"] for batch in batches]


def assert_equal_rows(got: dict[str, tuple[torch.Tensor, ...]], expected: dict[str, tuple[torch.Tensor, ...]]) -> None:
    assert got.keys() == expected.keys()
    for key, tensors in expected.items():
        assert all(map(torch.equal, got[key], tensors)), key


BOXES = ["boxes", "boxes_valid", "box_labels", "box_text_hash"]


@pytest.mark.parametrize(
    ("image_buckets", "targets"),
    [
        (None, None),
        ([(16, 16), (16, 24), (24, 16)], None),
        (None, {**targets_in("json"), "box_buckets": [3]}),
    ],
)
def test_stream_gives_the_rows_of_the_indexed_loader(shards, config, image_buckets, targets):
    names = ["pixel_values", "labels", "image_hash", *(BOXES if targets else [])]
    settings = config(shards=str(shards), image_buckets=image_buckets, targets=targets)
    # one batch of the loader is merged over image shapes at the end of an epoch: compare those of equal shape
    loaded, streamed = ([*each] for each in (mmdata.Loader.from_config(settings), mmdata.stream(None, settings)))
    got, expected = valid_rows(streamed, *names), valid_rows(loaded, *names)
    assert len(got) == NUM_SAMPLES
    assert got.keys() == expected.keys()
    same_shape = {key for key in got if got[key][0].shape == expected[key][0].shape}
    assert len(same_shape) >= (NUM_SAMPLES if image_buckets is None else 20)
    assert_equal_rows({key: got[key] for key in same_shape}, {key: expected[key] for key in same_shape})


def test_stream_reads_brace_patterns_and_lists_alike(shards, config):
    plain = [shards / f"{i:06d}.tar" for i in range(4)]
    expected = keys_in_order([*mmdata.stream(shards, config())])
    assert keys_in_order([*mmdata.stream(f"{shards}/{{000000..000003}}.tar", config())]) == expected
    assert keys_in_order([*mmdata.stream(plain, config())]) == expected
    assert keys_in_order([*mmdata.stream(list(map(str, plain)), {"data": config()})]) == expected


def test_stream_without_shuffle_keeps_the_order_of_the_shards(shards, config):
    batches = [*mmdata.stream(shards, config(shuffle=False, text_buckets=[48]))]
    assert [*chain(*keys_in_order(batches[:-1]))] == [f"{i:04d}" for i in range(36)]
    assert keys_in_order(batches[-1:]) == [["", "0036", "", "0037"]]


def test_stream_goes_through_all_captions_of_a_sample(shards, config):
    stream = mmdata.stream(shards, config())
    seen = [{key: int(h) for key, (h,) in valid_rows([*stream], "caption_hash").items()} for _ in range(3)]
    for i in range(NUM_SAMPLES):
        assert len({hashes[f"{i:04d}"] for hashes in seen}) == 1 + i % 3


@pytest.mark.parametrize(("world_size", "targets"), [(2, None), (4, None), (2, targets_in("json"))])
def test_stream_ranks_share_the_samples_and_crop_them_alike(shards, config, world_size, targets):
    settings = config(transform="train", crop_scale=(0.2, 1.0), targets=targets)
    names = ["pixel_values", *(BOXES if targets else [])]
    streams = [mmdata.stream(shards, settings, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [stream.batch_size for stream in streams] == [4 // world_size] * world_size
    ranks = [[*stream] for stream in streams]
    whole = [*mmdata.stream(shards, settings)]
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert [*chain(*keys_in_order(parts))] == batch["keys"]
        assert {part["input_ids"].shape[1] for part in parts} == {batch["input_ids"].shape[1]}
    batches, alone = [*chain(*ranks)], valid_rows(whole, *names)
    assert_equal_rows(valid_rows(batches, *names), alone)
    rows = [row for batch in batches for row in batch["rows"].tolist() if row >= 0]
    assert len(set(rows)) == NUM_SAMPLES


@pytest.mark.parametrize("shards", ["pipe:cat x.tar", ["a.tar", "pipe:curl http://x/"], "{pipe:a,b}.tar", "x::pipe:y"])
def test_stream_refuses_pipes(config, shards):
    with pytest.raises(ConfigError, match="pipe: would run a command, and nothing in data may"):
        mmdata.stream(shards, config())
    if isinstance(shards, str):
        with pytest.raises(ConfigError, match="pipe: would run a command"):
            mmdata.stream(None, config(shards=shards))


def test_stream_refuses_several_datasets(shards, config):
    one, two = {"shards": str(shards)}, {"shards": "other"}
    with pytest.raises(
        ConfigError, match=r"^data\.shards names 2 datasets, and a stream mixes none: use one mmdata\.Loader"
    ):
        mmdata.stream(None, config(shards=[one, two]))
    expected = keys_in_order([*mmdata.stream(shards, config())])
    assert keys_in_order([*mmdata.stream(None, config(shards=[one]))]) == expected
    assert keys_in_order([*mmdata.stream(shards, config(shards=[one, two]))]) == expected


def test_stream_refuses_shards_that_are_not_there(config, tmp_path):
    with pytest.raises(DataError, match=r"shard '.*/0\.tar': no such file or directory; check the path"):
        mmdata.stream(f"{tmp_path}/{{0..3}}.tar", config())
    with pytest.raises(DataError, match=r"folder '.*': no \.tar in it; `mmdata convert "):
        mmdata.stream(tmp_path, config())
    with pytest.raises(DataError, match="an empty list of shards"):
        mmdata.stream([], config())
    with pytest.raises(ConfigError, match="braces that do not close"):
        mmdata.stream("{0..3.tar", config())


def test_stream_has_no_length_and_says_how_to_get_one(shards, config):
    stream = mmdata.stream(shards, config())
    with pytest.raises(TypeError, match=r"a stream has no length.*`mmdata index` makes one, and mmdata.Loader has"):
        len(stream)
    assert stream


@pytest.mark.parametrize("steps_per_epoch", [None, 3])
def test_stream_in_order_logs_nothing(shards, config, caplog, steps_per_epoch: int | None):
    with caplog.at_level(logging.INFO, logger="mmdata"):
        stream = mmdata.stream(shards, config(), steps_per_epoch=steps_per_epoch)
        for _ in range(2):
            for _ in stream:
                pass
    assert caplog.messages == []


def test_stream_is_a_function_also_after_its_module_was_imported():
    import mmdata.loader.stream

    assert mmdata.stream is mmdata.loader.stream.stream
    assert mmdata.stream.__annotations__["return"] == Stream.__name__
