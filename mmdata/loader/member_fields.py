"""Entries of batches whose values lie in members of the samples' tars. Workers read them, as they read images.

The first rows decide what an entry is: a tensor of a type and a shape, a list of texts, or a list of JSON values. So
every batch has the same entries, of the same type, on every rank and in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.config import DataConfig
from mmdata.errors import BadSample, ConfigError, DataError, Reason, excerpt
from mmdata.index import Index, ShardStore
from mmdata.loader.fields import MemberSource, parse_fields
from mmdata.plan import Plan
from mmdata.plan.rows import first_rows
from mmdata.tables.joined import Joined
from mmdata.tables.shards import JoinedShards
from mmdata.tars.member_values import EXACT, MAX_BYTES, absent, as_array, open_member, pick
from mmdata.tars.row import IndexedMember

PROBED_VALUES = 64
"""Values that decide the type of an entry: numbers are whole if these are."""
PROBED_ROWS = 1024
"""First rows among which these values are looked for."""

Missing = Literal["mask", "keep", "error"]
"""See `DataConfig.missing_fields`."""


Samples = ShardStore | JoinedShards
"""What finds the members of a row."""


@dataclass(frozen=True)
class MemberField:
    """One entry of batches.

    Attributes:
        name: of the entry.
        source: where its values lie.
        missing: what becomes of rows without one.
    """

    name: str
    source: MemberSource
    missing: Missing

    @property
    def of(self) -> str:
        """Name of the setting, for messages."""
        return f"data.fields.{self.name}"

    @property
    def remedy(self) -> str:
        """For messages: how rows without a value are masked."""
        return f"{'missing: mask in data.join' if self.source.join else 'data.missing_fields=mask'} masks such rows"


@dataclass(frozen=True)
class Column:
    """What an entry is.

    Attributes:
        kind: tensor, texts, or JSON values.
        dtype: of a tensor.
        shape: of a row's part of it.
    """

    kind: Literal["tensor", "text", "json"]
    dtype: np.dtype[Any] = np.dtype(np.float64)  # noqa: RUF009  # immutable
    shape: tuple[int, ...] = ()

    def empty(self, num_rows: int) -> Any:
        """Values of `num_rows` rows without a value: NaN, 0, False, "" or None."""
        if self.kind != "tensor":
            return [self.fill] * num_rows
        return np.full((num_rows, *self.shape), self.fill, self.dtype)

    @property
    def fill(self) -> Any:
        """The value of a row without one."""
        if self.kind == "tensor":
            return np.nan if self.dtype.kind == "f" else 0
        return "" if self.kind == "text" else None

    def checked(self, value: Any) -> Any:
        """A value as it stands in the entry.

        Raises:
            BadSample: it is of another kind, type or shape.
        """
        if self.kind == "json":
            return value
        if self.kind == "text":
            if not isinstance(value, str):
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


class MemberFields:
    """The entries of batches that lie in members.

    Args:
        fields: what they are.
        index: of the shards.
        joined: the tars of other folders, by name.
        rows: first rows of the plan, which decide the type of each entry.
        store: reads these rows; default: one of its own.

    Raises:
        ConfigError: none of the rows has a value; names what their members have.
        DataError: a shard is not the one that was indexed.
    """

    def __init__(
        self,
        fields: Iterable[MemberField],
        index: Index,
        rows: NDArray[np.int64],
        joined: Mapping[str, JoinedShards] | None = None,
        store: ShardStore | None = None,
    ) -> None:
        self.fields = list(fields)
        self.sources = {field.source.join for field in self.fields}  # names of the tars
        self._index, self._joined = index, dict(joined or {})
        samples = self._samples(store or ShardStore(index))
        self.columns = [self._probe(field, samples[field.source.join], rows.tolist()) for field in self.fields]

    @classmethod
    def from_config(cls, data: DataConfig, index: Index, joined: Joined, plan: Plan) -> MemberFields | None:
        """The entries of `data.fields` that lie in members; None: there are none."""
        found = [
            MemberField(name, source, joined.shards[source.join].missing if source.join else data.missing_fields)
            for name, source in parse_fields(data.fields, joined).items()
            if isinstance(source, MemberSource)
        ]
        return cls(found, index, first_rows(plan.rows, PROBED_ROWS), joined.shards) if found else None

    def entries(self, num_rows: int, store: ShardStore, stop: Event | None = None) -> FieldEntries:
        """The entries of a batch of `num_rows` rows, without values yet.

        Args:
            num_rows: of the batch.
            store: reads the shards.
            stop: once it is set, reads raise Interrupted.
        """
        return FieldEntries(self, self._samples(store), num_rows, stop or Event())

    def _samples(self, store: ShardStore) -> dict[str, Samples]:
        return {"": store, **self._joined}

    def _probe(self, field: MemberField, samples: Samples, rows: list[int]) -> Column:
        found: list[Any] = []
        fault = ""
        for row in rows[:PROBED_ROWS]:
            try:
                found.append(MemberFieldReader(samples, row, Event()).value(field))
            except BadSample as bad:
                fault = fault or f"{samples.place(row)}: {bad.detail}"
            if len(found) == PROBED_VALUES:
                break
        if not found:
            raise ConfigError(f"{field.of}: none of the first {len(rows[:PROBED_ROWS]):,} rows has a value: {fault}")
        return _column(found, field)


def _column(found: list[Any], field: MemberField) -> Column:
    """What an entry is whose first values are these."""
    if isinstance(found[0], str):
        return Column("text")
    if (first := as_array(found[0])) is None:
        return Column("json")
    arrays = [array for value in found if (array := as_array(value)) is not None]
    in_json = field.source.kind == "json"
    dtype = np.result_type(*arrays) if in_json else first.dtype
    if field.missing == "keep" and dtype.kind != "f":
        dtype = np.dtype(np.float64)  # a row without a value has NaN
    return Column("tensor", dtype, first.shape)


class MemberFieldReader:
    """Reads values of one sample; each member is read and parsed once.

    Args:
        samples: finds the members.
        row: of the index.
        stop: once it is set, reads raise Interrupted.
    """

    def __init__(self, samples: Samples, row: int, stop: Event) -> None:
        self._samples, self._row, self._stop = samples, row, stop
        self._members: dict[str, IndexedMember] | None = None
        self._opened: dict[str, Any] = {}

    def value(self, field: MemberField) -> Any:
        """The value of a field.

        Raises:
            BadSample: there is none (missing_field), or it is damaged.
        """
        selector, kind, _ = field.source
        of = field.of
        if self._members is None:
            self._members = self._samples.members(self._row)
        member = self._members.get(selector.extension)
        if member is None:
            listed = ", ".join(f".{extension}" for extension in self._members)
            raise BadSample(Reason.MISSING_FIELD, f"{of}: no member .{selector.extension} among {listed}")
        try:
            if selector.extension not in self._opened:
                if member.size > MAX_BYTES:
                    raise BadSample(Reason.BAD_FIELD, f"{member.size:,} bytes; at most {MAX_BYTES:,}")
                data = self._samples.read_member(self._row, member, self._stop)
                self._opened[selector.extension] = open_member(data, kind)
            value = pick(self._opened[selector.extension], selector)
        except BadSample as bad:
            raise BadSample(bad.reason, f"{of}: member '{self._name(member)}': {bad.detail}") from bad
        if value is None:
            why = absent(selector, self._opened[selector.extension])
            raise BadSample(Reason.MISSING_FIELD, f"{of}: member '{self._name(member)}': {why}")
        return value

    def _name(self, member: IndexedMember) -> str:
        return f"{self._samples.key(self._row)}.{member.extension}"


class FieldEntries:
    """The entries of one batch while it is made; rows are written in place, by any thread.

    Args:
        fields: what they are.
        samples: find the members, by the name of the tars.
        num_rows: of the batch.
        stop: once it is set, reads raise Interrupted.
    """

    def __init__(self, fields: MemberFields, samples: Mapping[str, Samples], num_rows: int, stop: Event) -> None:
        self._fields, self._samples, self._stop = fields, samples, stop
        self._values = [column.empty(num_rows) for column in fields.columns]

    def write(self, row: int, place: int) -> None:
        """Read the values of a row of the index, and write them into row `place` of the batch.

        Raises:
            BadSample: the row has no value, or a damaged one, and is masked for it.
            DataError: the same, where that is an error.
        """
        readers = {name: MemberFieldReader(self._samples[name], row, self._stop) for name in self._fields.sources}
        for field, column, values in zip(self._fields.fields, self._fields.columns, self._values, strict=True):
            try:
                value = readers[field.source.join].value(field)
                try:
                    values[place] = column.checked(value)
                except BadSample as bad:
                    raise BadSample(bad.reason, f"{field.of}: {field.source}: {bad.detail}") from bad
            except BadSample as bad:
                if field.missing == "keep" and bad.reason is Reason.MISSING_FIELD:
                    continue
                if field.missing == "error":
                    where = self._samples[field.source.join].place(row)
                    raise DataError(f"{where}: {bad.detail}; {field.remedy}") from bad
                raise

    def entries(self, valid: Tensor) -> dict[str, Tensor | list[Any]]:
        """The entries of the batch, without values where not `valid` (B,)."""
        result: dict[str, Tensor | list[Any]] = {}
        bad = np.flatnonzero(~valid.numpy())
        for field, column, values in zip(self._fields.fields, self._fields.columns, self._values, strict=True):
            for place in bad.tolist():
                values[place] = column.fill
            result[field.name] = values if isinstance(values, list) else torch.from_numpy(values)
        return result


def _words(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """A type and a shape, for messages."""
    return f"{dtype} {shape}" if shape else str(dtype)
