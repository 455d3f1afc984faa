"""Ray Train: a worker of two is killed in mid-epoch, and the run that Ray starts again sees each row once."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import mmdata

STEPS, EPOCHS = 3, 3


@pytest.mark.sweep
def test_run_of_which_a_worker_is_killed_sees_each_row_once(
    tmp_path: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train.torch")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from tests.integrations.ray_loop import digests, train

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}  # Ray sets its own
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(
            train,
            train_loop_config={"data": data, "out": str(tmp_path)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=1)),
        ).fit()
    finally:
        ray.shutdown()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    resumed = [line["step"] for line in metrics if line["kind"] == "start"][1]
    assert resumed % STEPS, "in mid-epoch"
    seen: dict[int, dict[int, float]] = {step: {} for step in range(STEPS * EPOCHS)}
    for rank in (0, 1):
        for line in map(json.loads, (tmp_path / f"seen-{rank}.jsonl").open()):
            if line["start"] == (1 if line["step"] < resumed else 2):
                rows = {int(row): digest for row, digest in line["rows"].items()}
                assert not seen[line["step"]].keys() & rows.keys()
                seen[line["step"]] |= rows
    loader, step = mmdata.Loader.from_config(data, rank=0, world_size=1), 0
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for step, batch in enumerate(loader, start=epoch * STEPS):
            assert seen[step] == digests(batch)
    assert step == STEPS * EPOCHS - 1
