"""Cuts the rows of a corpus into units: as many input rows each as a shard has samples at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from mmdata.convert.settle.merges import Merges
from mmdata.convert.sources.rows import Source
from mmdata.convert.units.unit import Unit


class Units:
    """The units of a corpus, in order.

    Args:
        source: the rows.
        unit_rows: rows of each unit; the last may have fewer.
        merges: of the rows.
        wanted: whether a unit is to be made; it has no rows yet.
    """

    def __init__(self, source: Source, unit_rows: int, merges: Merges, wanted: Callable[[Unit], bool]) -> None:
        self._source = source
        self._unit_rows = unit_rows
        self._merges = merges
        self._wanted = wanted

    def __iter__(self) -> Iterator[Unit]:
        """The units that are wanted, with their rows. Where these hold images, they are read where the unit is made."""
        source, place = self._source, 0
        rows = source.rows()
        for start in range(0, source.num_rows, self._unit_rows):
            stop = min(start + self._unit_rows, source.num_rows)
            unit = Unit(start // self._unit_rows, start, stop, merges=self._merges.between(start, stop))
            if not self._wanted(unit):
                continue
            if source.holds_images:
                yield unit
                continue
            if source.can_seek and place < start:
                rows, place = source.rows(start), start
            of_unit = list(islice(rows, start - place, unit.stop - place))
            source.check_unchanged()
            yield replace(unit, rows=of_unit)
            place = unit.stop
