"""The loader: every row once, the same global batches however many ranks and workers, resumed anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from mmdata import Batch, Loader
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError, DataError
from mmdata.images.pixels import EncodedImage, PixelTransform
from mmdata.plan import Bucket, choose_captions
from tests.images.placed import pixels
from tests.shard_writer import ShardWriter

from .conftest import Corpus

Same = Callable[[Batch, Batch], bool]


def valid_rows(batches: list[Batch]) -> list[int]:
    return [row for batch in batches for row in batch["rows"][batch["valid"]].tolist()]


# What a batch holds


def test_loader_gives_every_row_once_an_epoch(corpus: Corpus):
    loader = corpus.loader()
    for epoch in range(3):
        batches = list(loader)
        assert len(batches) == len(loader) == 7
        assert sorted(valid_rows(batches)) == list(range(50))
        assert valid_rows(batches) != list(range(50))
        assert list(loader.ledger) == []
        assert loader.stats.rows == 50 * (epoch + 1)
        assert loader.stats.masked == 6 * (epoch + 1)


def test_loader_batch_has_the_shapes_and_types_of_the_contract(corpus: Corpus):
    loader, lists = corpus.loader(), ("keys", "captions")
    for batch in loader:
        length, height, width = batch["input_ids"].shape[1], *batch["pixel_values"].shape[2:]
        assert Bucket(length, height, width) in loader.plan.policy.buckets
        assert {key: (value.dtype, tuple(value.shape)) for key, value in batch.items() if key not in lists} == {
            "pixel_values": (torch.uint8, (8, 3, height, width)),
            "input_ids": (torch.int64, (8, length)),
            "attention_mask": (torch.int64, (8, length)),
            "labels": (torch.int64, (8,)),
            "crop": (torch.float32, (8, 4)),
            "flipped": (torch.bool, (8,)),
            "image_hash": (torch.int64, (8,)),
            "caption_hash": (torch.int64, (8,)),
            "caption_numbers": (torch.int64, (8,)),
            "valid": (torch.bool, (8,)),
            "rows": (torch.int64, (8,)),
        }
        assert [len(batch[name]) for name in lists] == [8, 8]


def test_loader_rows_are_those_of_the_corpus(corpus: Corpus):
    tokenizer = AutoTokenizer.from_pretrained(corpus.folder / "tokenizer")
    transform = PixelTransform("train", crop_scale=(0.3, 0.9), seed=5)
    counts = np.array([len(sample.captions) for sample in corpus.samples])
    loader = corpus.loader()
    for epoch in range(2):
        chosen = choose_captions(np.arange(50), counts, epoch)
        for batch in loader:
            for place in batch["valid"].nonzero().flatten().tolist():
                row = int(batch["rows"][place])
                sample = corpus.samples[row]
                assert batch["keys"][place] == sample.key
                assert batch["labels"][place] == (-1 if sample.label is None else sample.label)
                ids = tokenizer(sample.captions[chosen[row]], truncation=True, max_length=32)["input_ids"]
                assert batch["input_ids"][place][batch["attention_mask"][place].bool()].tolist() == ids
                image = EncodedImage(sample.image, sample.info.format, sample.info.orientation, row)
                expected = pixels(transform, image, tuple(batch["pixel_values"].shape[2:]), epoch=epoch)
                assert torch.equal(batch["pixel_values"][place], expected)


def test_loader_masked_rows_are_empty_but_harmless(corpus: Corpus):
    for batch in corpus.loader():
        masked = ~batch["valid"]
        assert (batch["rows"][masked] == -1).all()
        assert (batch["labels"][masked] == -1).all()
        assert (batch["pixel_values"][masked] == 0).all()
        # Attention over nothing at all would be NaN.
        assert (batch["attention_mask"][masked].sum(1) == 1).all()
        assert [key for key, valid in zip(batch["keys"], batch["valid"], strict=True) if not valid] == [""] * int(
            masked.sum()
        )


def test_loader_equal_hashes_are_equal_images_and_captions(corpus: Corpus, tmp_path: Path):
    twice = [corpus.samples[0], corpus.samples[1]]
    with ShardWriter(tmp_path / "s") as writer:
        for key, image, caption in [("a", 0, 0), ("b", 0, 1), ("c", 1, 0), ("d", 1, 1)]:
            writer.write(replace(twice[image], key=key, captions=[twice[caption].captions[0]], label=None))
    settings = {"shuffle": False, "image_buckets": None, "image_size": 8, "global_batch_size": 4}
    (batch,) = corpus.loader(shards=str(tmp_path / "s"), **settings)
    order = {key: place for place, key in enumerate(batch["keys"])}
    places = [order[key] for key in "abcd"]
    image_hash, caption_hash = batch["image_hash"][places], batch["caption_hash"][places]
    assert [image_hash[0] == image_hash[1], image_hash[2] == image_hash[3]] == [True, True]
    assert [caption_hash[0] == caption_hash[2], caption_hash[1] == caption_hash[3]] == [True, True]
    assert image_hash[0] != image_hash[2]
    assert caption_hash[0] != caption_hash[1]
    assert "labels" not in batch


def test_loader_padding_is_what_the_buckets_leave(corpus: Corpus):
    loader = corpus.loader()
    batches = list(loader)
    tokens = sum(int(batch["attention_mask"][batch["valid"]].sum()) for batch in batches)
    places = sum(int(batch["valid"].sum()) * batch["input_ids"].shape[1] for batch in batches)
    assert loader.stats.padding_share == pytest.approx(1 - tokens / places)
    assert len({batch["input_ids"].shape[1] for batch in batches}) > 1


def test_loader_in_order_gives_the_order_of_the_index(corpus: Corpus):
    loader = corpus.loader(shuffle=False, transform="eval", image_buckets=None, image_size=16, text_buckets=[32])
    assert valid_rows(list(loader)) == list(range(50))


def test_loader_lengths_that_the_index_lacks_are_counted(
    corpus: Corpus, tmp_path: Path, same: Same, caplog: pytest.LogCaptureFixture
):
    with ShardWriter(tmp_path / "s", shard_rows=17) as writer:
        for sample in corpus.samples:
            writer.write(sample)
    loader = corpus.loader(shards=str(tmp_path / "s"))
    batches = list(loader)
    assert all(same(a, b) for a, b in zip(batches, corpus.loader(), strict=True))
    again = corpus.loader(shards=str(tmp_path / "s"))  # a second loader takes the counts of the first
    assert all(same(a, b) for a, b in zip(batches, again, strict=True))
    tokenizer = corpus.settings["tokenizer"]
    said = [record.message for record in caplog.records if "caption lengths" in record.message]
    assert said == [
        f"50 rows of '{tmp_path / 's'}': caption lengths are not in the index for tokenizer '{tokenizer}' and are "
        f"counted now; `mmdata index {tmp_path / 's'} --tokenizer {tokenizer}` adds them"
    ]


# World sizes and workers


@pytest.mark.parametrize(
    ("changes", "epoch", "largest"),
    [
        ({"global_batch_size": 51}, "50 rows", 50),
        ({"global_batch_size": 54, "num_lanes": 3}, "50 rows", 48),
        ({"global_batch_size": 24, "select": "label is not None"}, r"8 rows of 50 \(data\.select label is not .*\)", 8),
        ({"global_batch_size": 48, "val": {"share": 0.3}}, r"\d\d rows of 50 \(data\.split train of .*\)", None),
        ({"global_batch_size": 64, "token_budget": 10**6}, "50 rows", 48),
        ({"global_batch_size": 51, "row_weights": "height"}, "50 rows", 50),
        ({"global_batch_size": 40, "shards": ("repeat", 0.5, 0.5)}, "25 rows", 25),
        # 17 rows of the first dataset fill three quarters of a batch.
        ({"global_batch_size": 40, "shards": ("weight", 3, 1)}, "22 rows", 20),
    ],
)
def test_a_batch_larger_than_an_epoch_is_an_error(
    corpus: Corpus, tmp_path: Path, changes: dict[str, Any], epoch: str, largest: int | None
):
    if "shards" in changes:
        word, *values = changes["shards"]
        corpus.write_beside(tmp_path / "a", corpus.samples[:17])
        corpus.write_beside(tmp_path / "b", corpus.samples[17:])
        datasets = [{"shards": str(tmp_path / name), word: each} for name, each in zip("ab", values, strict=True)]
        changes = {**changes, "shards": datasets, "text_buckets": 1, "image_buckets": [[32, 32]]}
    size = changes["global_batch_size"]
    message = rf"^data\.global_batch_size {size}: no batch can have more than {epoch}, so none would be full; "
    with pytest.raises(ConfigError, match=rf"{message}set it to {largest or '[0-9]+'} or less$"):
        corpus.loader(**changes)
    if largest:
        assert len(corpus.loader(**{**changes, "global_batch_size": largest})) >= 1


def test_a_corpus_smaller_than_any_batch_says_so(corpus: Corpus):
    with pytest.raises(ConfigError, match=r"than 2 rows of 50 .*, so none would be full; load more rows: 3 is"):
        corpus.loader(global_batch_size=6, num_lanes=3, select="key < '00002'")


def test_an_evaluation_may_be_smaller_than_a_batch(corpus: Corpus):
    val = {"shards": corpus.settings["shards"], "select": "label is not None"}
    data = DataConfig.model_validate({**corpus.settings, "global_batch_size": 64, "val": val})
    with Loader.from_config(evaluation_data(data)) as loader:
        assert sum(int(batch["valid"].sum()) for batch in loader) == 8


def test_loader_rank_with_nothing_but_masked_rows_keeps_step(corpus: Corpus):
    # 50 rows in batches of 48: two rows for the last batch of 16 ranks.
    batches = [list(corpus.loader(rank=rank, world_size=16, global_batch_size=48, num_workers=0)) for rank in range(16)]
    assert {len(rank) for rank in batches} == {2}
    assert sorted(int(rank[1]["valid"].sum()) for rank in batches) == [0] * 14 + [1, 1]
    assert len({rank[1]["pixel_values"].shape for rank in batches}) == 1
    assert len({rank[1]["input_ids"].shape for rank in batches}) == 1
    assert sorted(valid_rows([batch for rank in batches for batch in rank])) == list(range(50))


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, 3, r"global_batch_size 8 is not a multiple of world_size 3; 6 is"),
        (2, 2, r"rank must be in 0 … 1 \(world_size 2\): got 2"),
    ],
)
def test_loader_refuses_ranks_that_do_not_fit(corpus: Corpus, rank: int, world_size: int, message: str):
    with pytest.raises(ValueError, match=message):
        corpus.loader(rank=rank, world_size=world_size)


# State


def test_loader_refuses_the_state_of_other_shards(corpus: Corpus, tmp_path: Path):
    with ShardWriter(tmp_path / "s", shard_rows=17) as writer:
        for sample in corpus.samples[::-1]:
            writer.write(sample)
    state, other = corpus.loader().state_dict(), corpus.loader(shards=str(tmp_path / "s"))
    with pytest.raises(ConfigError, match=r"other batches: rows was '.*' and is '.*'; resume"):
        other.load_state_dict(state)
    assert other.other_shards(state).startswith(
        f"data.shards '{tmp_path / 's'}': other shards than before: their index"
    )
    for same in (corpus.loader(), corpus.loader(select="width > 0"), corpus.loader(seed=9)):
        assert same.other_shards(state) == ""
    assert other.other_shards({"epoch": 0}) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"step": 8},
            r"'step' must be a whole number from 0 on, at most 7: got 8; give the dictionary that state_dict",
        ),
        ({"rows_seen": 2.0}, r"'rows_seen' must be an integer from 0 on, and .*: got 2\.0 and \{\}; give the dict"),
        ({"rows_seen": 3, "rows_masked": {"filtered": 4}}, r".*'rows_seen' in sum: got 3 and \{'filtered': 4\}; give"),
        ({"rows_masked": 4}, r".* integers by reason, at most 'rows_seen' in sum: got 0 and 4; give"),
        ({"rows_seen": 3, "rows_masked": {"filtered": -1}}, r".* got 3 and \{'filtered': -1\}"),
    ],
)
def test_loader_names_the_number_of_a_state_that_cannot_be(corpus: Corpus, change: dict[str, Any], message: str):
    loader = corpus.loader()
    before = loader.state_dict()
    with pytest.raises(ConfigError, match=f"^loader state: {message}"):
        loader.load_state_dict({**before, "epoch": 3, **change})
    assert loader.state_dict()["epoch"] == 0


# Epochs and iterators


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_leaves_torchs_threads_to_the_caller(corpus: Corpus, num_workers: int):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        list(corpus.loader(num_workers=num_workers))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_clocks_run(corpus: Corpus, num_workers: int):
    loader = corpus.loader(num_workers=num_workers)
    list(loader)
    stats = loader.stats
    assert min(*stats.wall_s.values(), stats.wait_s) > 0
    if num_workers == 0:  # the caller waits for all of it
        assert stats.wait_s >= sum(stats.wall_s.values())


# Settings


def test_loader_takes_a_file_a_dictionary_a_section_or_settings(corpus: Corpus, tmp_path: Path, same: Same):
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"data": corpus.settings}))
    kinds: list[Any] = [path, str(path), {"data": corpus.settings}, corpus.settings, DataConfig(**corpus.settings)]
    batches = [next(iter(Loader.from_config(kind))) for kind in kinds]
    assert all(same(batch, batches[0]) for batch in batches)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"num_worker": 3},
            ConfigError,
            r"config section data: unknown key 'num_worker'; did you mean 'loading.num_workers'\?",
        ),
        ({"tokenizer": "/none"}, ConfigError, r"tokenizer '/none': no such folder \(names on"),
        ({"transform": "trian"}, ConfigError, r"transform 'trian': expected train, eval, or 'module:callable'"),
        ({"shards": "/none"}, DataError, r"folder '/none': no such folder"),
        ({"shards": "/"}, DataError, r"folder '/': no manifest\.json; `mmdata index /` makes one"),
        ({"shards": "pipe:cat x"}, ConfigError, r"'pipe:cat x': pipe: would run a command, and nothing in data may"),
    ],
)
def test_loader_refuses_settings(corpus: Corpus, changes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        corpus.loader(**changes)


@pytest.mark.sweep
def test_batches_do_not_depend_on_the_seed_of_pythons_hashes(corpus: Corpus):
    # Programs of the tests are forked from one process and share its seed: here each has its own.
    program = (
        "import json, sys\n"
        "from mmdata import Loader, stream\n"
        "settings = json.loads(sys.argv[1])\n"
        "loader = Loader.from_config(settings)\n"
        "rows = [batch['rows'].tolist() for batch in loader]\n"
        "keys = [batch['keys'] for batch in stream(None, {**settings, 'image_buckets': None, 'image_size': 16})]\n"
        "print(json.dumps([loader.state_dict(), rows, keys]))\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, json.dumps(corpus.settings)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert len(json.loads(said[0])[1]) == 7
