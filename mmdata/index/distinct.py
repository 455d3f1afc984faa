"""Refuses folders that hold the same data twice: a dataset that is to be seen more often has a weight or a repeat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from mmdata.errors import ConfigError
from mmdata.index.manifest import Manifest

_REMEDY = "use weight or repeat instead of listing a dataset twice"


def check_distinct(manifests: Sequence[Manifest]) -> None:
    """Compare the folders, and the hashes of the tars.

    Raises:
        ConfigError: two manifests are of the same folder, or list the same shard.
        DataError: a page is missing or damaged.
    """
    _check_folders_differ(manifests)
    _check_shards_differ(manifests)


def _check_folders_differ(parts: Sequence[Manifest]) -> None:
    seen: dict[str, Manifest] = {}
    for part in parts:
        first = seen.setdefault(part.folder.identity, part)
        if first is not part:
            raise ConfigError(f"shards '{part.folder}': the same folder as '{first.folder}'; {_REMEDY}")


def _check_shards_differ(parts: Sequence[Manifest]) -> None:
    """Compare the hashes of the tars. Shards without rows are all equal and are not compared."""
    shards = [np.flatnonzero(part.shard_rows) for part in parts]
    hashes = [part.tar_hashes().take(pa.array(numbers)) for part, numbers in zip(parts, shards, strict=True)]
    owner = np.repeat(np.arange(len(parts)), [len(numbers) for numbers in shards])
    code = pa.concat_arrays(hashes).dictionary_encode().indices.to_numpy()  # equal hashes, equal numbers
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    first = first[inverse]  # position of the first shard with the same hash
    twice = np.flatnonzero(owner[first] != owner)
    if len(twice):
        number = np.concatenate(shards)
        again, earlier = int(twice[0]), int(first[twice[0]])
        part, other = parts[int(owner[again])], parts[int(owner[earlier])]
        raise ConfigError(
            f"shards '{part.folder}': '{part.listed(int(number[again])).name}' is the same shard as "
            f"'{other.listed(int(number[earlier])).name}' in '{other.folder}', the first of "
            f"{len(twice)} that two datasets share; leave them out of one, or {_REMEDY}"
        )
