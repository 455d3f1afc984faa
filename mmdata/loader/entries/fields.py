"""Entries of batches beside images and captions: what `data.fields` names.

Values of joined tables are looked up by the rows of a batch, in the training process: their memory is not needed twice.
Values in members of the samples' tars are read by the workers, as images are. The first rows decide what such an entry
is: a tensor of a type and a shape, a list of texts, or a list of JSON values. So every batch has the same entries, of
the same type, on every rank and in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import DataConfig
from mmdata.config.data import RowsConfig
from mmdata.errors import BadSample, ConfigError, DataError, Reason, excerpt
from mmdata.index import Index, ShardStore
from mmdata.plan import Plan
from mmdata.processes import cached_property
from mmdata.tables.join import JoinedShards
from mmdata.tables.joined import JOINED, Joined
from mmdata.tables.values import ColumnValues
from mmdata.tars.members import EXACT, MAX_BYTES, Selector, absent, as_array, open_member, pick
from mmdata.tars.scan import IndexedMember

PROBED_VALUES = 64
"""Values that decide the type of an entry: numbers are whole if these are."""
PROBED_ROWS = 1024
"""First rows among which these values are looked for."""

Samples = ShardStore | JoinedShards
"""What finds the members of a row."""


@dataclass(frozen=True)
class Column:
    """What an entry is: an array, of objects if the values are texts or JSON.

    Attributes:
        dtype: of the array.
        shape: of a row's part of it.
        fill: the value of a row without one: NaN, 0, False, "" or None.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fill: Any

    @classmethod
    def of(cls, found: list[Any], *, like_first: bool, keeps_missing: bool) -> Column:
        """What an entry is whose first values are these.

        Args:
            found: the values.
            like_first: numbers have the type of the first one; else the one that holds them all.
            keeps_missing: rows without a value stay, and have NaN.
        """
        if isinstance(found[0], str):
            return cls(np.dtype(object), (), "")
        if (first := as_array(found[0])) is None:
            return cls(np.dtype(object), (), None)
        arrays = [array for value in found if (array := as_array(value)) is not None]
        dtype = first.dtype if like_first else np.result_type(*arrays)
        if keeps_missing and dtype.kind != "f":
            dtype = np.dtype(np.float64)
        return cls(dtype, first.shape, np.nan if dtype.kind == "f" else 0)

    def checked(self, value: Any) -> Any:
        """A value as it stands in the entry.

        Raises:
            BadSample: it is of another kind, type or shape.
        """
        if self.dtype.kind == "O":
            if self.fill == "" and not isinstance(value, str):
                raise BadSample(Reason.BAD_FIELD, f"{excerpt(value)}, and the first rows have texts")
            return value
        array = as_array(value)
        if array is None or array.shape != self.shape or not np.can_cast(array.dtype, self.dtype, "safe"):
            got = excerpt(value) if array is None else _words(array.dtype, array.shape)
            if array is not None and not array.shape:
                got += f" ({array})"
            raise BadSample(Reason.BAD_FIELD, f"{got}, and the first rows have {_words(self.dtype, self.shape)}")
        if self.dtype.kind == "f" and array.dtype.kind == "i" and ((array > EXACT) | (array < -EXACT)).any():
            raise BadSample(Reason.BAD_FIELD, "a whole number above 2^53, which floats would round: store it as a text")
        return array


