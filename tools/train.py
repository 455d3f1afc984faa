"""mmdata train: a dual encoder from shards. A run that was stopped goes on with the same command.

    mmdata train configs/scenes.yaml train.epochs=3 data.loading.num_workers=4
    torchrun --nproc-per-node 2 -m mmdata train configs/scenes.yaml

The run's folder (train.output, or runs/NAME for NAME.yaml) gets checkpoints/, metrics.jsonl, config.yaml,
evaluation.json and, where rows could not be loaded, ledger-rankN.jsonl.
"""

from __future__ import annotations

import os
from pathlib import Path

from mmdata.cli import Parser, run
from mmdata.commands.paths import check_shards
from mmdata.config import load_config
from mmdata.config.run_folder import run_folder
from mmdata.launcher import launch_command


def main() -> int:
    """Train; the exit code is 0, or 128 + the signal that stopped the run."""
    parser = Parser("train", __doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with the sections data, model and train")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. train.lr=1e-3")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    check_shards(config.data)
    output = run_folder(options.config, config)
    # Imported here: torch takes seconds to import, and a wrong path is told at once.
    from mmdata.commands.train import train
    from mmdata.train.ranks import collectives

    return train(config, output, collectives.init(), command=launch_command())


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(main, under_torchrun=True)
