"""What workers do: the steps of a pipeline, each as work in units; and what a loader asks of its workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
U = TypeVar("U")
Made = TypeVar("Made", covariant=True)


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


class Pipeline(Protocol[T]):
    """The steps of one rank, and how each becomes a batch.

    Attributes:
        current_epoch: the epoch of the batches that the caller takes.
    """

    current_epoch: int

    def steps(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """The steps from step `start` of an epoch on, and those of the next epochs, until an epoch has no steps."""
        ...

    def begin(self, step: Any, stop: Event | None = None) -> Work[T]:
        """The work on a step. Its units raise Interrupted once `stop` is set."""
        ...

    def identity(self) -> dict[str, Any]:
        """What the batches depend on."""
        ...


class BatchSource(Protocol[Made]):
    """Makes a loader's batches ahead, in the order of the plan, from one epoch into the next."""

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on; drops those that were made."""
        ...

    def take(self, epoch: int, step: int) -> Made:
        """Wait for the next batch, which is that of the given step; raises what its worker raised."""
        ...

    def stop(self) -> None:
        """Make no more batches, and drop those that were made; `begin` starts again."""
        ...

    def close(self) -> None:
        """Stop, and end threads and processes; `begin` starts others."""
        ...
