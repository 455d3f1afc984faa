"""Training on a few batches again and again: what it reaches, and that it stops and resumes as any run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmdata.errors import ConfigError, TrainingError
from mmdata.train.run.overfit import FirstBatches
from mmdata.train.run.trainer import Trainer
from tests.rounding import RUN_IN_DOUBLE

from .test_loop import last_state, make_trainer, read_metrics, read_rows, run_small, small


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["rows"].tolist() for batch in batches]


def test_overfit_gives_the_first_batches_in_every_epoch_and_takes_them_once():
    taken: list[int] = []
    batches = FirstBatches(small.SmallBatches(lambda number, rows: taken.append(number)), 3)
    expected = rows_of(small.SmallBatches())[:3]
    assert len(batches) == 3
    for epoch in range(3):
        batches.set_epoch(epoch)
        assert rows_of(batches) == expected
    assert rows_of(batches) == expected, "as a loader does, without set_epoch too"
    assert taken == [0, 1, 2]


def test_overfit_goes_on_where_its_state_was_taken():
    batches = FirstBatches(small.SmallBatches(), 3)
    iterator = iter(batches)
    expected = [next(iterator)["rows"].tolist() for _ in range(3)]
    batches.set_epoch(4)
    next(iter(batches))
    state = batches.state_dict()
    assert state == {"step": 1, "begin": {"epoch": 0, "step": 0}}
    other = FirstBatches(small.SmallBatches(), 3)
    other.load_state_dict(state)
    assert rows_of(other) == expected[1:]


def test_overfit_needs_as_many_batches():
    with pytest.raises(
        ConfigError,
        match=r"^train\.overfit_batches is 5, and epoch 0 has 4 batches; set it to 4 or less, or data\.global",
    ):
        FirstBatches(small.SmallBatches(), 5)


def test_overfit_loader_that_gives_fewer_than_its_len_is_an_error(tmp_path: Path):
    batches = small.SmallBatches()
    batches.steps = 2
    with pytest.raises(TrainingError, match=r"epoch 0: 2 of len\(batches\) = 3 batches came"):
        make_trainer(tmp_path, batches, overfit_batches=3).run()


def test_overfit_one_batch_drives_the_loss_to_nothing(tmp_path: Path):
    config = small.train_config(overfit_batches=1, epochs=150, checkpoint_every_steps=1000)
    Trainer(small.small_model(dropout=0.0), small.SmallBatches(), config, output=tmp_path).run()
    losses = [line["loss"] for line in read_metrics(tmp_path)]
    assert len(losses) == 150
    assert losses[0] > 2.0, "ln 8 is chance"
    assert losses[-1] < 0.02


def test_overfit_stopped_and_resumed_repeats_the_undisturbed_run_bit_for_bit(tmp_path: Path):
    make_trainer(tmp_path / "whole", overfit_batches=3, epochs=4).run()
    trainer = make_trainer(tmp_path / "cut", overfit_batches=3, epochs=4)
    forwards: list[int] = []

    def stop_in_the_second_epoch(*_: Any) -> None:
        forwards.append(1)
        if len(forwards) == 5:
            signal.raise_signal(signal.SIGTERM)

    trainer.model.register_forward_hook(stop_in_the_second_epoch)
    assert trainer.run() == 128 + signal.SIGTERM
    state = last_state(tmp_path / "cut")
    assert (state["epoch"], state["epoch_step"], state["batches"]["step"]) == (1, 2, 2)
    assert make_trainer(tmp_path / "cut", overfit_batches=3, epochs=4).run() == 0
    assert [line["step"] for line in read_metrics(tmp_path / "cut")] == list(range(1, 13))
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    before, after = last_state(tmp_path / "whole"), last_state(tmp_path / "cut")
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])


def test_overfit_run_does_not_resume_as_another(tmp_path: Path):
    make_trainer(tmp_path, steps=3, overfit_batches=1).run()
    with pytest.raises(ConfigError, match=r"train\.overfit_batches was 1, is None\. Restore the values"):
        make_trainer(tmp_path, steps=3)


def test_overfit_with_a_feature_cache_has_a_row_for_each_of_the_index(tmp_path: Path):
    make_trainer(tmp_path, overfit_batches=2, feature_cache={"every_steps": 1}).run()
    written = np.load(tmp_path / "features.steps.npy") >= 0
    seen = {row for batch in rows_of(small.SmallBatches())[:2] for row in batch}
    assert np.flatnonzero(written).tolist() == sorted(seen)
    assert len(written) == 32


def test_overfit_of_batches_without_an_index_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(small.SmallBatches, "index")
    assert FirstBatches(small.SmallBatches(), 1).index is None


@pytest.mark.sweep
def test_overfit_two_ranks_log_the_losses_of_one_and_evaluate_on_all(tmp_path: Path):
    config = small.train_config(overfit_batches=2)
    batches = small.SmallBatches()
    Trainer(small.small_model(0.0).double(), batches, config, output=tmp_path / "one", evaluate=small.evaluate).run()
    done = run_small(tmp_path / "two", torchrun=2, dropout=0.0, double=True, train={"overfit_batches": 2})
    assert done.returncode == 0, done.stderr
    expected = [line["loss"] for line in read_metrics(tmp_path / "one")]
    assert len(expected) == 6
    found = [line["loss"] for line in read_metrics(tmp_path / "two")]
    assert found == pytest.approx(expected, rel=0, abs=RUN_IN_DOUBLE)
    evaluations = read_metrics(tmp_path / "two", "evaluation")
    assert [(line["step"], line["rows"]) for line in evaluations] == [(2, 32), (4, 32), (6, 32)]
    assert [line["batch"] for line in read_rows(tmp_path / "two")] == [0, 1]
