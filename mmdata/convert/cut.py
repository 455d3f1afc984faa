"""Cuts the rows of a corpus into units: as many input rows each as a shard has samples at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from mmdata.convert.settle.merges import Merges
from mmdata.convert.sources.rows import Source, images_of
from mmdata.convert.sources.table_source import TableSource
from mmdata.convert.units.unit import Unit


class Units:
    """The units of a corpus, in order.

    Args:
        source: the rows.
        unit_rows: rows of each unit; the last may have fewer.
        merges: of the rows.
        wanted: whether a unit is to be made; it has no rows yet.

    Attributes:
        rows: of the units so far; all of them once the iteration has ended.
    """

    def __init__(self, source: Source, unit_rows: int, merges: Merges, wanted: Callable[[Unit], bool]) -> None:
        self._source = source
        self._unit_rows = unit_rows
        self._merges = merges
        self._wanted = wanted
        self.rows = 0

    def __iter__(self) -> Iterator[Unit]:
        """The units that are wanted."""
        source = self._source
        if images_of(source):
            return self._ranges()
        return self._sought(source) if isinstance(source, TableSource) and source.can_seek else self._lists()

    def _ranges(self) -> Iterator[Unit]:
        """Units without their rows, as where images are in a table, which are read where they are worked on."""
        assert self._source.rows_are_exact
        for start in range(0, self._source.rows_at_most, self._unit_rows):
            unit = self._next(min(self._unit_rows, self._source.rows_at_most - start))
            if self._wanted(unit):
                yield unit

    def _sought(self, source: TableSource) -> Iterator[Unit]:
        """Units with their rows; the rows between them are not read."""
        rows, place = source.rows_from(0), 0
        for unit in self._ranges():
            if unit.start != place:
                rows = source.rows_from(unit.start)
            place = unit.stop
            yield replace(unit, rows=list(islice(rows, len(unit))))

    def _lists(self) -> Iterator[Unit]:
        """Units with their rows, of which all are read."""
        rows = iter(self._source.rows())
        while chunk := list(islice(rows, self._unit_rows)):
            unit = self._next(len(chunk))
            if self._wanted(unit):
                yield replace(unit, rows=chunk)

    def _next(self, rows: int) -> Unit:
        start, self.rows = self.rows, self.rows + rows
        return Unit(start // self._unit_rows, start, self.rows, merges=self._merges.between(start, self.rows))
