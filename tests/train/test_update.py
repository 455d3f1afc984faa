"""What an update keeps of its batch until its loss is read, and what an evaluation keeps of the last batch."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import TrainingError
from mmdata.train.evaluation.embedding import embed
from mmdata.train.run.update import FiniteUpdates
from tests.train.small_run import SmallBatches, small_model
from tests.train.test_loop import make_trainer


class Watched(SmallBatches):
    """Notes, when the next batch is asked for, whether somebody still has the pixels of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[bool] = []
        self._last: weakref.ref[Tensor] | None = None

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            if self._last is not None:
                self.kept.append(self._last() is not None)
            yield self._copy_of(batch)

    def _copy_of(self, batch: Batch) -> Batch:
        pixels = batch["pixel_values"].clone()  # the loader itself keeps its own
        self._last = weakref.ref(pixels)
        return {**batch, "pixel_values": pixels}


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 3}, {"log_every_steps": 5}])
def test_update_that_waits_for_its_loss_does_not_keep_the_pixels(settings: dict[str, int], tmp_path: Path):
    batches, waiting = Watched(), []
    trainer = make_trainer(tmp_path, batches, epochs=1, **{"log_every_steps": 100, **settings})
    batches.before = lambda number, rows: waiting.append(trainer.updates._unchecked is not None)
    assert trainer.run() == 0
    assert waiting == [False, True, True, False], "the checkpoint after step 3 has read the loss"
    assert batches.kept == [False] * 3


def test_evaluation_does_not_keep_the_pixels_of_the_last_batch():
    batches = Watched()
    embed(small_model().eval(), batches)
    assert batches.kept == [False] * 3


def test_update_names_its_rows_and_keys(tmp_path: Path):
    batch = next(iter(SmallBatches()))
    updates = FiniteUpdates(torch.amp.GradScaler(enabled=False), tmp_path)
    updates.made(7, batch, torch.tensor(float("nan")), torch.tensor(2.0))
    rows = batch["rows"].tolist()
    said = f"step 7: loss is nan and its gradient's norm 2.0, on rank 0 with rows {str(rows)[1:-1]} (all in"
    with pytest.raises(TrainingError, match=f"^{re.escape(said)}"):
        updates.check(10)
    written = json.loads((tmp_path / "not_finite_rank0.json").read_text())
    assert written == {"step": 7, "rows": rows, "keys": [str(row) for row in rows]}
