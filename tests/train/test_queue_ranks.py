"""The queue under real DDP (gloo, real processes) against one process that holds the batches; float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.programs import run_ranks
from tests.train import queue_ranks

PROGRAM = Path(queue_ranks.__file__)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("queue_ranks")
    run_ranks(PROGRAM, folder)
    return folder


@pytest.mark.parametrize("name", queue_ranks.CASES)
@pytest.mark.sweep(keep=1)
def test_gradients_with_queue_are_those_of_one_process(results: Path, name: str):
    case = queue_ranks.CASES[name]
    steps = [[queue_ranks.batch_of(step, rank, case) for rank in range(2)] for step in range(queue_ranks.STEPS)]
    whole = [{key: torch.cat([b[key] for b in both]) for key in both[0] if key != "keys"} for both in steps]
    expected = queue_ranks.run({**case, "micro_batch_size": None}, whole)  # type: ignore[arg-type]
    assert expected["queue"]["kept"]["valid"].any()
    for rank in range(2):
        found = torch.load(results / f"{name}.{rank}.pt")
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found["gradients"], expected["gradients"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found["queue"]["kept"], expected["queue"]["kept"], rtol=1e-12, atol=1e-12)
        assert found["queue"]["next"] == expected["queue"]["next"]
