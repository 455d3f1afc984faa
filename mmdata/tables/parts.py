"""The parts of a table: one for all rows of an index, or one for each dataset of a mixture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mmdata.errors import ConfigError
from mmdata.index.index import Index
from mmdata.nearest import meant


class Part(NamedTuple):
    """Files of a table, and the shards whose rows they are for: pairs of the first, and the one after the last."""

    files: list[str]
    shards: list[tuple[int, int]]


def parts_of(
    table: str | list[str] | dict[str, str | list[str]] | None, index: Index, datasets: Sequence[str], *, of: str
) -> Iterator[Part]:
    """The files of a table: all for all rows, or some for each dataset."""
    if not isinstance(table, dict):
        yield Part([table] if isinstance(table, str) else table or [], [(0, index.num_shards)])
        return
    for name, files in table.items():
        pairs = zip(datasets, index.sources, strict=True)
        shards = [(source.first_shard, source.last_shard) for dataset, source in pairs if dataset == name]
        if not shards:
            raise ConfigError(
                f"{of}: no dataset '{name}'{meant(name, datasets)}; data.shards has {', '.join(datasets)}"
            )
        yield Part([files] if isinstance(files, str) else files, shards)
