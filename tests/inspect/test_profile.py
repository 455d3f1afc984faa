"""The profile measures what a loop would feel."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mmdata.batch import Batch
from mmdata.inspect.profile import Profile, profile
from mmdata.loader import Loader


class Slow:
    """Two batches an epoch, each 20 ms in the making; four rows, one masked, 6 of 9 valid text positions used."""

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(2):
            time.sleep(0.02)
            yield {
                "pixel_values": torch.zeros(4, 3, 2, 2, dtype=torch.uint8),
                "input_ids": torch.zeros(4, 3, dtype=torch.int64),
                "attention_mask": torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]),
                "valid": torch.tensor([True, True, True, False]),
                "rows": torch.tensor([0, 1, 2, -1]),
                "keys": ["a", "b", "c", ""],
            }


def test_profile_counts_valid_rows_and_padding_over_epochs():
    found = profile(Slow(), 5)
    assert (found.steps, found.rows) == (5, 15)
    assert found.padding_share == pytest.approx(1 / 3)
    assert found.first_batch_s >= 0.02
    assert found.seconds >= 0.1
    assert found.samples_per_s == pytest.approx(15 / found.seconds)
    assert found.stages == {}
    assert found.in_words().endswith("this loader keeps no clock of its stages.")


def test_profile_waits_for_the_loader_only():
    assert profile(Slow(), 3).wait_share > 0.9
    assert profile(Slow(), 3, step_s=0.08).wait_share < 0.5


def test_profile_reads_the_loaders_clock(data: dict[str, Any]):
    loader = Loader.from_config(data)
    found = profile(loader, 5)  # two epochs of three steps, less the first batch
    first = int(next(iter(Loader.from_config(data)))["valid"].sum())
    assert found.rows == 2 * 22 - first
    assert set(found.stages) == {"read", "decode", "transform", "tokenize"}
    assert all(seconds > 0 for seconds in found.stages.values())
    assert sum(found.stage_shares.values()) == pytest.approx(1)


AT_FULL_SPEED = (
    r"at full speed, 100 samples/s, decode is 81% of the workers' time; to go faster, store smaller images, or add "
    r"workers \(data\.num_workers\); \d+ cores are at hand\."
)
TOO_SLOW = r"at 100 samples/s the loop waits 34% of its time, decode is 81% of the workers' time; to go faster, .*"
KEEPS_UP = (
    r"at 100 samples/s the loop waits 1% of its time: the loader keeps up, and there is nothing to do "
    r"\(decode is 81% of its work\)\."
)


@pytest.mark.parametrize(
    ("step_s", "wait_share", "sentence"), [(0.0, 1.0, AT_FULL_SPEED), (0.1, 0.34, TOO_SLOW), (0.1, 0.01, KEEPS_UP)]
)
def test_profile_says_where_the_time_goes(step_s: float, wait_share: float, sentence: str):
    stages = {"read": 1.0, "decode": 8.1, "transform": 0.8, "tokenize": 0.1}
    found = Profile(10, 100, 1.0, 0.1, wait_share, 0.1, step_s, stages)
    assert list(found.stage_shares) == ["decode", "read", "transform", "tokenize"]
    assert re.fullmatch(sentence, found.in_words())


def test_profile_refuses_what_cannot_be_measured():
    with pytest.raises(ValueError, match="the loader gives no batches: there is nothing to measure"):
        profile([], 1)
    with pytest.raises(ValueError, match="steps must be 1 or more: got 0"):
        profile(Slow(), 0)


def test_command_prints_speed_and_where_the_time_goes(data: dict[str, Any], tmp_path: Path, command: Any):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data}))
    status, output, errors = command("bench", str(tmp_path / "c.yaml"), "--steps", "4", "data.num_workers=0")
    assert (status, errors) == (0, "")
    assert re.search(r"samples/s +[\d,]+", output)
    assert re.search(r"decode +\d+\.\d% +█*", output)
    assert re.search(r"at full speed, [\d,]+ samples/s, \w+ is \d+% of the workers' time", output)
    status, _, errors = command("bench", str(tmp_path / "c.yaml"), "--steps", "0")
    assert (status, errors) == (2, "error: --steps must be 1 or more and --step-ms 0 or more: got 0, 0.0\n")
