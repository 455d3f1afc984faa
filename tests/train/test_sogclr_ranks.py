"""The loss sogclr under real DDP (gloo, real processes) against one process that holds the batches; float64."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.programs import run_ranks
from tests.train import sogclr_ranks

PROGRAM = Path(sogclr_ranks.__file__)


def test_two_ranks_are_one_process(tmp_path: Path):
    run_ranks(PROGRAM, tmp_path)
    steps = [[sogclr_ranks.batch_of(step, rank) for rank in range(2)] for step in range(sogclr_ranks.STEPS)]
    expected = sogclr_ranks.run(
        [{key: torch.cat([b[key] for b in both]) for key in both[0] if key != "keys"} for both in steps]
    )  # type: ignore[arg-type, misc]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for one in found:
        # The numbers are kept in float32: the order of a sum may change their last bit.
        torch.testing.assert_close(one["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one["gradients"], expected["gradients"], rtol=1e-5, atol=1e-7)
    kept, wanted = found[0]["kept"], expected["kept"]
    torch.testing.assert_close(kept, wanted, rtol=1e-6, atol=1e-6)
    assert wanted.isfinite().all(1).nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6, 7, 9, 10, 12]
    assert torch.equal(found[1]["kept"], kept)
