"""Settles what the units of a conversion could not know: duplicates of earlier rows, and where merged rows went.

The order of the rows decides, whoever made the units and whenever. Memory does not grow with the rows: records are read
a unit at a time, and duplicates are found by sorting on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from mmdata.config.convert import ConvertConfig
from mmdata.convert.settle.not_in import WrittenImages
from mmdata.convert.settle.repeats import Repeats
from mmdata.convert.sources.rows import KEY_BYTES
from mmdata.convert.units.records import read_records
from mmdata.convert.units.staging import RECORDS_NAME, Receipt, Staging
from mmdata.errors import Reason

compute: Any = pyarrow.compute  # pyarrow's functions have no types

ELSEWHERE = -1
"""In place of the row of an image that another folder has."""
UNITS_REMEMBERED = 16
"""Settled units in memory: the rows of one image mostly lie near each other."""


@dataclass(frozen=True)
class Settled:
    """The rows of a unit after all is known.

    Attributes:
        receipt: of the unit.
        number_of: gives the number of a row, or of several, in the whole source, for people.
        records: of its rows.
        parts: int8 (rows,), the folder of each row.
        reason: Arrow string (rows,), why a row is left out; null for the others.
        detail: Arrow binary (rows,), of the reason.
        differing: bool (rows,), duplicates with captions or a label that the written row of their image has not.
    """

    receipt: Receipt
    number_of: Callable[[Any], Any]
    records: Any
    parts: NDArray[np.int8]
    reason: Any
    detail: Any
    differing: NDArray[np.bool_]

    @property
    def is_left_out(self) -> NDArray[np.bool_]:
        """bool (rows,): whether each row has a reason."""
        return _valid(self.reason)

    @property
    def is_kept(self) -> NDArray[np.bool_]:
        """bool (rows,): whether each row's sample is in a tar of the unit."""
        return _valid(self.records.column("key"))

    @property
    def is_written(self) -> NDArray[np.bool_]:
        """bool (rows,): whether each row's sample goes into a shard."""
        return self.is_kept & ~self.is_left_out


class Settler:
    """Settles all units of a conversion. A context manager.

    Args:
        staging: of the units.
        receipts: of all units, in order.
        number_of: gives the number of a row, or of several, in the whole source, for people.
        written: images of other folders, which are left out; None for none.
        config: rows of each unit, and whether an image that comes again is written again.
    """

    def __init__(
        self,
        staging: Staging,
        receipts: Sequence[Receipt],
        number_of: Callable[[Any], Any],
        written: WrittenImages | None,
        config: ConvertConfig,
    ) -> None:
        self._staging = staging
        self._receipts = receipts
        self._number_of = number_of
        self._written = written
        self._unit_rows = config.shard_rows
        rows = sum(receipt.rows for receipt in receipts) + (written.images if written else 0)
        self._repeats = None if config.keep_duplicates else Repeats(staging.folder, rows)
        self._remembered = lru_cache(UNITS_REMEMBERED)(self._settle_own)

    def __enter__(self) -> Settler:
        """Find the duplicates in all units, and of images in other folders."""
        if self._repeats is not None:
            for digests in self._written.digests() if self._written else ():
                self._repeats.add(digests, np.full(len(digests) // KEY_BYTES, ELSEWHERE))
            for receipt in self._receipts:
                records = self._records(receipt)
                kept = np.flatnonzero(_valid(records.column("key")))
                said = numbers_of(records.column("said"))[kept]
                self._repeats.add(digests_of(records, kept), receipt.start + kept, said)
            self._repeats.sort()
        return self

    def __exit__(self, *error: object) -> None:
        if self._repeats is not None:
            self._repeats.close()

    def settle(self, receipt: Receipt) -> Settled:
        """Settle one unit: a row whose captions are another row's goes where that one went."""
        own = self._remembered(receipt.unit)
        places = np.flatnonzero(_valid(own.records.column("into")))
        if not len(places):
            return own
        units, there = np.divmod(numbers_of(own.records.column("into"))[places], self._unit_rows)
        parts, differing, is_left_out = own.parts.copy(), own.differing.copy(), own.is_left_out
        lost: list[NDArray[np.int64]] = []
        reasons, details = [own.reason.slice(0, 0)], [own.detail.slice(0, 0)]
        for unit in np.unique(units).tolist():
            target, mine, theirs = self._remembered(unit), places[units == unit], there[units == unit]
            parts[mine] = target.parts[theirs]
            left_out = target.is_left_out[theirs]
            mine, theirs = mine[left_out], theirs[left_out]
            # A row without a reason of its own would have brought captions of its own, lost as well.
            differing[mine] |= target.differing[theirs] & ~is_left_out[mine]
            lost.append(mine)
            reasons.append(target.reason.take(pa.array(theirs)))
            details.append(target.detail.take(pa.array(theirs)))
        changed = np.concatenate(lost)
        reason = _put(own.reason, changed, pa.concat_arrays(reasons))
        detail = _put(own.detail, changed, pa.concat_arrays(details))
        return replace(own, parts=parts, reason=reason, detail=detail, differing=differing)

    def _records(self, receipt: Receipt) -> Any:
        return read_records(self._staging.unit(receipt.unit) / RECORDS_NAME)

    def _settle_own(self, unit: int) -> Settled:
        """Settle the rows of a unit that have an image of their own."""
        receipt = self._receipts[unit]
        records = self._records(receipt)
        parts, reason, detail = (records.column(name) for name in ("part", "reason", "detail"))
        own = Settled(
            receipt, self._number_of, records, numbers_of(parts), reason, detail, np.zeros(receipt.rows, np.bool_)
        )
        if self._repeats is None:
            return own
        found = self._repeats.between(receipt.start, receipt.start + receipt.rows)
        places = found.rows - receipt.start
        is_elsewhere = found.firsts == ELSEWHERE
        own.differing[places] = ~found.same & ~is_elsewhere
        ends = compute.if_else(pa.array(found.same), "", ", with other captions or another label")
        numbers = pa.array(self._number_of(found.firsts)).cast(pa.string())
        said = compute.binary_join_element_wise("the image of row ", numbers, " again, byte for byte", ends, "")
        elsewhere = "a folder of not_in has the image, byte for byte"
        details = compute.if_else(pa.array(is_elsewhere), elsewhere, said).cast(pa.binary())
        reasons = pa.repeat(str(Reason.DUPLICATE_IMAGE), len(places))
        return replace(own, reason=_put(reason, places, reasons), detail=_put(detail, places, details))


def digests_of(records: Any, places: NDArray[np.int64]) -> bytes:
    """Digests of the images of rows that have one, one after the other."""
    return b"".join(records.column("digest").take(pa.array(places)).to_pylist())


def numbers_of(column: Any) -> NDArray[Any]:
    """A column of whole numbers; 0 for null."""
    return column.fill_null(0).to_numpy(zero_copy_only=False)


def _valid(column: Any) -> NDArray[np.bool_]:
    return column.is_valid().to_numpy(zero_copy_only=False)


def _put(column: Any, places: NDArray[np.int64], values: Any) -> Any:
    """A column with other values at some places, which are given in any order."""
    mask = np.zeros(len(column), np.bool_)
    mask[places] = True
    return compute.replace_with_mask(column, pa.array(mask), values.take(pa.array(np.argsort(places))))
