"""Features of a corpus, for groups of near neighbours, and the settings with which such groups become batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import Config, DataConfig, load_config
from mmdata.config.corpus import CorpusConfig
from mmdata.config.data import once_in_order
from mmdata.config.strict_yaml import parse, with_overrides
from mmdata.errors import DataError
from mmdata.files import write_whole
from mmdata.index import Index
from mmdata.loader import Loader
from mmdata.loader.corpus import open_corpus
from mmdata.plan import CaptionSources, IndexRows, NoTexts
from mmdata.plan.from_config import equal_rows
from mmdata.recognize import Kind, recognize
from mmdata.tables.joined import Joined
from mmdata.tables.select import select_rows
from mmdata.tables.selection import row_chunks
from mmdata.train.memory.neighbours import FeatureSide, embed_rows
from mmdata.trained import TrainedRun

BATCH_ROWS = 64
"""`data.global_batch_size` where a folder of shards is given."""
WHICH_ROWS = ("shards", "val", "split", "select", "global_batch_size", "loading")
"""Settings of `data` taken from the config, not from the run: which rows, and who loads them."""


def data_of(place: str, overrides: list[str]) -> DataConfig:
    """The section `data` of a config, or that of a folder of shards with settings from the command line.

    Raises:
        ConfigError: a setting is wrong.
    """
    if not (Path(place).is_dir() or "://" in place):
        return load_config(place, overrides).data
    content = with_overrides({"data": {"shards": place}}, overrides)
    content["data"] = {"global_batch_size": BATCH_ROWS} | content["data"]
    return parse(Config, content, origin=f"settings for shards '{place}'", overrides=overrides).data


def embed_corpus(trained: TrainedRun, data: CorpusConfig, out: Path, *, side: FeatureSide = "pair") -> dict[str, int]:
    """Write the features of all rows of a corpus into a .npy file, float16 (rows, D).

    Args:
        trained: the model that embeds; its run's image sizes and tokenizer are used.
        data: which rows, and who loads them.
        out: the file.
        side: which features.

    Returns:
        The number of rows without features by reason.
    """
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
    corpus = open_corpus(data.model_copy(update={"tokenizer": None}))
    index = corpus.index
    captions = corpus.captions or (None if index.has_captions else CaptionSources.in_turn(NoTexts(index)))
    return IndexRows(index, captions, equals=equal_rows(data, index, corpus.joined)).all_hashes()


def without_group(data: DataConfig, index: Index, groups: NDArray[np.int64], usable: NDArray[np.int64]) -> str:
    """How many rows have no group, and why: "356 without a group: 354 not trained on (data.val.share), 2 left over".

    Args:
        data: which rows are trained on.
        index: of the rows.
        groups: int64 (N,), -1 for a row without a group.
        usable: int64 (n,), the rows with features.
    """
    without = groups < 0
    has_features = np.zeros(len(groups), np.bool_)
    has_features[usable] = True
    is_loaded = np.zeros(len(groups), np.bool_)
    for rows in row_chunks(select_rows(data, index, Joined.from_config(data, index)), len(index)):
        is_loaded[rows] = True
    chosen_by = {"val.share": data.val.share, "select": data.select}
    named = ", ".join(f"data.{name}" for name, value in chosen_by.items() if value is not None)
    reasons = {
        f"not trained on{named and f' ({named})'}": without & ~has_features & ~is_loaded,
        "without features, since they could not be loaded or were in no batch": without & ~has_features & is_loaded,
        "left over": without & has_features,
    }
    why = ", ".join(f"{int(rows.sum()):,} {reason}" for reason, rows in reasons.items() if rows.any())
    return f"{int(without.sum()):,} without a group{why and f': {why}'}"


def map_features(path: Path, rows: int) -> NDArray[np.floating[Any]]:
    """Map the features in a .npy file, float (rows, D).

    Raises:
        DataError: another format, type or number of rows.
    """
    kind = recognize(path)
    if path.suffix != ".npy" and kind not in (Kind.ABSENT, Kind.BINARY):
        raise DataError(f"features '{path}': {kind.value}; expected a .npy file, float")
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
    """Write a .npy file, float16 (rows, D), in the order in which rows come; rows that never come are zeros.

    N × D need not fit into memory.
    """
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
