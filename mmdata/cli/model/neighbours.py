"""mmdata neighbours: a file of groups of near neighbours, which data.groups makes batches of.

    mmdata neighbours configs/scenes.yaml --run runs/scenes --size 4 --out groups.npy
    mmdata neighbours configs/scenes.yaml --features groups.features.npy --size 8 --out groups8.npy

--run embeds the rows of data.shards, each with its caption of epoch 0, by the run's newest checkpoint and with the
image sizes and the tokenizer of the run; the features stay in groups.features.npy. --features takes those of a file,
made so or elsewhere: float, (rows, dimensions), in the order of the index; a row of zeros has no neighbours.

    mmdata neighbours configs/scenes.yaml --run runs/scenes --size 4 --range-max 50 --relative-margin 0.05 --out g.npy

--range-min, --range-max and the margins are those of sentence-transformers' mine_hard_negatives: a row takes rows among
its 50 nearest. The margins leave out those whose caption fits a row's image nearly as well as its own; they compare
images with captions, and so need the features of both: (rows, 2, dimensions). With --rescore a second model decides.

A folder of shards in place of the config takes default settings, in batches of 64 rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mmdata.cli.paths import check_run, load_settings
from mmdata.errors import ConfigError, DataError, printable
from mmdata.files import write_whole

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from mmdata.batch import Batch
    from mmdata.config import DataConfig
    from mmdata.config.corpus import CorpusConfig
    from mmdata.train.memory.neighbours import FeatureSide, Hardness
    from mmdata.trained import TrainedRun

BATCH_ROWS = 64
"""`data.global_batch_size` where a folder of shards is given."""
WHICH_ROWS = ("shards", "val", "split", "select", "global_batch_size", "loading")
"""Settings of `data` taken from the config, not from the run: which rows, and who loads them."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG_OR_SHARDS", help="YAML file, run, or folder; its shards are grouped")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.loading.num_workers=8")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, metavar="RUN_OR_CHECKPOINT", help="embed with this model")
    source.add_argument("--features", type=Path, help=".npy file of features that exist")
    parser.add_argument("--size", type=int, required=True, help="rows of a group")
    parser.add_argument("--out", type=Path, required=True, help=".npy file to write")
    sides = ("pair", "image", "text", "both")
    parser.add_argument("--of", choices=sides, help="near in what; default: pair, or both, which the margins need")
    parser.add_argument(
        "--max-similarity", type=float, help="rows with a larger cosine stand in no group together; default: any may"
    )
    parser.add_argument("--range-min", type=int, default=0, help="skip so many of a row's nearest rows")
    parser.add_argument("--range-max", type=int, help="a row takes rows among so many nearest; default: all")
    parser.add_argument("--absolute-margin", type=float, help="in cosine, by which others are below a row's own pair")
    parser.add_argument("--relative-margin", type=float, help="the same as a share; 0.05: NV-Retriever's 95 %%")
    parser.add_argument("--rescore", type=Path, metavar="RUN_OR_FEATURES", help="a second model that decides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")


