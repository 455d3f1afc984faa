"""Merges the rows of one image into one sample with all their captions. The order of the rows decides.

The rows are read three times: for the images that repeat, for the captions of those rows, and to convert. Captions
wait in a temporary file; memory is 65 to 110 bytes a row, and nothing is kept where no image repeats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mmdata.convert.expected import expected_hash
from mmdata.convert.rows import Row, Source
from mmdata.errors import BadSample, Reason, excerpt
from mmdata.shards.captions import MAX_CAPTION_BYTES
from mmdata.shards.texts import Loss

KEY_BYTES = 16
"""Bytes of the hash that stands for an image while images that repeat are looked for."""

MAX_MERGED_BYTES = MAX_CAPTION_BYTES // 2
"""Most bytes of captions of a merged sample: a path such as "none.jpg" may come in any number of rows."""

Said = tuple[list[str], int | str | None]
"""Captions and label of a row."""

MERGED, DUPLICATE, TOO_LONG = range(3)
"""What became of a row whose image an earlier row has."""


def image_key(row: Row) -> bytes:
    """KEY_BYTES that are equal for rows with the same path, or the same bytes in a binary column, and the same hash."""
    image = row.image
    if row.fault or not isinstance(image, (str, bytes)):
        return row_key(row.number)
    data = b"path " + image.encode("utf-8", "surrogatepass") if isinstance(image, str) else b"data " + image
    if expected := expected_hash(row.hash):
        data = f"hash {expected} ".encode("utf-8", "surrogatepass") + data
    return hashlib.sha256(data).digest()[:KEY_BYTES]


def row_key(number: int) -> bytes:
    """KEY_BYTES that no other row has: of a row whose image is not known."""
    return number.to_bytes(KEY_BYTES, "little")


@dataclass(frozen=True)
class Repeated:
    """The rows whose image comes in more than one row.

    Attributes:
        rows: int64 (M,), their numbers, ascending.
        groups: int64 (M,), from 0; rows of one image have one group.
    """

    rows: NDArray[np.int64]
    groups: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


def find_repeated(keys: bytes | bytearray) -> Repeated:
    """The rows whose key comes more than once; `keys` are KEY_BYTES of each row, one after the other."""
    halves = np.frombuffer(keys, np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    in_order = halves[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    groups = np.cumsum(begins) - 1
    chosen = np.bincount(groups, minlength=1)[groups] > 1
    rows, (_, groups) = order[chosen], np.unique(groups[chosen], return_inverse=True)
    by_row = np.argsort(rows)
    return Repeated(rows[by_row].astype(np.int64), groups[by_row].astype(np.int64))


class GroupedSource:
    """A source whose rows of one image are merged into the first of them with usable captions.

    That row gets the captions that the others have and it has not. The others stay rows, so that each is accounted for:
    they are merged, duplicates (they add no caption), or one with too many captions for a sample. Rows whose captions
    or label cannot be used are left as they are.

    Args:
        source: the rows as they are.
        repeated: which of them to merge.
        say: captions and label of a row; raises BadSample.
        track: passes rows through and shows progress.
        file: temporary and empty; it gets the captions of the repeated rows.
    """

    may_repeat = False

    def __init__(
        self,
        source: Source,
        repeated: Repeated,
        *,
        say: Callable[[Row], Said],
        track: Callable[[Iterable[Row]], Iterable[Row]],
        file: IO[bytes],
    ) -> None:
        self._source = source
        self.root = source.root
        self.rows_at_most, self.rows_are_exact = source.rows_at_most, source.rows_are_exact
        self.classes, self.has_captions = source.classes, source.has_captions
        self._repeated = repeated
        self._ends = np.zeros(len(repeated) + 1, np.int64)  # row m's captions lie at ends[m]:ends[m + 1]; none: a fault
        self._first = np.full(int(repeated.groups.max()) + 1, -1, np.int64)  # of each group, as a place in `repeated`
        self._by_group = np.argsort(repeated.groups, kind="stable")
        self._begins = np.searchsorted(repeated.groups[self._by_group], np.arange(len(self._first) + 1))
        self._fates = np.zeros(len(repeated), np.uint8)
        self._file = file
        self._store_captions(say, track)

    def rows(self) -> Iterator[Row]:
        """All rows, merged. See `Source.rows`."""
        for row, place in self._places(self._source.rows()):
            if place is None or self._ends[place] == self._ends[place + 1]:
                yield row
                continue
            group = int(self._repeated.groups[place])
            first = int(self._first[group])
            yield self._with_all_captions(row, group) if place == first else self._follower(row, place, first)

    def describe(self) -> dict[str, Any]:
        """As the source that is merged. See `Source.describe`."""
        return self._source.describe()

    def _places(self, rows: Iterable[Row]) -> Iterator[tuple[Row, int | None]]:
        """Each row with its place in `repeated`, or None."""
        numbers, place = self._repeated.rows, 0
        for row in rows:
            if place < len(numbers) and numbers[place] == row.number:
                yield row, place
                place += 1
            else:
                yield row, None

    def _store_captions(self, say: Callable[[Row], Said], track: Callable[[Iterable[Row]], Iterable[Row]]) -> None:
        for row, place in self._places(track(self._source.rows())):
            if place is None:
                continue
            data, group = b"", self._repeated.groups[place]
            with suppress(BadSample):  # the examination of the row names its fault, and the writer the next one
                data = json.dumps(say(row), ensure_ascii=False).encode()
            if len(data) > MAX_CAPTION_BYTES:
                data = b""
            if data and self._first[group] < 0:
                self._first[group] = place
            self._file.write(data)
            self._ends[place + 1] = self._ends[place] + len(data)

    def _said(self, place: int) -> Said:
        self._file.seek(int(self._ends[place]))
        captions, label = json.loads(self._file.read(int(self._ends[place + 1] - self._ends[place])))
        return captions, label

    def _with_all_captions(self, row: Row, group: int) -> Row:
        """The first row of a group with the captions of the others, which get their fates."""
        places = [int(place) for place in self._by_group[self._begins[group] : self._begins[group + 1]]]
        captions, label = self._said(int(self._first[group]))
        known, added, size = set(captions), list[str](), _size(captions)
        losses: dict[Loss, str] = {}
        for place in places:
            if place == self._first[group] or self._ends[place] == self._ends[place + 1]:
                continue
            others, other_label = self._said(place)
            new = [caption for caption in dict.fromkeys(others) if caption not in known]
            size += _size(new)
            if other_label not in (label, None):
                detail = f"row {self._repeated.rows[place]} of the same image has label {excerpt(other_label)}"
                losses.setdefault(Loss.OTHER_LABEL, f"{detail}, and this one {excerpt(label)}")
            if new and size <= MAX_MERGED_BYTES:
                known.update(new)
                added += new
            self._fates[place] = DUPLICATE if not new else MERGED if size <= MAX_MERGED_BYTES else TOO_LONG
        return replace(row, more_captions=tuple(added), losses={**row.losses, **losses})

    def _follower(self, row: Row, place: int, first: int) -> Row:
        number, fault = int(self._repeated.rows[first]), None
        if self._fates[place] == DUPLICATE:
            fault = (Reason.DUPLICATE_IMAGE, f"the image of row {number} again, with no caption that is new")
        elif self._fates[place] == TOO_LONG:
            detail = f"the rows before it have given row {number} more than {MAX_MERGED_BYTES} bytes of captions"
            fault = (Reason.CAPTION_TOO_LONG, detail)
        image = row.image if isinstance(row.image, str) else None  # for the ledger; bytes are not needed any more
        return Row(row.number, row.place, image, merged_into=number, fault=fault)


def _size(captions: list[str]) -> int:
    """Bytes of captions in a sample's JSON."""
    return len(json.dumps(captions, ensure_ascii=False).encode())
