"""What workers are given and what they give: units of work that threads share, and the batch they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mmdata.batch import Batch
from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.stats import Stats

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Work(Generic[T]):
    """A result in units, which any thread may do, several at the same time.

    Attributes:
        units: each is to be called once, in any order. After one has raised, the others return immediately.
        finish: called once, when all units have returned; gives the result.
    """

    units: Sequence[Callable[[], None]]
    finish: Callable[[], T]

    def then(self, change: Callable[[T], U]) -> Work[U]:
        """The same work, with its result changed by the thread that finishes it."""
        return Work(self.units, lambda: change(self.finish()))

    def run(self) -> T:
        """Do all of it in the caller's thread."""
        for unit in self.units:
            unit()
        return self.finish()


@dataclass(frozen=True)
class LoadedBatch:
    """A batch, the rows of it that are masked, and the clock of the workers that made it."""

    batch: Batch
    masked: list[LedgerEntry]
    stats: Stats


class BatchSource(Protocol):
    """Whoever makes a loader's batches: threads, worker processes, or threads that hand over to processes.

    A source makes batches ahead, in the order of the plan, from one epoch into the next.
    """

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on; those that were made ahead are dropped."""
        ...

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """Wait for the next batch, which is that of the given step.

        Raises:
            LoadError, DataError, ConfigError: see `BatchBuilder`.
        """
        ...

    def stop(self) -> None:
        """Make no more, and drop what was made; `begin` goes on."""
        ...

    def close(self) -> None:
        """Stop, and end threads and processes; `begin` starts them again."""
        ...