def run(options: argparse.Namespace) -> int:
    """Embed, group, write the file, say what to put into a config."""
    data = load_settings(options.config, options.overrides, {"global_batch_size": BATCH_ROWS}).data
    if options.run is not None:
        check_run(options.run)
    from mmdata.loader.corpus import open_index
    from mmdata.plan.groups import save_groups
    from mmdata.train.memory.neighbours import mean_similarity
    from mmdata.train.ranks import collectives
    from mmdata.trained import load_run

    index = open_index(data)
    hardness = check(options, len(index))
    device = collectives.init(options.device, join=False)

    def embedded(model: Path, suffix: str, side: FeatureSide) -> Path:
        out = options.out.with_suffix(suffix)
        masked = embed_corpus(load_run(model, device, precision=None), data, out, side=side)
        for reason, count in masked.items():
            print(f"rows that could not be loaded ({reason}) and have no group: {count:,}")
        return out

    features, rescore = options.features, options.rescore
    if options.run is not None:
        side = options.of or ("both" if hardness.compares_sides or rescore else "pair")
        features = embedded(options.run, ".features.npy", side)
    if rescore is not None:
        if rescore.suffix != ".npy":
            rescore = embedded(rescore, ".rescored.npy", "both")
        hardness = replace(hardness, rescored=map_features(rescore, len(index), both=True))
    mapped = map_features(features, len(index), both=hardness.compares_sides)
    groups = group(mapped, alike(data), options, hardness, device)
    near, random = mean_similarity(mapped, groups, seed=options.seed, device=device)
    save_groups(options.out, groups.numpy(), index)
    without = int((groups < 0).sum())
    why = " (not trained on, not loaded, or left over)" if without else ""
    made = f"{len(groups):,} rows in {int(groups.max()) + 1:,} groups of {options.size}"
    print(f"{made}; {without:,} without a group{why}")
    print(f"mean similarity: {near:.3f} within groups, {random:.3f} within random ones")
    print(f"{printable(f'{features} → {options.out}')}; to use it, put this into the config:\n")
    print(settings_for(options.out.resolve(), options.size, data, len(index)))
    return 0


