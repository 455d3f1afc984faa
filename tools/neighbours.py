"""mmdata neighbours: a file of groups of near neighbours, which data.groups makes batches of.

    mmdata neighbours configs/scenes.yaml --run runs/scenes --size 4 --out groups.arrow
    mmdata neighbours configs/scenes.yaml --features groups.features.npy --size 8 --out groups8.arrow

--run embeds the rows of data.shards, each with its caption of epoch 0, by the run's newest checkpoint and with the
image sizes and the tokenizer of the run; the features stay in groups.features.npy. --features takes those of a file,
made so or elsewhere: float, (rows, dimensions), in the order of the index; a row of zeros has no neighbours.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, track
from torch import Tensor

from mmdata import Batch, Config, DataConfig, Loader, load_config
from mmdata.atomic import write_whole
from mmdata.cli import run
from mmdata.config.data import once_in_order
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError, DataError, printable
from mmdata.loader.corpus import open_index
from mmdata.train import DualEncoder
from mmdata.train.memory.neighbours import embed_rows, group_neighbours, mean_similarity
from mmdata.train.ranks import collectives
from mmdata.train.run.checkpoint import find_checkpoint, load_checkpoint, load_weights
from mmdata.train.run.trainer import AUTOCAST
from mmdata.transform.text import Tokenizer

WHICH_ROWS = ("shards", "max_rows", "global_batch_size", "loading")
"""Settings of `data` that are not the run's but the config's: which rows, and who does the work."""


def main() -> int:
    """Embed, group, write the file, say what to put into a config."""
    options = parse_arguments()
    data = load_config(options.config, options.overrides).data
    index = open_index(data)
    check(options, len(index))
    device = collectives.init(options.device)
    made_of = {"size": options.size, "seed": options.seed}
    features = options.features
    if features is None:
        features = options.out.with_suffix(".features.npy")
        made_of |= embed_corpus(find_checkpoint(options.run), data, features, (options.of, device))
    mapped = map_features(features, len(index))
    groups = group(mapped, options, device)
    near, random = mean_similarity(mapped, groups, seed=options.seed, device=device)
    write_groups(options.out, groups, {"index": index.fingerprint, **made_of})
    without = int((groups < 0).sum())
    print(f"{len(groups):,} rows in {int(groups.max()) + 1:,} groups of {options.size}; {without:,} without a group")
    print(f"mean similarity: {near:.3f} within groups, {random:.3f} within random ones")
    print(f"{printable(f'{features} → {options.out}')}; to use it, put this into the config:\n")
    print(settings_for(options.out.resolve(), options.size, data, len(index)))
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="mmdata neighbours", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file; its data.shards are grouped")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.loading.num_workers=8")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, metavar="RUN_OR_CHECKPOINT", help="embed with this model")
    source.add_argument("--features", type=Path, help=".npy file of features that exist")
    parser.add_argument("--size", type=int, required=True, help="rows of a group")
    parser.add_argument("--out", type=Path, required=True, help="Arrow file to write")
    parser.add_argument("--of", choices=("pair", "image", "text"), default="pair", help="near in what; default: pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser.parse_intermixed_args()


def check(options: argparse.Namespace, rows: int) -> None:
    """Refuse what cannot end well, before hours of embedding; make the folder of the file."""
    if not 2 <= options.size <= rows:
        raise ConfigError(f"--size {options.size}: must be 2 to {rows:,}, the rows of data.shards")
    if options.out.suffix == ".npy":
        raise ConfigError(f"--out '{options.out}': the file is an Arrow file; end its name with .arrow")
    options.out.parent.mkdir(parents=True, exist_ok=True)


def embed_corpus(checkpoint: Path, data: DataConfig, out: Path, how: tuple[Any, torch.device]) -> dict[str, str | int]:
    """Write the features of all rows; what the file of groups says of them."""
    of, device = how
    state = load_checkpoint(checkpoint)
    config = parse(Config, state["settings"], origin=f"settings in '{checkpoint}'")
    tokenizer = Tokenizer.load(config.data.tokenizer, max_length=config.data.max_length)
    model = DualEncoder.from_config(config.model, vocab_size=tokenizer.vocab_size)
    load_weights(model, state, origin=str(checkpoint))
    model.to(device).eval()
    changes = {name: getattr(data, name) for name in WHICH_ROWS}
    loader = Loader.from_config(
        once_in_order(config.data.model_copy(update={**changes, "num_lanes": 1})), rank=0, world_size=1
    )
    batches: Iterable[Batch] = track(loader, "embedding", total=len(loader), console=Console(stderr=True))
    parts = embed_rows(model, batches, side=of, autocast_dtype=AUTOCAST[config.train.precision])
    write_whole(out, lambda file: write_features(file, len(loader.index), parts))
    for reason, count in loader.ledger.masked.items():
        print(f"rows that could not be loaded ({reason}) and have no group: {count:,}")
    return {"of": of, "step": state["step"], "checkpoint": checkpoint.name}


def write_features(file: BinaryIO, rows: int, parts: Iterator[tuple[Tensor, Tensor]]) -> None:
    """A .npy file, float16 (rows, D), row by row as they come: N × D need not fit into memory. Other rows are zeros."""
    begin = 0
    for numbers, features in parts:
        if not begin:
            shape = (rows, features.shape[1])
            np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": shape})
            begin = file.tell()
            file.truncate(begin + 2 * rows * shape[1])
        for row, values in zip(numbers.tolist(), features.numpy(), strict=True):
            file.seek(begin + row * values.nbytes)
            file.write(values.tobytes())


def map_features(path: Path, rows: int) -> NDArray[np.floating[Any]]:
    """Features of a file, float (rows, D), mapped."""
    try:
        features: Any = np.lib.format.open_memmap(path, mode="c")  # no zip archive, no pickle
    except (ValueError, EOFError) as error:
        raise DataError(f"features '{path}': cannot be read: {error}; expected a .npy file, float") from error
    if features.ndim != 2 or features.dtype not in (np.float16, np.float32, np.float64):
        raise DataError(
            f"features '{path}': expected float (rows, dimensions), got {features.dtype} {features.shape}; "
            "make them with --run, or convert them"
        )
    if len(features) != rows:
        raise DataError(
            f"features '{path}': {len(features):,} rows, and data.shards has {rows:,}; "
            "give one row of features for each row of the index, in its order"
        )
    return features


def group(features: NDArray[np.floating[Any]], options: argparse.Namespace, device: torch.device) -> Tensor:
    """int64 (N,): the group of each row."""
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("grouping", total=2 * len(features))
        groups = group_neighbours(
            features,
            options.size,
            seed=options.seed,
            device=device,
            on_cell=lambda rows: progress.advance(task, rows),
        )
        progress.update(task, completed=2 * len(features))
    return groups


def write_groups(path: Path, groups: Tensor, made_of: dict[str, str | int]) -> None:
    """The file that `data.groups` reads: a column `group`, and in its metadata what it was made of."""
    schema = pa.schema({"group": pa.int64()}, metadata={key: str(value) for key, value in made_of.items()})
    table = pa.table({"group": groups.numpy()}, schema=schema)

    def write(file: BinaryIO) -> None:
        with pa.ipc.new_file(file, schema) as writer:
            writer.write_table(table)

    write_whole(path, write)


def settings_for(path: Path, size: int, data: DataConfig, rows: int) -> str:
    """The lines of a config: rows of a group stand together only where one window and one lane hold them."""
    lines = ["data:", f"  groups: {{source: {path}, size: {size}}}"]
    if isinstance(data.shards, list) and data.shards[0].weight is not None:
        lines.append("  # in shards: a repeat for each dataset in place of its weight, which groups exclude")
    if rows > data.shuffle_window_rows:
        lines.append(f"  shuffle_window_rows: {rows}  # neighbours in different windows do not meet")
    if data.num_lanes > 1:
        lines.append("  num_lanes: 1  # nor do those in different lanes")
    if data.global_batch_size % size:
        lines.append(f"  global_batch_size: {-(-data.global_batch_size // size) * size}  # whole groups")
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(main)
