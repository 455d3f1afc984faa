"""A run whose checkpoint is sharded is used as any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mmdata
from mmdata.config import ModelConfig
from mmdata.recognize import CHECKPOINTS
from mmdata.train import DualEncoder
from mmdata.train.run.checkpoint import load_checkpoint
from mmdata.train.run.find import find_checkpoint
from mmdata.train.run.sharded_writer import ShardedCheckpointWriter
from mmdata.trained.evaluation import evaluate_shards
from tests.trained.conftest import MakeRun


@pytest.fixture
def sharded(make_run: MakeRun, tmp_path: Path) -> Path:
    state = load_checkpoint(find_checkpoint(make_run()))
    run = tmp_path / "sharded"
    with ShardedCheckpointWriter(run / CHECKPOINTS, keep=2, written=lambda step: None, say=print) as writer:
        writer.save(state, background=False)
    return run


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_run_is_loaded_evaluated_and_begun_from(make_run: MakeRun, sharded: Path):
    whole = mmdata.load_run(make_run(), "cpu")
    for given in (sharded, sharded / CHECKPOINTS / "step-0000000003"):
        run = mmdata.load_run(given, "cpu")
        assert run.checkpoint == sharded / CHECKPOINTS / "step-0000000003"
        assert (run.step, run.epoch) == (3, 1)
        assert torch.equal(run.embed_texts(["a dog"]), whole.embed_texts(["a dog"]))
        assert evaluate_shards(run) == evaluate_shards(whole)
        config = ModelConfig.model_validate({"name": "micro", "init_from": str(given)})
        begun = DualEncoder.from_config(config, vocab_size=300).state_dict()
        assert all(torch.equal(begun[name], value) for name, value in whole.model.state_dict().items())
