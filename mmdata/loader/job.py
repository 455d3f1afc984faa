"""A piece of work in units, which threads share: any unit may be done by any thread, several at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Job(Generic[T]):
    """A batch in progress.

    Attributes:
        units: each is to be called once, in any order. After one has raised, the others return at once.
        finish: called once, when all units have returned; gives the result.
    """

    units: Sequence[Callable[[], None]]
    finish: Callable[[], T]

    def then(self, change: Callable[[T], U]) -> Job[U]:
        """The same work, and its result changed by the thread that finishes it."""
        return Job(self.units, lambda: change(self.finish()))

    def run(self) -> T:
        """Do it all, in the caller's thread."""
        for unit in self.units:
            unit()
        return self.finish()