@dataclass(frozen=True)
class MemberField:
    """One entry of batches whose values lie in a member of each sample.

    Attributes:
        name: of the entry.
        setting: that names the source, for messages.
        selector: names the member, or a value in it.
        kind: one of `mmdata.tars.members.KINDS`.
        join: name of the joined tars; "" for the sample's own.
        missing: what becomes of rows without one, see `JoinConfig.missing`.
        column: what the entry is; None: not known yet.
    """

    name: str
    setting: str
    selector: Selector
    kind: str
    join: str
    missing: str
    column: Column | None = None

    def read(self, samples: Samples, row: int, opened: dict[tuple[str, str], Any], stop: Event) -> Any:
        """The value of a row.

        Args:
            samples: finds its members.
            row: of the index.
            opened: what has been read of the row, by tars and extension: each member is read and parsed once. The
                extension "" stands for the list of members.
            stop: once it is set, reads raise Interrupted.

        Raises:
            BadSample: there is none (missing_field), it is damaged, or other than the column says.
        """
        selector, place = self.selector, (self.join, self.selector.extension)
        if (self.join, "") not in opened:
            opened[self.join, ""] = samples.members(row)
        members: dict[str, IndexedMember] = opened[self.join, ""]
        if (member := members.get(selector.extension)) is None:
            listed = ", ".join(f".{extension}" for extension in members)
            detail = f"{self.setting}: no member .{selector.extension} among {listed}"
            raise BadSample(Reason.MISSING_FIELD, detail)
        try:
            if place not in opened:
                if member.size > MAX_BYTES:
                    raise BadSample(Reason.BAD_FIELD, f"{member.size:,} bytes; at most {MAX_BYTES:,}")
                opened[place] = open_member(samples.read_member(row, member, stop), self.kind)
            if (value := pick(opened[place], selector)) is None:
                raise BadSample(Reason.MISSING_FIELD, absent(selector, opened[place]))
            return value if self.column is None else self.column.checked(value)
        except BadSample as bad:
            raise self.blamed(bad, samples, row) from bad

    def blamed(self, bad: BadSample, samples: Samples, row: int) -> BadSample:
        """A fault of a row's value, which names the setting and the member."""
        member = f"{samples.key(row)}.{self.selector.extension}"
        return BadSample(bad.reason, f"{self.setting}: member '{member}': {bad.detail}")

    def read_if_there(self, samples: Samples, row: int, opened: dict[tuple[str, str], Any], stop: Event) -> Any:
        """As `read`; None for a row without a value that joined tars keep.

        Raises:
            DataError: the row has no value, or a damaged one, and that is an error.
        """
        try:
            return self.read(samples, row, opened, stop)
        except BadSample as bad:
            if self.missing == "keep" and bad.reason is Reason.MISSING_FIELD:
                return None
            if self.missing == "error":
                remedy = "missing: mask in data.join masks such rows"
                raise DataError(f"{samples.place(row)}: {bad.detail}; {remedy}") from bad
            raise

    def probed(self, samples: Samples, rows: list[int]) -> MemberField:
        """The same with its column, which the first values among some rows decide; see `first_values`."""
        found = self.first_values(samples, rows, enough=PROBED_VALUES)
        column = Column.of(found, like_first=self.kind != "json", keeps_missing=self.missing == "keep")
        return replace(self, column=column)

    def first_values(self, samples: Samples, rows: list[int], *, enough: int) -> list[Any]:
        """The first values among some rows, at most `enough`.

        Raises:
            ConfigError: none of the rows has a value; names what their members have.
        """
        found: list[Any] = []
        fault = ""
        for row in rows:
            try:
                found.append(self.read(samples, row, {}, Event()))
            except BadSample as bad:
                fault = fault or f"{samples.place(row)}: {bad.detail}"
            if len(found) == enough:
                break
        if not found:
            raise ConfigError(f"{self.setting}: none of the first {len(rows):,} rows has a value: {fault}")
        return found


