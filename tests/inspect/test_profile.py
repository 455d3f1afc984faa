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
from mmdata.loader import Loader, Stats


class Slow:
    """Two batches an epoch, each 20 ms in the making; four rows, one masked."""

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


def test_profile_counts_valid_rows_over_epochs():
    found = profile(Slow(), 5)
    assert (found.steps, found.rows) == (5, 15)
    assert found.first_batch_s >= 0.02
    assert found.seconds >= 0.1
    assert found.samples_per_s == pytest.approx(15 / found.seconds)
    assert (found.stats, found.stage_shares, found.bottleneck) == (None, {}, "")
    assert found.in_words().endswith("this loader keeps no clock of its stages.")


def test_profile_waits_for_the_loader_only(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr("mmdata.inspect.profile.time", clock)
    monkeypatch.setattr(f"{__name__}.time", clock)
    assert profile(Slow(), 3).wait_share == 1
    assert profile(Slow(), 3, step_s=0.08).wait_share == pytest.approx(0.02 / (0.02 + 0.08))


class Clock:
    """Time that passes in sleep alone, whatever else the machine does."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now


def test_profile_reads_the_loaders_clock(data: dict[str, Any]):
    data = data | {"loading": {"num_workers": 2}}
    loader = Loader.from_config(data)
    found = profile(loader, 5)  # two epochs of three steps, less the first batch
    first = int(next(iter(Loader.from_config(data)))["valid"].sum())
    assert found.rows == 2 * 22 - first
    assert found.stats is not None
    assert set(found.stats.wall_s) == set(found.stats.cpu_s) == {"read", "decode", "transform", "tokenize", "collate"}
    assert all(seconds > 0 for seconds in found.stats.wall_s.values())
    assert sum(found.stage_shares.values()) == pytest.approx(1)
    assert sum(sums["rows"] for sums in found.stats.workers.values()) == found.stats.rows == found.rows


def clock(**seconds: float) -> Stats:
    """A clock of stages that never waited: 8.1 s of 10 decoding, and what else is given."""
    worked = {"read": 1.0, "decode": 8.1, "transform": 0.5, "tokenize": 0.1, "collate": 0.3}
    return Stats(wall_s=worked | seconds, cpu_s=worked.copy())


@pytest.mark.parametrize(
    ("step_s", "wait_share", "bottleneck", "sentence"),
    [
        (0, 1, "decode", "at full speed the loader gives 100 samples/s; decode takes 81% of the workers' time."),
        (
            0.1,
            0.34,
            "decode",
            "at 100 samples/s the loop waits for data 34% of its time; decode takes 81% of the workers' time.",
        ),
        (
            0.1,
            0.01,
            "device",
            "at 100 samples/s the loop waits for data 1% of its time: the loader keeps up.",
        ),
    ],
)
def test_profile_says_where_the_time_goes(step_s: float, wait_share: float, bottleneck: str, sentence: str):
    found = Profile(10, 100, 1.0, 0.1, wait_share, step_s, clock())
    assert list(found.stage_shares) == ["decode", "read", "transform", "collate", "tokenize", "waiting for a core"]
    assert found.bottleneck == bottleneck
    assert found.in_words() == sentence


def test_profile_refuses_what_cannot_be_measured():
    with pytest.raises(ValueError, match="the loader gives no batches: there is nothing to measure"):
        profile([], 1)
    with pytest.raises(ValueError, match="steps must be 1 or more: got 0"):
        profile(Slow(), 0)


def test_command_prints_speed_and_where_the_time_goes(data: dict[str, Any], tmp_path: Path, command: Any):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data}))
    status, output, errors = command("bench", str(tmp_path / "c.yaml"), "--steps", "4", "data.loading.num_workers=0")
    assert (status, errors) == (0, "")
    assert re.search(r"samples/s +[\d,]+", output)
    assert re.search(r"decode +\d+\.\d% +\d+\.\d\d ms a row +█*", output)
    assert re.search(r"at full speed the loader gives [\d,]+ samples/s; \w+ takes \d+% of the time that", output)
    assert "Trying what would help ...\n  " in output
    status, output, _ = command("bench", str(tmp_path / "c.yaml"), "--steps", "2", "--step-ms", "2000")
    assert (status, "Trying" in output) == (0, False)
    assert "the loader keeps up.\nThere is nothing to do: only a faster step would be felt.\n" in output
    status, _, errors = command("bench", str(tmp_path / "c.yaml"), "--steps", "0")
    assert status == 2
    assert errors == "error: --steps must be 1 or more and --step-ms 0 or more: got 0, 0.0\n"


def test_profile_tells_what_stages_cost_a_row_and_of_the_work():
    """The transform waited 6 s, as the others did: for the interpreter's lock, which is no work of a stage."""
    stats = Stats(
        wall_s={"read": 3.0, "decode": 3.0, "transform": 8.0, "tokenize": 0.0, "collate": 0.0},
        cpu_s={"read": 0.0, "decode": 0.0, "transform": 2.0, "tokenize": 0.0, "collate": 0.0},
        rows=1000,
    )
    found = Profile(10, 1000, 1.0, 0.1, 0.0, stats=stats)
    assert found.row_ms == {
        "waiting for a core": 12,
        "transform": 2,
        "read": 0,
        "decode": 0,
        "tokenize": 0,
        "collate": 0,
    }
    assert (found.stage_shares["transform"], found.work_share("transform")) == (pytest.approx(2 / 14), 1)


@pytest.mark.parametrize(
    ("step_ms", "keeps_up"), [("0", False), ("1500", True)], ids=["at full speed", "where the loader keeps up"]
)
def test_command_names_a_slow_transform_of_the_users(
    data: dict[str, Any], tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch, step_ms: str, keeps_up: bool
):
    (tmp_path / "slow_crops.py").write_text(
        "import time\n\nimport torch\n\n\ndef centre(image, size, generator):\n    time.sleep(0.01)\n"
        "    return torch.zeros(3, *size, dtype=torch.uint8)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": {**data, "transform": "slow_crops:centre"}}))
    status, output, errors = command("bench", str(tmp_path / "c.yaml"), "--steps", "2", "--step-ms", step_ms)
    assert (status, errors) == (0, "")
    assert ("the loader keeps up.\nYour code: " in output, "Trying" in output) == (keeps_up, not keeps_up)
    assert "There is nothing to do" not in output
    took = r"takes \d+\.\d\d ms a row, (\d+)% of the workers' work: make it faster first\. On a CPU it also takes cores"
    named = re.search(rf"^Your code: slow_crops:centre \(transform\) {took} from the training step\.$", output, re.M)
    assert named
    assert int(named[1]) > 50
