"""Examines a row as a conversion does, and keeps of it what a prediction needs: some numbers, and no image."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmdata.convert.row.examine import Examiner, Outcome
from mmdata.convert.sources.rows import InputRow, has_url
from mmdata.convert.units.unit import part_of
from mmdata.errors import BadSample, Reason
from mmdata.tars.write import members_of, size_in_tar


@dataclass(frozen=True)
class SampledRow:
    """What was seen of a row.

    Attributes:
        number: of the row.
        place: of the row in the source, for people.
        path: of its image, or the URL.
        fault: reason and detail if the row cannot be used.
        into: number of the row that takes its captions; None for a row of its own.
        part: 0 for training, 1 for validation.
        bytes: that its sample takes in a tar.
        tokens: of each of its captions.
        cpu_s: seconds of CPU that examining it took.
        is_url: whether its image is behind a URL.
        was_fetched: whether that image was had.
    """

    number: int
    place: str
    path: str
    fault: tuple[Reason, str] | None
    into: int | None
    part: int
    bytes: int
    tokens: tuple[int, ...]
    cpu_s: float
    is_url: bool
    was_fetched: bool

    @property
    def is_written(self) -> bool:
        """Whether the row's sample is written, unless its image is a duplicate."""
        return self.fault is None and self.into is None


@dataclass(frozen=True)
class RowLook:
    """Looks at rows.

    Args:
        examiner: of the conversion.
        val_share: of the conversion.
        count: counts tokens of captions; None counts none.
    """

    examiner: Examiner
    val_share: float | None
    count: Callable[[Sequence[str]], list[int]] | None

    def __call__(self, row: InputRow) -> SampledRow:
        """Look at one row."""
        began = time.thread_time()
        examined = self.examiner(row)
        fault, size, tokens = examined.fault, 0, list[int]()
        if examined.sample is not None and fault is None:
            try:
                size = _size(examined)
            except BadSample as bad:
                fault = bad.reason, bad.detail
            tokens = self.count(examined.sample.captions) if self.count else tokens
        return SampledRow(
            number=row.number,
            place=row.place,
            path=examined.path,
            fault=fault,
            into=row.merged_into,
            part=part_of(examined.digest, self.val_share),
            bytes=size,
            tokens=tuple(tokens),
            cpu_s=time.thread_time() - began,
            is_url=bool(row.url) or ("://" in examined.path and has_url(replace(row, fault=None))),
            was_fetched=bool(row.url),
        )


def _size(examined: Outcome) -> int:
    """Bytes of a sample in a tar; its members are hashed, as when they are written."""
    assert examined.sample is not None
    label = examined.label if isinstance(examined.label, int) else None if examined.label is None else 0
    members = members_of(replace(examined.sample, label=label))
    for _, data in members:
        hashlib.sha256(data)
    return size_in_tar(members)
