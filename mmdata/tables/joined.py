"""The tables and the tars that are joined with an index, and their columns by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mmdata.config import DataConfig
from mmdata.config.data import JoinConfig, sources
from mmdata.errors import ConfigError
from mmdata.index.index import Index
from mmdata.nearest import meant
from mmdata.tables.condition import kind_of
from mmdata.tables.joined_table import JoinedTable
from mmdata.tables.place import store_of
from mmdata.tables.shards import JoinedShards

JOINED = "join:"
"""Begins the name of a column of a joined table."""


class Joined:
    """The tables and the tars that are joined with an index.

    Args:
        settings: of the tables and tars.
        index: whose rows get their columns.
        datasets: what `data.shards` calls its datasets, in their order.
        cache_dir: where joins are kept if the index's folder cannot be written; see `LoadingConfig.cache_dir`.
        replaces: whether tables that changed since they were joined are joined again.

    Attributes:
        tables: in the order of the settings.
        shards: folders of tars, by name.
    """

    def __init__(
        self,
        settings: Sequence[JoinConfig],
        index: Index,
        *,
        datasets: Sequence[str] = (),
        cache_dir: str | Path | None = None,
        replaces: bool = False,
    ) -> None:
        store = store_of(index, cache_dir, replaces=replaces)
        places = {f"data.join.{n}": one for n, one in enumerate(settings)}
        self.tables = [
            JoinedTable(one, index, store, of=of, datasets=datasets) for of, one in places.items() if one.shards is None
        ]
        self._by_name: dict[str, JoinedTable] = {}
        for table in self.tables:
            for name in table.names:
                if name in self._by_name:
                    before = self._by_name[name]
                    raise ConfigError(f"{table.of}: column '{name}' is in {before}, too; rename one of them")
                self._by_name[name] = table
        self.shards: dict[str, JoinedShards] = {}
        for of, one in places.items():
            if one.shards is not None and one.name is not None:
                if one.name in self.shards:
                    raise ConfigError(f"{of}: the name '{one.name}' is that of {self.shards[one.name].of}, too")
                keys = None if one.key is None else self._texts(one.key, of)
                self.shards[one.name] = JoinedShards(one.shards, one.missing, index, of=of, keys=keys, store=store)

    @classmethod
    def from_config(cls, data: DataConfig, index: Index, *, replaces: bool = False) -> Joined:
        """The tables and tars of a section `data`."""
        datasets = [source.shards for source in sources(data)]
        return cls(data.join, index, datasets=datasets, cache_dir=data.loading.cache_dir, replaces=replaces)

    @property
    def parts(self) -> list[JoinedTable | JoinedShards]:
        """Tables and shards."""
        return [*self.tables, *self.shards.values()]

    def _texts(self, name: str, of: str) -> Callable[[int], Any]:
        """Gives a column of texts for the rows of a shard."""
        texts = [one for one, kind in self.types.items() if kind_of(kind) == "text"]
        if name not in texts:
            listed = ", ".join(texts) or "none"
            raise ConfigError(f"{of}: key: no column '{name}' of texts{meant(name, texts)}; there are {listed}")
        return partial(self._by_name[name].of_shard, name=name)

    @property
    def types(self) -> dict[str, Any]:
        """Arrow's types of the columns of all tables, by name."""
        return {name: kind for table in self.tables for name, kind in table.types.items()}

    def table_of(self, name: str) -> JoinedTable:
        """The table that has a column."""
        return self._by_name[name]
