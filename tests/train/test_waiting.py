"""The log says why the loop waits for data: once, and again when the reason is another."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from mmdata.loader import Stats
from mmdata.train.log.meter import DataWait
from mmdata.train.run.trainer import Trainer

from .small_run import SmallBatches, small_model, train_config


class ClockedBatches(SmallBatches):
    """Batches with a loader's clock."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stats = Stats()

    def work(self, stage: str, seconds: float) -> None:
        self.stats.wall_s[stage] += seconds
        self.stats.cpu_s[stage] += seconds


def test_wait_is_explained_at_first_sight_and_when_the_reason_changes(tmp_path: Path):
    batches = ClockedBatches()
    wait = DataWait(batches, tmp_path / "config.yaml")
    batches.work("decode", 8.1)
    batches.work("read", 1.9)
    # No settings of `mmdata train`: no command could make this loader.
    assert wait.explain(0.34, 210.2) == "data wait 34%: decode takes 81% of the workers' time"
    batches.work("decode", 8.0)
    assert wait.explain(0.34, 210.2) is None  # said already
    batches.work("read", 5.0)  # since the last line reading alone
    (tmp_path / "config.yaml").write_text("data: {}\n")
    line = (
        f"data wait 7%: read takes 100% of the workers' time; `mmdata bench {tmp_path / 'config.yaml'} --step-ms 90` "
    )
    assert wait.explain(0.07, 90.0) == f"{line}measures what would help"
    batches.work("decode", 9.0)  # on a CPU the step is slow because the workers take its cores
    line = (
        f"data wait 9%: decode takes 100% of the workers' time; `mmdata bench {tmp_path / 'config.yaml'}` measures what"
    )
    assert wait.explain(0.09, None) == f"{line} would help"


def test_wait_that_is_short_is_not_worth_a_line(tmp_path: Path):
    batches = ClockedBatches()
    wait = DataWait(batches, tmp_path)
    batches.work("decode", 1.0)
    assert wait.explain(0.04, 100.0) is None


def test_wait_of_a_loader_without_a_clock_has_no_reason(tmp_path: Path):
    assert DataWait(SmallBatches(), tmp_path).explain(0.9, 1.0) is None


def test_loop_says_once_in_its_log_why_it_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    batches = ClockedBatches()

    def decode(number: int, rows: list[int]) -> None:
        time.sleep(0.2)
        batches.work("decode", 0.2)

    batches.before = decode
    (tmp_path / "config.yaml").write_text("data: {}\n")
    config = train_config(epochs=1, log_every_steps=1)
    assert Trainer(small_model(), batches, config, output=tmp_path).run() == 0
    said = re.findall(r"^data wait \d+%: (.*)$", capsys.readouterr().out, re.MULTILINE)
    measure = f"`mmdata bench {tmp_path / 'config.yaml'}` measures what would help"  # without the step time of a CPU
    assert said == [f"decode takes 100% of the workers' time; {measure}"]