def check(options: argparse.Namespace, rows: int) -> Hardness:
    """Refuse what cannot end well, before hours of embedding; make the folder of the file."""
    from mmdata.train.memory.neighbours import Hardness

    if not 2 <= options.size <= rows:
        raise ConfigError(f"--size {options.size}: must be 2 to {rows:,}, the rows of data.shards")
    if options.out.is_dir():
        raise ConfigError(f"--out '{options.out}': a folder; give the .npy file to write, such as groups.npy")
    if options.out.suffix != ".npy":
        raise ConfigError(f"--out '{options.out}': the file is an array of numpy; end its name with .npy")
    if options.rescore is not None and options.rescore.suffix != ".npy":
        check_run(options.rescore)
    first, last, least = options.range_min, options.range_max, options.range_min + options.size - 1
    if first < 0 or (last is not None and last < least):
        raise ConfigError(f"--range-min {first} and --range-max {last}: from 0 on, and {least} or more for groups")
    hardness = Hardness(
        range_min=first,
        range_max=last,
        absolute_margin=options.absolute_margin,
        relative_margin=options.relative_margin,
        max_similarity=options.max_similarity,
    )
    if options.of not in (None, "both") and (hardness.compares_sides or options.rescore):
        raise ConfigError(
            f"--of {options.of}: the margins and --rescore compare images with captions, and need features of both; "
            "leave --of out"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return hardness


def group(
    features: NDArray[np.floating[Any]],
    same: NDArray[np.int64],
    options: argparse.Namespace,
    hardness: Hardness,
    device: torch.device,
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
            hardness=hardness,
            on_cell=lambda rows: progress.advance(task, rows),
        )
        progress.update(task, completed=2 * len(features))
    return groups


def embed_corpus(trained: TrainedRun, data: CorpusConfig, out: Path, *, side: FeatureSide = "pair") -> dict[str, int]:
    """Write the features of all rows of a corpus into a .npy file, float16 (rows, D), or (rows, 2, D) of both sides.

    Args:
        trained: the model that embeds; its run's image sizes and tokenizer are used.
        data: which rows, and who loads them.
        out: the file.
        side: which features.

    Returns:
        The number of rows without features by reason.
    """
    from rich.console import Console
    from rich.progress import track

    from mmdata.config.data import once_in_order
    from mmdata.loader import Loader
    from mmdata.train.memory.neighbours import embed_rows

    changes = {name: getattr(data, name) for name in WHICH_ROWS}
    own = trained.config.data.join  # of captions; the config's are those that `select` names
    changes |= {"join": [*own, *(one for one in data.join if one not in own)], "fields": {}}
    loader = Loader.from_config(
        once_in_order(trained.config.data.model_copy(update={**changes, "num_lanes": 1})), rank=0, world_size=1
    )
    batches: Iterable[Batch] = track(loader, "embedding", total=len(loader), console=Console(stderr=True))
    parts = embed_rows(trained.model, batches, side=side, autocast_dtype=trained.autocast_dtype)
    with trained.numerics():
        write_whole(out, lambda file: _write_features(file, len(loader.index), parts))
    return loader.ledger.masked


def alike(data: DataConfig) -> NDArray[np.int64]:
    """What makes the rows of a corpus equal, int64 (N, 2): hashes of image and of caption (`data.caption_hash`)."""
    from mmdata.loader.corpus import open_corpus
    from mmdata.plan import CaptionSources, IndexRows, NoTexts
    from mmdata.plan.from_config import equal_rows

    corpus = open_corpus(data.model_copy(update={"tokenizer": None}))
    index = corpus.index
    captions = corpus.captions or (None if index.has_captions else CaptionSources.in_turn(NoTexts(index)))
    return IndexRows(index, captions, equals=equal_rows(data, index, corpus.joined)).all_hashes()


def map_features(path: Path, rows: int, *, both: bool = False) -> NDArray[np.floating[Any]]:
    """Map the features in a .npy file, float (rows, D), or (rows, 2, D) of images and captions.

    Args:
        path: the file.
        rows: of the index.
        both: only the latter will do.

    Raises:
        DataError: another format, type, shape or number of rows.
    """
    import numpy as np

    try:
        features: Any = np.lib.format.open_memmap(path, mode="c")  # no zip archive, no pickle
    except (ValueError, EOFError) as error:
        raise DataError(f"features '{path}': cannot be read: {error}; expected a .npy file, float") from error
    fits = features.shape[1:2] == (2,) if features.ndim == 3 else features.ndim == 2 and not both
    if not fits or features.dtype not in (np.float16, np.float32, np.float64):
        shape = "(rows, 2, dimensions) of images and captions" if both else "(rows, dimensions)"
        raise DataError(
            f"features '{path}': expected float {shape}, got {features.dtype} {features.shape}; make them with "
            f"--run{' --of both' if both else ''}, or convert them"
        )
    if len(features) != rows:
        raise DataError(
            f"features '{path}': {len(features):,} rows, and data.shards has {rows:,}; "
            "give one row of features for each row of the index, in its order"
        )
    return features


def settings_for(path: Path, size: int, data: DataConfig, rows: int) -> str:
    """Lines for a config: rows of a group stand together only if they are in one window and one lane."""
    lines = ["data:", f"  groups: {{source: {path}, size: {size}, share: 0.5}}  # share: of each batch, 1 for all"]
    if isinstance(data.shards, list) and data.shards[0].weight is not None:
        lines.append("  # in shards: a repeat for each dataset in place of its weight, which groups exclude")
    if rows > data.shuffle_window_rows:
        lines.append(f"  shuffle_window_rows: {rows}  # neighbours in different windows do not meet")
    if data.num_lanes > 1:
        lines.append("  num_lanes: 1  # nor do those in different lanes")
    if data.global_batch_size % size:
        lines.append(f"  global_batch_size: {-(-data.global_batch_size // size) * size}  # whole groups")
    return "\n".join(lines)


def _write_features(file: BinaryIO, rows: int, parts: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Write a .npy file, float16 (rows, D) or (rows, 2, D), in the order of `parts`; rows that never come are zeros.

    N × D need not fit into memory.
    """
    import numpy as np

    begin = 0
    for numbers, features in parts:
        if not begin:
            shape = (rows, *features.shape[1:])
            np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": shape})
            begin = file.tell()
            file.truncate(begin + 2 * math.prod(shape))
        for row, values in zip(numbers.tolist(), features.numpy(), strict=True):
            file.seek(begin + row * values.nbytes)
            file.write(values.tobytes())
