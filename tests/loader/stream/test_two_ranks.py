"""The trainer on streams: two real processes whose shards differ in size make the same number of steps and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mmdata
from tests.programs import PATIENCE_S, Program, free_port

PROGRAM = Path(__file__).with_name("ranks.py")


def run(spec: dict[str, Any]) -> list[tuple[int, str]]:
    """Exit code and stderr of two ranks; neither may hang."""
    world = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        Program(
            [sys.executable, str(PROGRAM), json.dumps(spec)],
            env=os.environ | world | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def batches_of_rank(output: Path, rank: int) -> list[list[str]]:
    """The keys of each batch of a run, in order; of one that was taken twice, the second time."""
    lines = [json.loads(line) for line in (output / f"keys-rank{rank}.jsonl").read_text().splitlines()]
    of_place = {(epoch, step): keys for epoch, step, keys in lines}
    return [of_place[place] for place in sorted(of_place)]


@pytest.fixture
def spec(uneven, config, tmp_path) -> dict[str, Any]:
    """Shards of 5, 30 and 12 samples in global batches of 8: six batches a pass."""
    data = config(global_batch_size=8, text_buckets=[12, 48], num_workers=1)
    return {"shards": str(uneven(5, 30, 12)), "data": data, "steps_per_epoch": 6, "output": str(tmp_path / "run")}


def test_two_ranks_with_uneven_shards_stopped_and_resumed_see_the_batches_of_an_undisturbed_run(spec, tmp_path):
    stopped = {**spec, "stop_at": 3, "output": str(tmp_path / "stopped")}
    results = run(stopped)
    assert [code for code, _ in results] == [128 + 15] * 2, results
    results = run({**stopped, "stop_at": None})
    assert [code for code, _ in results] == [0, 0], results
    lines = [json.loads(line) for line in (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    for rank in range(2):
        stream = mmdata.stream(spec["shards"], spec["data"], rank=rank, world_size=2, steps_per_epoch=6)
        undisturbed = [batch["keys"] for _ in range(2) for batch in stream]
        assert batches_of_rank(tmp_path / "stopped", rank) == undisturbed


def test_damaged_shard_ends_both_ranks(spec):
    cut = Path(spec["shards"]) / "2.tar"
    cut.write_bytes(cut.read_bytes()[:9000])
    for code, said in run(spec):
        assert code != 0
        assert "2.tar', byte" in said
