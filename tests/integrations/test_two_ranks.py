"""Two real processes: neither Lightning nor accelerate shards our batches a second time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mmdata
from mmdata.integrations.adapt import normalized
from mmdata.loader import Loader

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'mmdata[lightning]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'mmdata[huggingface]'")


def test_two_ranks_get_their_slices_of_the_plan(data: dict[str, Any], clip: Any, tmp_path: Path):
    clip.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(Path(__file__).with_name("two_ranks.py")), json.dumps(data), str(tmp_path / "model"), str(tmp_path)]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        loader = Loader.from_config(data, rank=rank, world_size=2)
        batches = [batch for _ in range(2) for batch in loader]
        assert seen["lightning"] == [batch["rows"].tolist() for batch in batches]
        stream = mmdata.stream(None, data, rank=rank, world_size=2, steps_per_epoch=2)
        assert seen["stream"] == [batch["rows"].tolist() for _ in range(3) for batch in stream]
        for got, batch in zip(seen["huggingface"], batches, strict=True):
            wanted = normalized(batch["pixel_values"][batch["valid"]]).double().sum(dim=(1, 2, 3))
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), wanted)
