"""The columns of rows: those of an index, and those of tables and tars that are joined with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.config.corpus import JoinConfig, sources
from mmdata.errors import ConfigError, meant
from mmdata.index.index import Index
from mmdata.index.side import SideFile, SideFiles
from mmdata.tables.join import JoinedPart, JoinedShards, JoinedTable, Joining
from mmdata.tables.values import kind_of
from mmdata.tars import members
from mmdata.tars.members import Selector

logger = logging.getLogger("mmdata")

JOINED = "join:"
"""Begins the name of a column of a joined table."""
OF_INDEX: dict[str, Any] = {
    "key": pa.large_string(),
    "shard": pa.large_string(),
    "height": pa.int64(),
    "width": pa.int64(),
    "image_bytes": pa.int64(),
    "captions": pa.int64(),
    "caption_tokens": pa.int64(),
    "label": pa.int64(),
    "class_name": pa.large_string(),
}
"""key: of the sample. shard: file name of the tar. height, width: of the image as displayed, in pixels. image_bytes:
of the encoded image. captions: how many the row has. caption_tokens: of the longest caption, special tokens included.
label: number of the class, missing where a row has none. class_name: its name.
"""


class Joined:
    """The columns of the rows of an index: its own, and those of the tables and tars that are joined with it.

    Args:
        settings: of the tables and tars.
        index: whose rows get their columns.
        datasets: what `data.shards` calls its datasets, in their order.
        cache_dir: where side files lie if the index's folder cannot be written; see `LoadingConfig.cache_dir`.
        writes: whether they are made anew: `mmdata join` alone does that.

    Attributes:
        index: as given.
        sides: the side files of the index.
        tables: in the order of the settings.
        shards: folders of tars, by name.
        types: Arrow's types of the columns of all tables, by name.
        types_of_rows: those, and of the index's columns, which hide a table's of the same name.
    """

    def __init__(
        self,
        settings: Sequence[JoinConfig],
        index: Index,
        *,
        datasets: Sequence[str] = (),
        cache_dir: str | Path | None = None,
        writes: bool = False,
    ) -> None:
        sides = SideFiles(index, cache_dir, writes=writes)
        joins = [Joining(one, f"data.join.{number}", index, sides) for number, one in enumerate(settings)]
        self.tables = [JoinedTable(join, datasets) for join in joins if join.settings.shards is None]
        self._by_name: dict[str, JoinedTable] = {}
        for table in self.tables:
            for name in table.types:
                if name in self._by_name:
                    before = self._by_name[name]
                    raise ConfigError(f"{table.of}: column '{name}' is in {before}, too; rename one of them")
                self._by_name[name] = table
        self.types: dict[str, Any] = {name: table.types[name] for name, table in self._by_name.items()}
        self.shards: dict[str, JoinedShards] = {}
        for join in joins:
            if (name := join.settings.name) is not None:  # tars have a name, and tables have none
                if name in self.shards:
                    raise ConfigError(f"{join.of}: the name '{name}' is that of {self.shards[name].of}, too")
                self.shards[name] = JoinedShards(join, self._keys(join))
        lacks = {"caption_tokens": index.tokenizer is None, "class_name": index.class_names is None}
        of_index = {name: kind for name, kind in OF_INDEX.items() if not lacks.get(name)}
        self.types_of_rows: dict[str, Any] = {**self.types, **of_index}
        self.index, self.sides = index, sides

    @classmethod
    def from_config(cls, data: DataConfig, index: Index, *, writes: bool = False) -> Joined:
        """The tables and tars of a section `data`."""
        datasets = [source.shards for source in sources(data)]
        return cls(data.join, index, datasets=datasets, cache_dir=data.loading.cache_dir, writes=writes)

    @property
    def parts(self) -> list[JoinedPart]:
        """Tables and shards."""
        return [*self.tables, *self.shards.values()]

    def table_of(self, name: str) -> JoinedTable:
        """The table that has a column."""
        return self._by_name[name]

    def column(self, name: str) -> SideFile:
        """The side file of a table's column."""
        return self._by_name[name].column(name)

    def member(self, source: str, *, setting: str, columns: Iterable[str] = ()) -> tuple[str, Selector, str]:
        """What a setting names that has values in members of the samples.

        Args:
            source: such as `json:KEY`, or `join:NAME:json:KEY` of joined tars.
            setting: name of the setting, for messages.
            columns: of tables, which the setting may also name.

        Returns:
            The name of the joined tars, "" for the samples' own; the member, and which of `members.KINDS` it is.

        Raises:
            ConfigError: no such source; the nearest one is named.
        """
        rest = source.removeprefix(JOINED)
        join, colon, member = rest.partition(":")
        if rest != source and colon and join in self.shards:
            selector = Selector.parse(member)
            return join, selector, members.kind_of(selector, of=setting)
        if rest == source and join.lower().endswith(members.KINDS):
            selector = Selector.parse(source)
            return "", selector, members.kind_of(selector, of=setting)
        known = [JOINED + one for one in columns]
        listed = ", ".join([*known, *(f"{JOINED}{one}:MEMBER" for one in self.shards)])
        joins = f"; joined are {listed}" if listed else "; no table is joined (data.join)"
        raise ConfigError(
            f"{setting}: no source '{source}'{meant(source, known)}{joins}, and members of the samples are written "
            f"{members.KNOWN}"
        )

    def pick(self, name: str, *kinds: str, of: str, what: str, also: str | None = None) -> Callable[[int], Any]:
        """What gives the values of a column for all rows of a shard: an Arrow array (n,).

        Args:
            name: of the column.
            kinds: that it may have, see `kind_of`.
            of: name of the setting, for messages.
            what: the kinds in words, likewise.
            also: another word that the setting takes.

        Raises:
            ConfigError: no such column; the nearest one is named.
        """
        known = sorted(column for column, kind in self.types_of_rows.items() if kind_of(kind) in kinds)
        if name not in known:
            words = [*known, also] if also else known
            raise ConfigError(f"{of}: no column '{name}' of {what}{meant(name, words)}; there are {', '.join(words)}")
        self.warn_of_hidden([name], of=of)
        return partial(self.of_shard, name=name)

    def warn_of_hidden(self, names: Iterable[str], *, of: str) -> None:
        """Warn of columns that the index and a table have: that of the index is meant."""
        for hidden in sorted(set(names) & OF_INDEX.keys() & self.types.keys()):
            table = self.table_of(hidden)
            logger.warning(
                "%s: '%s' is the index's; the column of this name in %s is not used here: rename it", of, hidden, table
            )

    def of_shard(self, shard: int, name: str) -> Any:
        """A column for all rows of a shard: an Arrow array (n,)."""
        if name not in OF_INDEX:
            return self.table_of(name).of_shard(shard, name)
        columns = self.index.shard(shard)
        if name == "key":
            return columns.keys
        if name == "shard":
            return pa.repeat(pa.scalar(self.index.listed(shard).name, pa.large_string()), len(columns))
        if name in ("label", "class_name"):
            labels = columns.fixed("label")
            if name == "label":
                return pa.array(labels, mask=labels < 0)
            names = self._class_names
            return names.take(pa.array(labels, mask=(labels < 0) | (labels >= len(names))))
        if name in ("height", "width"):
            turned, other = columns.fixed("orientation") >= 5, "width" if name == "height" else "height"
            return pa.array(np.where(turned, columns.fixed(other), columns.fixed(name)))
        if name == "captions":
            return pa.array(np.diff(columns.lists("caption_hash")[0]))
        return pa.array(_longest(*columns.lists("caption_tokens")) if name == "caption_tokens" else columns.fixed(name))

    @cached_property  # pyarrow imports pandas to make it
    def _class_names(self) -> Any:
        return pa.array(self.index.class_names or [], pa.large_string())

    def _keys(self, join: Joining) -> tuple[JoinedTable, str] | None:
        """The column of texts that has the keys of rows in tars; None: they are the rows' own."""
        if (name := join.settings.key) is None:
            return None
        texts = [one for one, kind in self.types.items() if kind_of(kind) == "text"]
        if name not in texts:
            listed = ", ".join(texts) or "none"
            raise ConfigError(f"{join.of}: key: no column '{name}' of texts{meant(name, texts)}; there are {listed}")
        return self._by_name[name], name


def _longest(offsets: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[Any]:
    """The largest of each row's counts; 0 where it has none."""
    result = np.zeros(len(offsets) - 1, np.int64)
    np.maximum.at(result, np.repeat(np.arange(len(result)), np.diff(offsets)), counts)
    return result
