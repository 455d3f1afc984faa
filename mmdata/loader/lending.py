"""Things that are lent together with an object, and come back when the object is gone."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Lending(Generic[T]):
    """Remembers what was lent with which object, and which of these objects are gone.

    `weakref.finalize` runs Python code in whichever line the object dies. A Ctrl-C that arrives within such code is
    lost: Python reports that it ignores a KeyboardInterrupt, and the program goes on. A deque's `append` is C code, in
    which no signal is handled and which needs no lock.
    """

    def __init__(self) -> None:
        self._gone: deque[weakref.ref[object]] = deque()
        self._lent: dict[int, tuple[weakref.ref[object], T]] = {}

    def add(self, borrower: object, thing: T) -> None:
        """Lend `thing` for as long as `borrower` lives."""
        reference = weakref.ref(borrower, self._gone.append)
        self._lent[id(reference)] = (reference, thing)

    def returned(self) -> list[T]:
        """What has come back since the last call. Not to be called by two threads at once."""
        return [self._lent.pop(id(self._gone.popleft()))[1] for _ in range(len(self._gone))]
