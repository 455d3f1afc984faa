from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata.config import TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.config.train import TeacherConfig
from mmdata.train import miners
from mmdata.train.memory.ema import EMA
from mmdata.train.run.checkpoint import latest_checkpoint, load_checkpoint
from mmdata.train.run.objective import make_loss
from mmdata.train.run.trainer import Trainer
from tests.train import small_run as small
from tests.train.test_loop import run_two_ranks

TEACHER = {"decay": 0.9, "margin": 0.05}


def make_trainer(output: Path, **changes: Any) -> Trainer:
    settings = {"teacher": TEACHER, "miner": {"name": "gumbel_top_k", "k": 3}, "mining_after_steps": 2, **changes}
    return Trainer(small.small_model(), small.SmallBatches(), small.train_config(**settings), output=output)


def read_losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_teacher_follows_the_model():
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    teacher = EMA(model, TeacherConfig(decay=0.75))
    torch.nn.init.constant_(model.weight, 3.0)
    teacher.update(model)
    assert teacher.model.weight.tolist() == [[1.5, 1.5]]
    teacher.update(model)
    assert teacher.model.weight.tolist() == [[1.875, 1.875]]
    assert not teacher.model.weight.requires_grad


def test_teacher_draws_no_number_and_is_the_same_in_parts():
    teacher = EMA(small.small_model(dropout=0.5), TeacherConfig(margin=0.05))
    batch = next(iter(small.SmallBatches()))
    state = torch.get_rng_state()
    mask = teacher.teacher_mask(teacher.embed(batch))
    assert torch.equal(torch.get_rng_state(), state)
    assert mask is not None
    images, texts, *_ = small.small_model(dropout=0.5).eval()(batch)
    torch.testing.assert_close((mask.images, mask.texts), (images, texts))
    in_parts = EMA(small.small_model(), TeacherConfig(), micro_batch_size=3).embed(batch)
    torch.testing.assert_close(in_parts[:2], (images, texts))
    assert EMA(small.small_model(), TeacherConfig(margin=None)).teacher_mask(in_parts) is None


def test_teacher_does_not_embed_extra_captions():
    teacher = EMA(small.small_model(), TeacherConfig())
    batch = next(iter(small.SmallBatches()))
    extra = {"negative_input_ids": batch["input_ids"], "negative_attention_mask": batch["attention_mask"]}
    calls: list[int] = []
    teacher.model.text_tower.register_forward_hook(lambda *_: calls.append(1))
    teacher.embed({**batch, **extra})  # type: ignore[typeddict-item]
    assert calls == [1]


def test_teacher_is_heard_before_the_miner():
    config = parse(TrainConfig, {"steps": 9, "miner": {"name": "top_k", "k": 2}, "mining_after_steps": 5}, origin="c")
    teacher = miners.TeacherMask(torch.eye(2), torch.eye(2))
    assert make_loss(4, config, teacher).miner is teacher
    assert make_loss(5, config, teacher).miner == miners.Chain((teacher, miners.TopK(2)))


def test_teacher_and_draws_resume_bit_for_bit(tmp_path: Path):
    assert make_trainer(tmp_path / "whole", steps=8).run() == 0
    stopped = make_trainer(tmp_path / "stopped", steps=8, checkpoint_every_steps=5)
    update = stopped._update

    def killed(batch: Any) -> None:
        if stopped.step == 6:
            raise KeyboardInterrupt
        update(batch)

    stopped._update = killed
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    resumed = make_trainer(tmp_path / "stopped", steps=8, checkpoint_every_steps=5)
    assert resumed.step == 5
    assert resumed.run() == 0
    assert read_losses(tmp_path / "stopped") == read_losses(tmp_path / "whole")
    saved = [load_checkpoint(latest_checkpoint(tmp_path / run / "checkpoints")) for run in ("whole", "stopped")]  # type: ignore[arg-type]
    assert all(
        torch.equal(saved[0]["memory"]["teacher"][name], value) for name, value in saved[1]["memory"]["teacher"].items()
    )
    assert not all(torch.equal(saved[0]["model"][name], value) for name, value in saved[1]["memory"]["teacher"].items())
    assert make_trainer(tmp_path / "without", steps=8, teacher=None).run() == 0
    assert read_losses(tmp_path / "without")[:2] == read_losses(tmp_path / "whole")[:2]
    assert read_losses(tmp_path / "without")[2:] != read_losses(tmp_path / "whole")[2:]


def test_telemetry_is_written_once_in_n_steps_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_trainer(tmp_path / "silent", steps=6, mining_after_steps=0).run()
    monkeypatch.setattr("mmdata.train.run.report.MEASURED_EVERY", 3)
    make_trainer(tmp_path / "told", steps=6, mining_after_steps=0).run()
    assert read_losses(tmp_path / "told") == read_losses(tmp_path / "silent")
    lines = [json.loads(line) for line in (tmp_path / "told" / "metrics.jsonl").read_text().splitlines()]
    mining = [line for line in lines if line["kind"] == "mining"]
    assert [line["step"] for line in mining] == [1, 4]  # the first that is mined, then one in three
    assert 0 < mining[0]["kept_share"] <= 3 / 7


@pytest.mark.sweep
def test_teachers_of_all_ranks_begin_with_the_weights_of_the_first(tmp_path: Path):
    settings = {"teacher": TEACHER, "miner": {"name": "top_k", "k": 3}}
    for name, own in (("own", True), ("shared", False)):
        for code, error in run_two_ranks(tmp_path / name, own_weights=own, train=settings):
            assert code == 0, error
    assert read_losses(tmp_path / "own") == read_losses(tmp_path / "shared")
