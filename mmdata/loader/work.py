"""A piece of work in units, which threads share: any unit may be done by any thread, several at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mmdata.batch import Batch
from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.stats import Stats
from mmdata.plan import Bucket

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Work(Generic[T]):
    """A batch in progress.

    Attributes:
        units: each is to be called once, in any order. After one has raised, the others return at once.
        finish: called once, when all units have returned; gives the result.
    """

    units: Sequence[Callable[[], None]]
    finish: Callable[[], T]

    def then(self, change: Callable[[T], U]) -> Work[U]:
        """The same work, and its result changed by the thread that finishes it."""
        return Work(self.units, lambda: change(self.finish()))

    def run(self) -> T:
        """Do it all, in the caller's thread."""
        for unit in self.units:
            unit()
        return self.finish()


@dataclass(frozen=True)
class Task:
    """One rank's part of one step.

    Attributes:
        epoch, step: which.
        bucket: shape of the batch.
        rows: int64 (B,), -1 where the batch is filled up.
        passes: int64 (B,), which pass over its dataset each row is in: decides its caption and its crop.
    """

    epoch: int
    step: int
    bucket: Bucket
    rows: NDArray[np.int64]
    passes: NDArray[np.int64]


@dataclass(frozen=True)
class LoadedBatch:
    """A batch, and what happened while it was made."""

    batch: Batch
    masked: list[LedgerEntry]
    stats: Stats
