"""A training that was killed at 90 % of an epoch decodes what is left of it, in each loop of others."""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.conftest import write
from tests.programs import PATIENCE_S, run_program

PROGRAM = Path(__file__).with_name("resumes.py")
ROWS, LEFT = 80, 8
LOOPS = ["huggingface", "accelerate", "lightning", "torchtitan", "sentence-transformers", "grain", "trl"]


@pytest.fixture(scope="module")
def spec(photo: Any, tiny_clip: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Settings of ten batches of eight rows, and a CLIP with its processor."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPProcessor

    # Without worker threads no batch is made before it is asked for: a count is exact.
    data = write(tmp_path_factory.mktemp("rows"), photo, labels=False, rows=ROWS) | {"loading": {"num_workers": 0}}
    folder = tmp_path_factory.mktemp("model")
    tiny_clip().save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, AutoTokenizer.from_pretrained(data["tokenizer"])).save_pretrained(folder)
    return json.dumps({"data": data, "model": str(folder)})


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.sweep(keep=4)
def test_resumed_loop_decodes_what_is_left_of_its_epoch(loop: str, spec: str, tmp_path: Path):
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(PROGRAM), loop, spec, str(tmp_path)]
    done = run_program(command, capture_output=True, text=True, env=quiet, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    killed = -signal.SIGKILL
    one, two = {"whole 1": [0], "killed 1": [killed], "resumed 1": [0]}, {"killed 2": [killed] * 2, "resumed 2": [0, 0]}
    assert json.loads((tmp_path / "statuses.json").read_text()) == one | two | {"fewer 1": [0]}
    whole = run_of(tmp_path, "whole", 1)
    assert len(whole["steps"]) == 10
    assert len({digest for step in whole["steps"] for digest in step}) == ROWS
    # sentence-transformers and TRL also look at some rows before each training.
    looks = whole["decoded"] - ROWS
    assert (looks == 0) == (loop not in ("sentence-transformers", "trl"))
    for resumed, earlier, world_size in (("resumed", 1, 1), ("resumed", 2, 2), ("fewer", 2, 1)):
        found = run_of(tmp_path, resumed, world_size)
        assert run_of(tmp_path, "killed", earlier)["steps"] + found["steps"] == whole["steps"]
        assert found["decoded"] == LEFT + looks * world_size


def run_of(folder: Path, phase: str, world_size: int) -> dict[str, Any]:
    """The digests of the rows of each step, and the images decoded, over all processes of a training."""
    ranks = [json.loads((folder / f"{phase}-{world_size}-{rank}.json").read_text()) for rank in range(world_size)]
    steps = [sorted(chain(*parts)) for parts in zip(*(rank["digests"] for rank in ranks), strict=True)]
    return {"steps": steps, "decoded": sum(rank["decoded"] for rank in ranks)}