class Fields:
    """What `data.fields` adds to each batch.

    Args:
        data: settings.
        index: of the shards.
        joined: the tables and tars.

    Attributes:
        members: the entries that lie in members.

    Raises:
        ConfigError: a name that batches have already, or no such source; the nearest one is named.
    """

    def __init__(self, data: RowsConfig, index: Index, joined: Joined) -> None:
        self.members: list[MemberField] = []
        self._joined, self._settings = joined, data.fields
        self._tables: dict[str, str] = {}  # entry to column
        for name, source in data.fields.items():
            if name in Batch.__annotations__:
                raise ConfigError(f"data.fields.{name}: batches have an entry of this name already; choose another one")
            column = source.removeprefix(JOINED)
            if column != source and column in joined.types:
                self._tables[name] = column
            else:
                self.members.append(member_field(name, source, joined, section="data.fields", columns=joined.types))

    @classmethod
    def from_config(cls, data: DataConfig, index: Index, joined: Joined, plan: Plan) -> Fields:
        """Those of a section `data`, whose plan says which rows come first: they decide what the entries are.

        Raises:
            ConfigError: see `Fields` and `MemberField.probed`.
            DataError: a shard is not the one that was indexed.
        """
        fields = cls(data, index, joined)
        samples, rows = fields._samples(ShardStore(index)), plan.rows.first(PROBED_ROWS).tolist()
        fields.members = [field.probed(samples[field.join], rows) for field in fields.members]
        return fields

    @cached_property  # not in worker processes: vectors of all rows may be many GB
    def values(self) -> dict[str, ColumnValues]:
        """The values of tables, by entry.

        Raises:
            ConfigError: values that make no tensor.
            DataError: a table is damaged.
        """
        return {
            name: ColumnValues(self._joined.column(column), column, of=f"data.fields.{name}")
            for name, column in self._tables.items()
        }

    def check(self, rows: Callable[[], Iterable[NDArray[np.int64]]]) -> None:
        """Check the values of tables; `rows` gives those that are loaded, some at a time.

        Raises:
            ConfigError: a row without a value where numbers have no word for that.
        """
        for values in self.values.values():
            values.check(rows())

    @property
    def name(self) -> str:
        """For states and messages: names and sources, with a digest of these, of tables' values and of joined tars."""
        listed = ", ".join(f"{name} {source}" for name, source in self._settings.items())
        digest = hashlib.sha256(listed.encode())
        made_of = {name: values.fingerprint for name, values in self.values.items()}
        made_of |= {field.name: self._joined.shards[field.join].fingerprint for field in self.members if field.join}
        for name in self._settings:
            digest.update(made_of.get(name, "").encode())
        return f"data.fields {listed} ({digest.hexdigest()[:16]})"

    def added(self, batch: Batch) -> Batch:
        """The batch with the entries of tables."""
        rows = batch["rows"].numpy()
        entries: Any = dict(batch)
        for name, values in self.values.items():
            found = values.take(rows)
            entries[name] = found if isinstance(found, list) else torch.from_numpy(found)
        return cast(Batch, entries)

    def begin(self, num_rows: int, store: ShardStore, stop: Event | None) -> FieldEntries:
        """The entries of members of a batch of `num_rows` rows, without values yet; `store` reads the shards."""
        return FieldEntries(self.members, self._samples(store), num_rows, stop or Event())

    def _samples(self, store: ShardStore) -> dict[str, Samples]:
        return {"": store, **self._joined.shards}


class FieldEntries:
    """The entries of one batch that lie in members, while it is made; rows are written in place, by any thread.

    Args:
        fields: what they are.
        samples: find the members, by the name of the tars.
        num_rows: of the batch.
        stop: once it is set, reads raise Interrupted.
    """

    def __init__(self, fields: list[MemberField], samples: dict[str, Samples], num_rows: int, stop: Event) -> None:
        self._samples, self._stop = samples, stop
        self._entries: list[tuple[MemberField, Column, NDArray[Any]]] = []
        for field in fields:
            column = field.column
            assert column is not None, "the first rows have decided it"
            values = np.full((num_rows, *column.shape), column.fill, column.dtype)
            self._entries.append((field, column, values))

    def write(self, row: int, place: int) -> None:
        """Read the values of a row of the index, and write them into row `place` of the batch.

        Raises:
            BadSample: the row has no value, or a damaged one, and is masked for it.
            DataError: the same, where that is an error.
        """
        opened: dict[tuple[str, str], Any] = {}
        for field, _, values in self._entries:
            value = field.read_if_there(self._samples[field.join], row, opened, self._stop)
            if value is not None:
                values[place] = value

    def entries(self, valid: Tensor) -> dict[str, Tensor | list[Any]]:
        """The entries of the batch, without values where not `valid` (B,)."""
        result: dict[str, Tensor | list[Any]] = {}
        for field, column, values in self._entries:
            values[~valid.numpy()] = column.fill
            result[field.name] = values.tolist() if column.dtype.kind == "O" else torch.from_numpy(values)
        return result


def member_field(name: str, source: str, joined: Joined, *, section: str, columns: Iterable[str] = ()) -> MemberField:
    """The entry that a section of the settings names, which has values in members; see `Joined.member`."""
    setting = f"{section}.{name}"
    join, selector, kind = joined.member(source, setting=setting, columns=columns)
    return MemberField(name, setting, selector, kind, join, joined.shards[join].missing if join else "mask")


def _words(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """A type and a shape, for messages."""
    return f"{dtype} {shape}" if shape else str(dtype)
