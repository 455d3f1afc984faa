"""A run of three ranks that is stopped and resumed has the numbers of one that is not, bit for bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mmdata.train.ranks import collectives
from mmdata.train.ranks.reduction_order import LAYOUT, reduction_order, restore_reduction_order
from tests.programs import PATIENCE_S, Program
from tests.train.resume_ranks import WAYS
from tests.train.test_loop import last_state, read_metrics

PROGRAM = Path(__file__).with_name("resume_ranks.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a whole run and a resumed one of each way to train; three processes make them all."""
    folder = tmp_path_factory.mktemp("runs")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
    commands = [[sys.executable, PROGRAM, folder, str(rank), "3"] for rank in range(3)]
    processes = [Program(command, env=environment) for command in commands]
    try:
        assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0, 0, 0]
        yield folder
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sweep(keep=1)
def test_reduction_of_three_ranks_is_the_same_after_a_resume(runs: Path, way: str):
    whole, cut = runs / way / "whole", runs / way / "cut"
    assert len(read_metrics(whole)) == 12
    assert read_metrics(cut) == read_metrics(whole)
    before, after = last_state(whole), last_state(cut)
    assert all(torch.equal(value, after["model"][name]) for name, value in before["model"].items())
    assert before["reduction_order"] == after["reduction_order"]
    assert (before["reduction_order"] is None) == (way == "fsdp")


def test_reduction_without_ddp_has_no_order():
    model = torch.nn.Linear(2, 1)
    assert reduction_order(model) is None
    restore_reduction_order(model, [1, 0])
    assert model.weight.grad is None


def test_reduction_order_is_left_out_where_torch_does_not_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("DEBUG", logger="mmdata")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        assert reduction_order(model) is None, "no backward pass was made"
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        order = reduction_order(model)
        assert order is not None
        assert sorted(order) == [0, 1]
        told = {LAYOUT: "first bucket: 1, 0"}
        monkeypatch.setattr(DistributedDataParallel, "_get_ddp_logging_data", lambda _: told)
        assert reduction_order(model) is None
        monkeypatch.delattr(DistributedDataParallel, "_get_ddp_logging_data")
        assert reduction_order(model) is None
    finally:
        collectives.finish()
    said = ["tells the layout of DDP's buckets in another form: 'first", "does not tell the layout of DDP's buckets ("]
    assert all(words in line for words, line in zip(said, caplog.messages, strict=True))
