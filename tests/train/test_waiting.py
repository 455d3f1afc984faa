"""The log says why the loop waits for data: once, and again when the reason is another."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from mmdata.loader import Stats
from mmdata.train.log.meter import Meter
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


def explain(meter: Meter, wait_share: float) -> str | None:
    meter._wait_share = wait_share  # as `read` measures it
    return meter.explain_wait()


def test_wait_is_explained_at_first_sight_and_when_the_reason_changes():
    batches = ClockedBatches()
    meter = Meter(stats=batches.stats)
    batches.work("decode", 8.1)
    batches.work("read", 1.9)
    bench = "`mmdata bench CONFIG` measures what would help"
    assert explain(meter, 0.34) == f"data wait 34%: decode takes 81% of the workers' time; {bench}"
    batches.work("decode", 8.0)
    assert explain(meter, 0.34) is None  # said already
    batches.work("read", 5.0)  # since the last line reading alone
    assert explain(meter, 0.07) == f"data wait 7%: read takes 100% of the workers' time; {bench}"


def test_wait_that_is_short_is_not_worth_a_line():
    batches = ClockedBatches()
    meter = Meter(stats=batches.stats)
    batches.work("decode", 1.0)
    assert explain(meter, 0.04) is None


def test_wait_of_a_loader_without_a_clock_has_no_reason():
    assert explain(Meter(), 0.9) is None


def test_loop_says_once_in_its_log_why_it_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    batches = ClockedBatches()

    def decode(number: int, rows: list[int]) -> None:
        time.sleep(0.2)
        batches.work("decode", 0.2)

    batches.before = decode
    config = train_config(epochs=1, log_every_steps=1)
    assert Trainer(small_model(), batches, config, output=tmp_path).run() == 0
    said = re.findall(r"^data wait \d+%: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert said == ["decode takes 100% of the workers' time; `mmdata bench CONFIG` measures what would help"]
