"""Which shards a stream reads: expands folders and brace patterns. Runs no shell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmdata.atomic import explain
from mmdata.config import DataConfig
from mmdata.config.corpus import sources
from mmdata.errors import ConfigError, DataError
from mmdata.recognize import refuse_unfinished
from mmdata.safe_read import check_regular, path_of_url
from mmdata.tars.foreign import expand_braces

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""A file in a folder is a shard if its name ends like this."""

ShardNames = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a URL (also `file:`), a folder of tars, a brace pattern such as "x-{0000..0331}.tar", or a list of these."""


def find_shards(shards: ShardNames, *, may_lack: bool = False) -> list[str]:
    """The paths and URLs of the shards, in the order of the list; the shards of a folder are sorted by name.

    Args:
        shards: their names.
        may_lack: some files, not all, may be missing: who reads the shards finds out, as of URLs.

    Raises:
        ConfigError: a name with `pipe:`, braces that do not close, or a pattern of more than `MAX_SHARDS` shards.
        DataError: a local file does not exist or is not a regular file, a folder has no shard, or the list is empty.
    """
    given = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    found = [name for one in given for name in _expand(os.fspath(one))]
    found = [path_of_url(name) or name for name in found]
    if not found:
        raise DataError("stream: an empty list of shards")
    if piped := [name for name in found if "pipe:" in name]:
        raise ConfigError(
            f"shard '{piped[0]}': pipe: would run a command, and nothing in data may; give a path or a URL "
            "(http, https, s3, gs, hf and others that fsspec opens)"
        )
    missing: list[str] = []
    for name in found:
        if "://" not in name:
            try:
                check_regular(name, "shard")
            except FileNotFoundError:
                missing.append(name)
            except OSError as error:  # no permission, a name that is too long
                raise DataError(f"shard {explain(error)}") from error
    if missing and not (may_lack and len(missing) < len(found)):
        raise DataError(f"shard '{missing[0]}': no such file or folder")
    return found


def single_dataset(data: DataConfig) -> str:
    """The `shards` of the settings. Raises a ConfigError if the settings name several datasets."""
    datasets = sources(data)
    if len(datasets) > 1:
        raise ConfigError(
            f"data.shards names {len(datasets)} datasets, and a stream mixes none: use one mmdata.Loader over indexed "
            "shards, or give the stream its shards in one list"
        )
    return datasets[0].shards


def with_shards(config: dict[str, Any], shards: ShardNames) -> dict[str, Any]:
    """The settings as a dictionary, with `data.shards` filled in if it is missing, because the section requires it."""
    if "data" in config:
        return {**config, "data": {"shards": str(shards), **config["data"]}}
    return {"shards": str(shards), **config}


def _expand(name: str) -> list[str]:
    folder = Path(path_of_url(name) or name)
    if os.path.isdir(folder):  # Path.is_dir raises an OSError for a pattern longer than a file name may be
        refuse_unfinished(folder)
        found = sorted(path for path in folder.iterdir() if path.name.lower().endswith(SUFFIXES))
        if not found:
            raise DataError(f"folder '{folder}': no shard in it ({', '.join(SUFFIXES)})")
        return [str(path) for path in found]
    return expand_braces(name)
