"""Streams give the loader's batches from shards without an index."""

from __future__ import annotations

import logging
import math
from itertools import chain

import pytest
import torch

import mmdata
from mmdata.batch import Batch
from mmdata.errors import ConfigError, DataError
from mmdata.loader.stream import Stream

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


@pytest.mark.parametrize("image_buckets", [None, [(16, 16), (16, 24), (24, 16)]])
def test_stream_gives_the_rows_of_the_indexed_loader(shards, config, image_buckets):
    names = ["pixel_values", "labels", "image_hash"]
    settings = config(shards=str(shards), image_buckets=image_buckets)
    # one batch of the loader is merged over image shapes at the end of an epoch: compare those of equal shape
    loaded, streamed = ([*each] for each in (mmdata.Loader.from_config(settings), mmdata.stream(None, settings)))
    got, expected = valid_rows(streamed, *names), valid_rows(loaded, *names)
    assert len(got) == NUM_SAMPLES
    assert got.keys() == expected.keys()
    same_shape = {key for key in got if got[key][0].shape == expected[key][0].shape}
    assert len(same_shape) >= (NUM_SAMPLES if image_buckets is None else 20)
    assert_equal_rows({key: got[key] for key in same_shape}, {key: expected[key] for key in same_shape})


def test_stream_tokenizes_as_the_loader_does(shards, config):
    settings = config(shards=str(shards), text_buckets=[48])
    names = ["caption_hash", "input_ids", "attention_mask"]
    got = valid_rows([*mmdata.stream(None, settings)], *names)
    expected = valid_rows([*mmdata.Loader.from_config(settings)], *names)
    single = [f"{i:04d}" for i in range(0, NUM_SAMPLES, 3)]  # with one caption there is nothing to choose
    assert_equal_rows({key: got[key] for key in single}, {key: expected[key] for key in single})


def test_stream_batches_have_the_contract_of_batch(shards, config):
    batches = [*mmdata.stream(str(shards), config())]
    for batch in batches:
        length = batch["input_ids"].shape[1]
        assert batch["pixel_values"].dtype == torch.uint8
        assert batch["pixel_values"].shape == (4, 3, 16, 16)
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, length)
        assert {batch[name].dtype for name in ("input_ids", "attention_mask", "labels", "rows")} == {torch.int64}
        assert bool((batch["attention_mask"][:, 0] == 1).all())
        assert (batch["rows"] >= 0).tolist() == batch["valid"].tolist() == [key != "" for key in batch["keys"]]
    assert len(batches) == math.ceil(NUM_SAMPLES / 4)
    rows = [row for batch in batches for row in batch["rows"].tolist() if row >= 0]
    assert len(set(rows)) == NUM_SAMPLES
    assert len({batch["input_ids"].shape[1] for batch in batches}) > 1


def test_stream_pads_less_than_a_single_text_length(shards, config):
    bucketed = mmdata.stream(str(shards), config())
    single = mmdata.stream(str(shards), config(text_buckets=[48]))
    assert len([*bucketed]) == len([*single])
    assert bucketed.stats.tokens == single.stats.tokens
    assert bucketed.stats.token_places < 0.8 * single.stats.token_places


def test_stream_reads_brace_patterns_and_lists_alike(shards, config):
    plain = [shards / f"{i:06d}.tar" for i in range(4)]
    expected = keys_in_order([*mmdata.stream(shards, config())])
    assert keys_in_order([*mmdata.stream(f"{shards}/{{000000..000003}}.tar", config())]) == expected
    assert keys_in_order([*mmdata.stream(plain, config())]) == expected
    assert keys_in_order([*mmdata.stream(list(map(str, plain)), {"data": config()})]) == expected


def test_stream_names_the_shard_of_a_cut_connection_or_a_missing_file(shards, config, tmp_path, serve):
    (tmp_path / "cut.tar").write_bytes((shards / "000000.tar").read_bytes())
    url = serve(tmp_path)
    with pytest.raises(DataError, match=rf"'{url}/cut.tar': cannot be fetched, .* byte \d+ on, the last one: Client"):
        mmdata.stream(f"{url}/cut.tar", config())
    with pytest.raises(DataError, match=rf"'{url}/none.tar': no such file; upload it, or correct the URL"):
        mmdata.stream(f"{url}/none.tar?signature=secret", config())


@pytest.mark.parametrize("num_workers", [1, 3])
def test_stream_is_the_same_for_any_number_of_workers(shards, config, num_workers):
    first = [*mmdata.stream(shards, config(num_workers=0, transform="train"))]
    other = [*mmdata.stream(shards, config(num_workers=num_workers, transform="train"))]
    assert keys_in_order(first) == keys_in_order(other)
    assert_equal_rows(valid_rows(other, "pixel_values"), valid_rows(first, "pixel_values"))


def test_stream_epochs_differ_in_order_and_set_epoch_repeats_one(shards, config):
    stream = mmdata.stream(shards, config())
    first, second = keys_in_order([*stream]), keys_in_order([*stream])
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second))
    stream.set_epoch(0)
    assert keys_in_order([*stream]) == first
    assert keys_in_order([*stream]) == second
    with pytest.raises(ValueError, match="epoch must be 0 or more: got -1"):
        stream.set_epoch(-1)


def test_stream_without_shuffle_keeps_the_order_of_the_shards(shards, config):
    batches = [*mmdata.stream(shards, config(shuffle=False, text_buckets=[48]))]
    assert [*chain(*keys_in_order(batches[:-1]))] == [f"{i:04d}" for i in range(36)]
    assert keys_in_order(batches[-1:]) == [["", "0036", "", "0037"]]


def test_stream_goes_through_all_captions_of_a_sample(shards, config):
    stream = mmdata.stream(shards, config())
    seen = [{key: int(h) for key, (h,) in valid_rows([*stream], "caption_hash").items()} for _ in range(3)]
    for i in range(NUM_SAMPLES):
        assert len({hashes[f"{i:04d}"] for hashes in seen}) == 1 + i % 3


@pytest.mark.parametrize("world_size", [2, 4])
def test_stream_ranks_share_the_samples_and_crop_them_alike(shards, config, world_size):
    settings = config(transform="train", crop_scale=(0.2, 1.0))
    streams = [mmdata.stream(shards, settings, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [stream.batch_size for stream in streams] == [4 // world_size] * world_size
    ranks = [[*stream] for stream in streams]
    whole = [*mmdata.stream(shards, settings)]
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert [*chain(*keys_in_order(parts))] == batch["keys"]
        assert {part["input_ids"].shape[1] for part in parts} == {batch["input_ids"].shape[1]}
    batches, alone = [*chain(*ranks)], valid_rows(whole, "pixel_values")
    assert_equal_rows(valid_rows(batches, "pixel_values"), alone)
    rows = [row for batch in batches for row in batch["rows"].tolist() if row >= 0]
    assert len(set(rows)) == NUM_SAMPLES


def test_ranks_that_do_not_divide_the_batch_are_refused(shards, config):
    with pytest.raises(ValueError, match="global_batch_size 4 is not a multiple of world_size 3; 3 is"):
        mmdata.stream(shards, config(), rank=0, world_size=3)


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
