"""mmdata train: train a dual encoder on shards. The same command continues a run that was stopped.

    mmdata train configs/scenes.yaml train.epochs=3 data.loading.num_workers=4
    torchrun --nproc-per-node 2 -m mmdata train configs/scenes.yaml

The run's folder (train.output, or runs/NAME for NAME.yaml) gets checkpoints/, metrics.jsonl, config.yaml,
evaluation.json and, if rows could not be loaded, ledger-rankN.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mmdata.cli.paths import check_shards


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with the sections data, model and train")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. train.lr=1e-3")


def run(options: argparse.Namespace) -> int:
    """Train; the exit code is 0, or 128 + the signal that stopped the run."""
    from mmdata.config import load_config
    from mmdata.config.config import run_folder

    config = load_config(options.config, options.overrides)
    check_shards(config.data)
    output = run_folder(options.config, config)
    from mmdata.train.ranks import collectives
    from mmdata.trained.training import train

    return train(config, output, collectives.init())
