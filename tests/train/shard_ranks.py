"""Program of one process for test_checkpoint.py: writes checkpoints until it is killed.

usage: shard_ranks.py FOLDER. All numbers of a checkpoint are its step. Each line of output is a step that is written.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch

from mmdata.train.run.checkpoint import latest_checkpoint, load_checkpoint
from mmdata.train.run.checkpoint_writer import CheckpointWriter


def state_at(step: int) -> dict[str, Any]:
    """A state of two tensors and a number."""
    weights = {"w": torch.full((300, 300), float(step)), "b": torch.full((7,), float(step))}
    averages = {"w": {"exp_avg": torch.full((5, 3), float(step))}}
    return {"step": step, "model": weights, "optimizer": averages, "rng": [torch.tensor([step])], "settings": {}}


def main() -> None:
    folder = Path(sys.argv[1])
    path = latest_checkpoint(folder)
    begin = 0 if path is None else load_checkpoint(path)["step"]
    with CheckpointWriter(folder, keep=2, say=print) as writer:
        for step in count(begin + 1):
            writer.wait()
            if step > begin + 1:
                print(step - 1, flush=True)
            writer.save(state_at(step), background=step % 2 == 0)


if __name__ == "__main__":
    main()
