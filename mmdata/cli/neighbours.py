"""mmdata neighbours: a file of groups of near neighbours, which data.groups makes batches of.

    mmdata neighbours configs/scenes.yaml --run runs/scenes --size 4 --out groups.npy
    mmdata neighbours configs/scenes.yaml --features groups.features.npy --size 8 --out groups8.npy

--run embeds the rows of data.shards, each with its caption of epoch 0, by the run's newest checkpoint and with the
image sizes and the tokenizer of the run; the features stay in groups.features.npy. --features takes those of a file,
made so or elsewhere: float, (rows, dimensions), in the order of the index; a row of zeros has no neighbours.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdata.cli.paths import check_config_or_shards, check_run
from mmdata.errors import ConfigError, printable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG_OR_SHARDS", help="YAML file, or a folder; its shards are grouped")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.loading.num_workers=8")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, metavar="RUN_OR_CHECKPOINT", help="embed with this model")
    source.add_argument("--features", type=Path, help=".npy file of features that exist")
    parser.add_argument("--size", type=int, required=True, help="rows of a group")
    parser.add_argument("--out", type=Path, required=True, help=".npy file to write")
    parser.add_argument("--of", choices=("pair", "image", "text"), default="pair", help="near in what; default: pair")
    parser.add_argument(
        "--max-similarity", type=float, help="rows with a larger cosine stand in no group together; default: any may"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def run(options: argparse.Namespace) -> int:
    """Embed, group, write the file, say what to put into a config."""
    check_config_or_shards(options.config, options.overrides)
    if options.run is not None:
        check_run(options.run)
    from mmdata.commands.neighbours import alike, data_of, embed_corpus, map_features, settings_for, without_group
    from mmdata.loader.corpus import open_index
    from mmdata.plan.groups import save_groups
    from mmdata.train.memory.neighbours import mean_similarity, usable_rows
    from mmdata.train.ranks import collectives
    from mmdata.trained import TrainedRun

    data = data_of(options.config, options.overrides)
    index = open_index(data)
    check(options, len(index))
    device = collectives.init(options.device)
    features = options.features
    if options.run is not None:
        features = options.out.with_suffix(".features.npy")
        masked = embed_corpus(TrainedRun.load(options.run, device), data, features, side=options.of)
        for reason, count in masked.items():
            print(f"rows that could not be loaded ({reason}) and have no group: {count:,}")
    mapped = map_features(features, len(index))
    groups = group(mapped, alike(data), options, device)
    near, random = mean_similarity(mapped, groups, seed=options.seed, device=device)
    save_groups(options.out, groups.numpy(), index)
    without = without_group(data, index, groups.numpy(), usable_rows(mapped).numpy())
    print(printable(f"{len(groups):,} rows in {int(groups.max()) + 1:,} groups of {options.size}; {without}"))
    print(f"mean similarity: {near:.3f} within groups, {random:.3f} within random ones")
    print(f"{printable(f'{features} → {options.out}')}; to use it, put this into the config:\n")
    print(settings_for(options.out.resolve(), options.size, data, len(index)))
    return 0


def check(options: argparse.Namespace, rows: int) -> None:
    """Refuse what cannot end well, before hours of embedding; make the folder of the file."""
    if not 2 <= options.size <= rows:
        raise ConfigError(f"--size {options.size}: must be 2 to {rows:,}, the rows of data.shards")
    if options.out.is_dir():
        raise ConfigError(f"--out '{options.out}': a folder; give the .npy file to write, such as groups.npy")
    if options.out.suffix != ".npy":
        raise ConfigError(f"--out '{options.out}': the file is an array of numpy; end its name with .npy")
    options.out.parent.mkdir(parents=True, exist_ok=True)


def group(
    features: NDArray[np.floating[Any]], same: NDArray[np.int64], options: argparse.Namespace, device: torch.device
) -> Tensor:
    """int64 (N,): the group of each row."""
    from rich.console import Console
    from rich.progress import Progress

    from mmdata.train.memory.neighbours import group_neighbours

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("grouping", total=2 * len(features))
        groups = group_neighbours(
            features,
            options.size,
            seed=options.seed,
            device=device,
            same=same,
            max_similarity=options.max_similarity,
            on_cell=lambda rows: progress.advance(task, rows),
        )
        progress.update(task, completed=2 * len(features))
    return groups
