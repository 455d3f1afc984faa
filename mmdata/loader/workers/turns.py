"""A generator that threads share. Closing it is right at any moment, also while another thread is inside it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

EXECUTING = "generator already executing"
"""What Python says where another thread is inside a generator, or closes it."""


class Turns(Generic[T], Iterator[T]):
    """What a generator gives, to one thread at a time.

    A generator that is closed while another thread executes it raises "ValueError: generator already executing", and
    whoever closes it cannot know: an interrupt may come between the start of a thread and the line that notes it.
    Here such a call leaves word, and the thread that is inside closes the generator when it comes out.

    Args:
        source: used by nobody else.
    """

    def __init__(self, source: Generator[T, None, None]) -> None:
        self._source = source
        self._inside = threading.Lock()
        self._closed = False

    def __next__(self) -> T:
        """The next one; waits for the thread that is inside. Raises StopIteration at the end, and when closed."""
        try:
            with self._inside:
                if self._closed:
                    raise StopIteration
                return next(self._source)
        except ValueError as error:
            if str(error) != EXECUTING:
                raise
            raise StopIteration from None  # it is being closed, since the line that looked whether it is
        finally:
            if self._closed:
                self.close()

    def close(self) -> None:
        """Give no more, and close the generator; waits for nothing."""
        self._closed = True
        try:
            self._source.close()
        except ValueError as error:
            # A lock that is tried would not do: an interrupt may come between its success and the line that notes it.
            if str(error) != EXECUTING:
                raise
