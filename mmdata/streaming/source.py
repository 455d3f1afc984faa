"""Which shards a stream reads: paths, URLs, folders and brace patterns, dealt to ranks. No shell is ever run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from mmdata.data_config import DataConfig, sources
from mmdata.errors import ConfigError, DataError

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""Names that count as shards in a folder."""

ShardNames = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a URL, a folder of tars, a brace pattern such as "cc3m-{0000..0331}.tar", or a list of these."""


def find_shards(shards: ShardNames) -> list[str]:
    """The shards that are meant, in order: a list's in its own, a folder's by name.

    Raises:
        ConfigError: a `pipe:`, or braces that do not close.
        DataError: a local file that is not there, or nothing at all.
    """
    given = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    found = [name for one in given for name in _expand(os.fspath(one))]
    if not found:
        raise DataError("stream: an empty list of shards")
    if piped := [name for name in found if "pipe:" in name]:
        raise ConfigError(
            f"shard '{piped[0]}': pipe: would run a command, and nothing in data may; give a path or a URL "
            "(http, https, s3, gs, hf and others that fsspec opens)"
        )
    if missing := [name for name in found if "://" not in name and not Path(name).is_file()]:
        raise DataError(f"shard '{missing[0]}': no such file or folder")
    return found


def deal(shards: list[str], part: int, world_size: int) -> list[str]:
    """A part of the shards, one of `world_size`: every world_size-th, from number `part` on.

    Raises:
        ConfigError: fewer shards than ranks.
    """
    if len(shards) < world_size:
        raise ConfigError(
            f"stream: {len(shards)} shards for {world_size} ranks, and each rank needs one of its own; run at most "
            f"{len(shards)} ranks, pack smaller shards (`mmdata convert --shard-rows`), or run `mmdata index` and use "
            "mmdata.Loader, which divides batches instead of shards"
        )
    return shards[part::world_size]


def single_dataset(data: DataConfig) -> str:
    """The `shards` of the settings; raises ConfigError where they are several datasets."""
    datasets = sources(data)
    if len(datasets) > 1:
        raise ConfigError(
            f"data.shards names {len(datasets)} datasets, and streams mix none: use one mmdata.Loader over indexed "
            "shards, or give the stream's shards themselves, in one list"
        )
    return datasets[0].shards


def with_shards(config: dict[str, Any], shards: ShardNames) -> dict[str, Any]:
    """The settings with `shards` filled in where it is missing: the section asks for one."""
    if "data" in config:
        return {**config, "data": {"shards": str(shards), **config["data"]}}
    return {"shards": str(shards), **config}


def _expand(name: str) -> list[str]:
    if Path(name).is_dir():
        found = sorted(path for path in Path(name).iterdir() if path.name.lower().endswith(SUFFIXES))
        if not found:
            raise DataError(f"folder '{name}': no shard in it ({', '.join(SUFFIXES)})")
        return [str(path) for path in found]
    if "{" not in name:
        return [name]
    try:
        return list(braceexpand(name, escape=False))
    except ValueError as error:
        raise ConfigError(f"shards '{name}': braces that do not close: {error}") from error
