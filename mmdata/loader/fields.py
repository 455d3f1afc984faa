"""Entries of batches beside images and captions: what `data.fields` names.

Values of joined tables are looked up here by the rows of a batch: the workers have no part in it, and the values are in
this process's memory. Values in members of tars are read by the workers, see `member_fields`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import ConfigError
from mmdata.nearest import meant
from mmdata.tables.joined import JOINED, Joined
from mmdata.tables.values import ColumnValues
from mmdata.tars.members import KINDS, KNOWN, Selector, kind_of


class ColumnSource(NamedTuple):
    """A column of a joined table."""

    column: str


class MemberSource(NamedTuple):
    """A member of a sample, or a value in it.

    Attributes:
        selector: names it.
        kind: one of `member_values.KINDS`.
        join: name of the joined tars; "" for the sample's own.
    """

    selector: Selector
    kind: str
    join: str = ""

    def __str__(self) -> str:
        return f"{JOINED}{self.join}:{self.selector}" if self.join else str(self.selector)


def parse_fields(settings: Mapping[str, str], joined: Joined) -> dict[str, ColumnSource | MemberSource]:
    """What each entry of `data.fields` names.

    Raises:
        ConfigError: a name that batches have already, or no such source; the nearest one is named.
    """
    found: dict[str, ColumnSource | MemberSource] = {}
    for name, source in settings.items():
        of = f"data.fields.{name}"
        if name in Batch.__annotations__:
            raise ConfigError(f"{of}: batches have an entry of this name already; choose another one")
        found[name] = _parse(source, joined, of)
    return found


def _parse(source: str, joined: Joined, of: str) -> ColumnSource | MemberSource:
    column = source.removeprefix(JOINED)
    if column != source and column in joined.types:
        return ColumnSource(column)
    name, colon, rest = column.partition(":")
    is_joined = column != source and bool(colon) and name in joined.shards
    member = rest if is_joined else source
    if is_joined or (column == source and name.lower().endswith(KINDS)):
        selector = Selector.parse(member)
        return MemberSource(selector, kind_of(selector, of=of), name if is_joined else "")
    known = [JOINED + one for one in joined.types]
    of_shards = [f"{JOINED}{one}:MEMBER" for one in joined.shards]
    listed = ", ".join([*known, *of_shards])
    joins = f"; joined are {listed}" if listed else "; no table is joined (data.join)"
    raise ConfigError(
        f"{of}: no source '{source}'{meant(source, known)}{joins}, and members of the samples are written {KNOWN}"
    )


class Fields:
    """What `data.fields` adds to each batch from joined tables.

    Args:
        settings: name in the batch -> its source.
        joined: the tables and tars.
        rows: gives the int64 row numbers that are loaded, some at a time.

    Raises:
        ConfigError: see `parse_fields`; or values that make no tensor, or loaded rows without a value where numbers
            have no word for that.
        DataError: a table is damaged.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        joined: Joined,
        rows: Callable[[], Iterable[NDArray[np.int64]]],
    ) -> None:
        self._sources = dict(settings)
        self._values: dict[str, ColumnValues] = {}
        self._fingerprints: list[str] = []
        for name, source in parse_fields(settings, joined).items():
            if isinstance(source, ColumnSource):
                values = ColumnValues(joined.column(source.column), source.column, of=f"data.fields.{name}")
                values.check(rows())
                self._values[name] = values
                self._fingerprints.append(values.fingerprint)
            elif source.join:
                self._fingerprints.append(joined.shards[source.join].fingerprint)

    @property
    def name(self) -> str:
        """For states and messages: names and sources, with a digest of these, of tables' values and of joined tars."""
        listed = ", ".join(f"{name} {source}" for name, source in self._sources.items())
        digest = hashlib.sha256(listed.encode())
        for fingerprint in self._fingerprints:
            digest.update(fingerprint.encode())
        return f"data.fields {listed} ({digest.hexdigest()[:16]})"

    def added(self, batch: Batch) -> Batch:
        """The batch with these entries."""
        rows = batch["rows"].numpy()
        entries: Any = {name: _tensor(values.take(rows)) for name, values in self._values.items()}
        return cast(Batch, {**batch, **entries})


def _tensor(values: np.ndarray[Any, Any] | list[str]) -> Tensor | list[str]:
    return values if isinstance(values, list) else torch.from_numpy(values)
