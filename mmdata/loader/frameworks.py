"""What loops and tools that we did not write find on a Loader or a Stream: the epoch is told, copies are refused.

Nothing here knows how batches are made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import NoReturn, SupportsIndex, TypeVar

from typing_extensions import Self

T = TypeVar("T")


class Interoperable(ABC):
    """A Loader or a Stream, as others see it."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch."""

    @abstractmethod
    def close(self) -> None:
        """End the workers and drop what they made ahead. Iterating again starts others."""

    def __enter__(self) -> Self:
        """`with loader:` closes it at the end."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    @property
    def batch_sampler(self) -> EpochSampler:
        """Tells Lightning how to set the epoch; it samples nothing.

        Lightning calls `batch_sampler.sampler.set_epoch` before each epoch. Without it a run that resumes at the end of
        an epoch would begin again with the first, and one with `limit_train_batches` would never leave the first.
        """
        return EpochSampler(self.set_epoch)

    @property
    def dataset(self) -> NoReturn:
        """There is none; says what to do instead to those who ask, as `accelerate.skip_first_batches` does."""
        raise AttributeError(
            f"a {type(self).__name__} is no torch DataLoader and has no `dataset`: {self._how_to_skip()}"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse `copy`, `deepcopy` and `pickle`."""
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} cannot be copied or pickled: it has threads, open files and the position of one rank. Make "
            f"another from the same settings, in the process that uses it ({self._how_to_make()}), and give it the "
            "position with load_state_dict(state_dict())"
        )

    @abstractmethod
    def _how_to_skip(self) -> str:
        """How to leave out the first batches of an epoch."""

    @abstractmethod
    def _how_to_make(self) -> str:
        """How another one is made."""


class EpochSampler:
    """Stands where loops look for a sampler to set the epoch of.

    It is found as `batch_sampler.sampler` and not as `sampler`: of a loader with a `sampler` Lightning says under
    `overfit_batches` that it has turned the shuffling off, which it does for DataLoaders only.

    Args:
        set_epoch: called with the epoch that begins.
    """

    def __init__(self, set_epoch: Callable[[int], None]) -> None:
        self.set_epoch = set_epoch

    @property
    def sampler(self) -> EpochSampler:
        """This one."""
        return self


class Iteration(Iterator[T]):
    """The batches of one iteration over a Loader or a Stream. Closed, or dropped, it ends.

    Args:
        batches: makes them.
        of: "loader" or "stream".
    """

    def __init__(self, batches: Generator[T], *, of: str) -> None:
        self._batches = batches
        self._of = of

    def __next__(self) -> T:
        """The next batch."""
        return next(self._batches)

    def close(self) -> None:
        """End here; no thread is left at work for it."""
        self._batches.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse `copy`, `deepcopy` and `pickle`."""
        raise TypeError(
            f"an iteration over a {self._of} cannot be copied or pickled: its position is that of the {self._of}; "
            f"take the {self._of}'s state_dict() and load it into another {self._of}"
        )
