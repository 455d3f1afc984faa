"""Decides what the units of a conversion could not: duplicates of earlier rows, merged rows.

The order of the rows decides, whoever made the units and whenever. Memory does not grow with the rows: records are read
a unit at a time, and duplicates are found by sorting on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mmdata.convert.settle.not_in import WrittenImages
from mmdata.convert.settle.repeats import Repeats
from mmdata.convert.sources.rows import KEY_BYTES
from mmdata.convert.units.records import Records, Status
from mmdata.convert.units.staging import RECORDS_NAME, Receipt, Staging
from mmdata.errors import Reason
from mmdata.tars.texts import Loss

UNITS_REMEMBERED = 16
"""Decided units in memory: the rows of one image mostly lie near each other."""

ELSEWHERE = -1
"""In place of the row of an image that another folder has."""

Fault = tuple[Reason, str]


@dataclass
class Decided:
    """A unit after all is known.

    Attributes:
        receipt: of the unit.
        records: of its rows.
        parts: int8 (rows,), the folder of each row.
        number_of: gives the number of a row in the whole source, for people.
        faults: why rows are left out, by place from 0.
        differing: places of duplicates with captions or a label that the written row of their image has not.
        losses: of written samples, by place.
    """

    receipt: Receipt
    records: Records
    parts: NDArray[np.int8]
    number_of: Callable[[int], int]
    faults: dict[int, Fault] = field(default_factory=dict[int, Fault])
    differing: set[int] = field(default_factory=set[int])
    losses: dict[int, dict[Loss, str]] = field(default_factory=dict[int, dict[Loss, str]])

    @property
    def written(self) -> NDArray[np.bool_]:
        """bool (rows,): whether each row's sample is written."""
        written = self.records.status == Status.KEPT
        written[[place for place in self.faults if written[place]]] = False
        return written


class Decider:
    """Decides over all units of a conversion. A context manager.

    Args:
        staging: of the units.
        receipts: of all units, in order.
        number_of: gives the number of a row in the whole source, for people.
        written: images of other folders, which are left out; None for none.
        unit_rows: rows of each unit but the last.
        keep_duplicates: whether an image that comes again is written again.
    """

    def __init__(
        self,
        staging: Staging,
        receipts: Sequence[Receipt],
        number_of: Callable[[int], int],
        written: WrittenImages | None,
        *,
        unit_rows: int,
        keep_duplicates: bool,
    ) -> None:
        self._staging = staging
        self._receipts = receipts
        self._number_of = number_of
        self._written = written
        self._unit_rows = unit_rows
        rows = sum(receipt.rows for receipt in receipts) + (written.rows if written else 0)
        self._repeats = None if keep_duplicates else Repeats(staging.folder, rows)
        self._remembered = lru_cache(UNITS_REMEMBERED)(self._decide_own)

    def decide(self, receipt: Receipt) -> Decided:
        """Decide over one unit."""
        own = self._remembered(receipt.unit)
        decided = replace(own, parts=own.parts.copy(), faults=dict(own.faults), differing=set(own.differing))
        for place in sorted(own.records.merged.tolist(), key=own.records.into):  # so each other unit is read once
            self._resolve(decided, place)
        return decided

    def close(self) -> None:
        """Remove the temporary files."""
        if self._repeats is not None:
            self._repeats.close()

    def __enter__(self) -> Decider:
        self._prepare()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepare(self) -> None:
        """Read the digests of all units and of other folders."""
        if self._repeats is not None and self._written is not None:
            for digests in self._written.digests():
                self._repeats.add(digests, np.full(len(digests) // KEY_BYTES, ELSEWHERE))
        for receipt in self._receipts:
            if self._repeats is not None:
                records = self._records(receipt)
                kept = records.kept
                self._repeats.add(records.digests(kept), receipt.start + kept, records.said[kept])
        if self._repeats is not None:
            self._repeats.sort()

    def _records(self, receipt: Receipt) -> Records:
        return Records(self._staging.unit(receipt.unit) / RECORDS_NAME, receipt.start)

    def _decide_own(self, unit: int) -> Decided:
        """Decide over the rows of a unit that have an image of their own."""
        receipt = self._receipts[unit]
        records = self._records(receipt)
        decided = Decided(receipt, records, records.part, self._number_of, losses=records.losses())
        decided.faults = {place: fault for place in records.left_out() if (fault := records.fault(place))}
        if self._repeats is not None:
            self._leave_out_duplicates(decided)
        return decided

    def _leave_out_duplicates(self, decided: Decided) -> None:
        assert self._repeats is not None
        start = decided.receipt.start
        found = self._repeats.between(start, start + decided.receipt.rows)
        for row, first, same in zip(found.rows.tolist(), found.firsts.tolist(), found.same.tolist(), strict=True):
            if first == ELSEWHERE:
                decided.faults[row - start] = (
                    Reason.DUPLICATE_IMAGE,
                    "a folder of not_in has the image, byte for byte",
                )
                continue
            detail = f"the image of row {self._number_of(first)} again, byte for byte"
            if not same:
                decided.differing.add(row - start)
                detail += ", with other captions or another label"
            decided.faults[row - start] = (Reason.DUPLICATE_IMAGE, detail)

    def _resolve(self, decided: Decided, place: int) -> None:
        """Decide over a row whose captions are an earlier row's: it goes where that one went."""
        unit, there = divmod(decided.records.into(place), self._unit_rows)
        target = self._remembered(unit)
        decided.parts[place] = target.parts[there]
        own = decided.faults.get(place)
        if (fault := target.faults.get(there)) is not None:
            decided.faults[place] = fault
            if there in target.differing and own is None:  # it would have brought captions of its own, lost as well
                decided.differing.add(place)
