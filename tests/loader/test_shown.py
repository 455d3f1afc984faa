"""What a person sees at the prompt: the repr of loader, plan, batch and ledger is a line that says what they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils._pytree import tree_leaves, tree_map_only

import mmdata
from mmdata.batch import BatchDict, model_inputs, to_device, valid_inputs
from tests.loader.conftest import Corpus


def test_loader_and_plan_are_shown_in_a_line(corpus: Corpus):
    loader = corpus.loader(num_workers=0, rank=1, world_size=2)
    assert repr(loader) == "Loader(50 rows, 7 batches of 4 rows, rank 1 of 2; epoch 0, step 0)"
    next(iter(loader))
    assert repr(loader).endswith("epoch 0, step 1)")
    assert repr(loader.plan) == "Plan(50 rows, 7 batches of 8 rows, 9 batch shapes, seed 5)"


def test_loader_whose_batches_differ_in_size_is_shown_without_reading_the_index(corpus: Corpus):
    loader = corpus.loader(num_workers=0, token_budget=512, global_batch_size=16)
    loader.index.shard = None  # type: ignore[method-assign,assignment]
    assert repr(loader) == "Loader(50 rows in batches of up to 16 rows, rank 0 of 1; epoch 0, step 0)"
    dropping = corpus.loader(num_workers=0, leftover="drop", global_batch_size=2)
    assert repr(dropping).startswith("Loader(up to 50 rows in batches of up to 2 rows, rank 0")


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_tab_completion_shows_what_users_call_and_no_old_name(corpus: Corpus):
    loader = corpus.loader(num_workers=0)
    for shown, names in {
        loader: {"from_config", "set_epoch", "state_dict", "load_state_dict", "close", "plan", "index", "ledger"},
        loader.index: {"open", "sample", "keys", "column", "take", "class_names", "num_shards", "fingerprint"},
    }.items():
        assert names <= set(dir(shown))
        assert len(dir(shown)) < 20
        assert all(hasattr(shown, name) for name in dir(shown))  # none is misspelt, none warns of a new name
    assert "dataset" not in dir(loader)
    assert not {"manifest", "held_rows", "part", "cells"} & set(dir(loader.index))


def test_ledger_is_shown_in_a_line(corpus: Corpus):
    loader = corpus.loader(num_workers=0)
    list(loader)
    assert repr(loader.ledger) == "Ledger(0 of 50 rows masked)"


def test_stream_is_shown_in_a_line(corpus: Corpus):
    stream = mmdata.stream(corpus.folder / "shards", corpus.settings, rank=0, world_size=2, steps_per_epoch=5)
    assert repr(stream) == "Stream(3 shards, batches of 4 rows, rank 0 of 2; epoch 0, step 0)"


def test_batch_is_a_dict_that_is_shown_in_a_line(corpus: Corpus):
    loader = corpus.loader(num_workers=0, shuffle=False, image_buckets=None, image_size=32, text_buckets=[32])
    batch = list(loader)[-1]
    assert isinstance(batch, dict)
    assert repr(batch) == (
        "Batch(2 of 8 rows valid; pixel_values: uint8 (8, 3, 32, 32), crop: float32 (8, 4), flipped: bool (8,), "
        "valid: bool (8,), rows: int64 (8,), keys: list of 8, input_ids: int64 (8, 32), attention_mask: int64 (8, 32), "
        "labels: int64 (8,), image_hash: int64 (8,), caption_hash: int64 (8,), captions: list of 8, "
        "caption_numbers: int64 (8,))"
    )
    assert repr(to_device(batch, "cpu")) == repr(batch)


def test_batch_survives_copies(corpus: Corpus):
    batch = next(iter(corpus.loader(num_workers=0)))
    for again in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert repr(again) == repr(batch)
        assert type(again) is BatchDict


def test_batch_is_a_tree_of_its_tensors_for_torch_and_lightning(corpus: Corpus):
    batch = next(iter(corpus.loader(num_workers=0)))
    assert any(leaf is batch["rows"] for leaf in tree_leaves(batch))
    copied = tree_map_only(torch.Tensor, torch.clone, batch)
    assert type(copied) is BatchDict
    assert torch.equal(copied["rows"], batch["rows"])
    moved = move_data_to_device(batch, torch.device("cpu"))
    assert type(moved) is BatchDict
    assert moved.keys() == batch.keys()
    assert model_inputs(batch).keys() == valid_inputs(batch).keys()


def test_batch_to_which_a_loop_adds_a_number_is_still_shown():
    assert repr(BatchDict(loss=0.5, keys=["a", "b"])) == "Batch(loss: float, keys: list of 2)"
