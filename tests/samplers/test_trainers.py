"""Real processes: Lightning's replacement of samplers and accelerate's sharding leave every rank its part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mmdata.samplers import BucketBatchSampler, PlannedBatchSampler, TwoStreamBatchSampler
from tests.programs import PATIENCE_S, run_program

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'mmdata[lightning]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'mmdata[huggingface]'")

ROOT = Path(__file__).parents[2]
LENGTHS = [(7 * i) % 13 for i in range(51)]


def bucket(**settings: Any) -> BucketBatchSampler:
    return BucketBatchSampler(LENGTHS, 4, bounds=3, **{"seed": 5} | settings)


def two_stream(**settings: Any) -> TwoStreamBatchSampler:
    return TwoStreamBatchSampler(range(45), range(45, 51), 6, 2, **settings)


Seen = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 2])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each of one or two ranks saw, by the way it was trained."""
    out = tmp_path_factory.mktemp("seen")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = str(Path(__file__).with_name("ranks.py"))
    done = run_program([*command, script, str(out)], capture_output=True, text=True, env=quiet, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(request.param)]


def epochs_of(make: Any, ranks: Seen) -> list[list[list[list[int]]]]:
    """Two epochs of each rank's sampler, without any trainer."""
    samplers: list[PlannedBatchSampler] = [make(rank=rank, world_size=len(ranks)) for rank in range(len(ranks))]
    return [[list(sampler) for _ in range(2)] for sampler in samplers]


@pytest.mark.parametrize("how", ["replaced", "own", "both"])
@pytest.mark.parametrize("where", ["direct", "hook"])
@pytest.mark.parametrize("make", [bucket, two_stream])
def test_lightning_gives_each_rank_its_part(seen: Seen, make: Any, where: str, how: str):
    assert [rank[f"{make.__name__} {where} {how}"] for rank in seen] == epochs_of(make, seen)


def test_lightning_sees_each_row_once_in_equal_batches_of_one_bound(seen: Seen):
    for epoch in range(2):
        ranks = [rank["bucket direct replaced"][epoch] for rank in seen]
        assert all(len({len(part) for part in parts}) == 1 for parts in zip(*ranks, strict=True))
        times = Counter(row for rank in ranks for rows in rank for row in rows)
        assert set(times) == set(range(51))
        assert sum(times.values()) - 51 == -51 % len(seen)
        bounds = bucket(rank=0, world_size=len(seen)).step_bounds(epoch)
        for rank in ranks:
            assert all(LENGTHS[row] <= bound for rows, bound in zip(rank, bounds, strict=True) for row in rows)


def test_lightning_sees_each_primary_row_once(seen: Seen):
    ranks = [rank["two_stream hook replaced"][1] for rank in seen]
    assert len({len(rank) for rank in ranks}) == 1
    times = Counter(row for rank in ranks for rows in rank for row in rows[:-2])
    assert set(times) == set(range(45))
    assert sum(times.values()) - 45 == -45 % len(seen)
    assert {row for rank in ranks for rows in rank for row in rows[-2:]} == set(range(45, 51))


def test_lightning_sets_the_epoch_where_epochs_end_early(seen: Seen):
    wanted = [[epoch[:3] for epoch in epochs] for epochs in epochs_of(bucket, seen)]
    assert [rank["limited"] for rank in seen] == wanted


def test_lightning_keeps_a_state_that_was_loaded_before(seen: Seen):
    assert [rank["loaded"] for rank in seen] == [epochs[0][2:] for epochs in epochs_of(bucket, seen)]


def test_lightning_resumes_all_ranks_from_the_state_of_one(seen: Seen):
    pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")
    assert [rank["resumed"] for rank in seen] == [epochs[0] for epochs in epochs_of(bucket, seen)]


def test_lightning_predicts_every_row_though_drop_last_is_set(seen: Seen):
    wanted = [list(bucket(shuffle=False, rank=rank, world_size=len(seen))) for rank in range(len(seen))]
    assert [rank["predict"] for rank in seen] == wanted


STARTED_BY_LIGHTNING = """
import logging, lightning.pytorch as lightning, torch
from torch.utils.data import DataLoader
from mmdata import BucketBatchSampler

class Watch(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, number):
        print(f"rows {batch.tolist()}\\n", end="", flush=True)  # one write: the other process writes there too
        return self.layer(batch.float()[:, None]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

logging.basicConfig()
data = DataLoader(torch.arange(4), batch_sampler=BucketBatchSampler([1] * 4, 2, shuffle=False))
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet).fit(Watch(), data)
"""


@pytest.mark.sweep
def test_lightning_that_starts_the_processes_hears_no_warning_of_equal_rows(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(STARTED_BY_LIGHTNING)
    without = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**without, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("rows")]
    assert sorted(rows) == ["rows [0, 1]", "rows [2, 3]"]
    assert "several processes" not in done.stderr


def test_accelerate_cuts_global_batches_and_fills_up_the_last(seen: Seen):
    size = 4 * len(seen)
    whole = BucketBatchSampler(LENGTHS, size, bounds=3, seed=5)
    for epoch in range(2):
        wanted = list(whole)
        got = [
            [row for part in parts for row in part]
            for parts in zip(*[rank["accelerate"][epoch] for rank in seen], strict=True)
        ]
        assert got[:-1] == wanted[:-1]
        assert got[-1][: len(wanted[-1])] == wanted[-1]
        assert len(got[-1]) == (size if len(seen) > 1 else len(wanted[-1]))


def test_distributed_sampler_brings_rank_and_world_size(seen: Seen):
    if len(seen) > 1:  # torch.distributed has not begun in one process
        assert [rank["distributed sampler"] for rank in seen] == [epochs[0] for epochs in epochs_of(bucket, seen)]
