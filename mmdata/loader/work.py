"""Work that threads share, the batch that comes of it, and the protocol of what makes a loader's batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from mmdata.batch import Batch
from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.stats import Stats

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Work(Generic[T]):
    """Work in units, which threads may do concurrently.

    Attributes:
        units: each is called once, in any order. After one has raised, the others return immediately.
        finish: called once, when all units have returned; returns the result.
    """

    units: Sequence[Callable[[], None]]
    finish: Callable[[], T]

    def then(self, change: Callable[[T], U]) -> Work[U]:
        """The same work; the thread that finishes it changes the result."""
        return Work(self.units, lambda: change(self.finish()))

    def run(self) -> T:
        """Do all of it in the caller's thread."""
        for unit in self.units:
            unit()
        return self.finish()


@dataclass(frozen=True)
class LoadedBatch:
    """A batch, its masked rows, the clock of the workers that made it, and the mark of its step."""

    batch: Batch
    masked: list[LedgerEntry]
    stats: Stats
    mark: dict[str, Any] | None = None


class BatchSource(Protocol):
    """Makes a loader's batches: threads, worker processes, or threads that hand over to processes.

    A source prefetches batches in the order of the plan, from one epoch into the next.
    """

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on; drops prefetched batches."""
        ...

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """Wait for the next batch, which is that of the given step.

        Raises:
            LoadError, DataError, ConfigError: see `BatchBuilder`.
        """
        ...

    def stop(self) -> None:
        """Make no more batches, and drop those that were made; `begin` starts again."""
        ...

    def close(self) -> None:
        """Stop, and end threads and processes; `begin` starts others."""
        ...
