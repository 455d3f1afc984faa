"""Rows without shards: a plan needs no more than their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from mmdata.plan import BucketPolicy, Hashes, Rows, Shapes
from mmdata.tables.selection import Selection


class FakeRows(Rows):
    """Rows of shards of given sizes; caption e of a row, in epoch e, is `lengths[e % len(lengths)]` tokens long."""

    def __init__(
        self,
        sizes: Sequence[int],
        *lengths: Sequence[int],
        height: Sequence[int] | None = None,
        width: Sequence[int] | None = None,
        boxes: Sequence[int] | None = None,
    ) -> None:
        self.starts = np.cumsum([0, *sizes]).astype(np.int64)
        self.count = int(self.starts[-1])
        self.lengths = [np.asarray(values, np.int64) for values in lengths or [np.ones(self.count)]]
        self.height = np.full(self.count, 64) if height is None else np.asarray(height)
        self.width = np.full(self.count, 64) if width is None else np.asarray(width)
        self.boxes = np.zeros(self.count, np.int64) if boxes is None else np.asarray(boxes)
        self.fingerprint = f"{sizes}"
        self.image_hash = self.caption_hash = np.arange(self.count)
        self.selection: Selection | None = None
        self.asked: list[NDArray[np.int64]] = []

    def shapes(self, rows: NDArray[np.int64], epoch: int) -> Shapes:
        self.asked.append(rows)
        lengths = self.lengths[epoch % len(self.lengths)]
        return Shapes(lengths[rows], self.height[rows], self.width[rows], self.boxes[rows])

    def hashes(self, rows: NDArray[np.int64], passes: NDArray[np.int64]) -> Hashes:
        return Hashes(self.image_hash[rows], self.caption_hash[rows])

    def bucket_counts(self, policy: BucketPolicy, epoch: int, shards: NDArray[np.int64]) -> NDArray[np.int64]:
        asked = len(self.asked)
        counts = super().bucket_counts(policy, epoch, shards)
        del self.asked[asked:]  # what is asked for the rows of windows is what tests look at
        return counts


def shapes(*rows: tuple[int, ...]) -> Shapes:
    """Shapes from (length, height, width) or (length, height, width, boxes) rows."""
    return Shapes(*np.array([(*row, 0)[:4] for row in rows], np.int64).reshape(-1, 4).T)


@pytest.fixture(scope="session")
def fake_rows():
    """`fake_rows([4, 0, 3], lengths, …, height=None, width=None, boxes=None)`: 7 rows in three shards."""
    return FakeRows
