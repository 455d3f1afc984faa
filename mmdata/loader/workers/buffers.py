"""Memory for batches, used again when a batch is gone.

A batch may be kept for as long as the user likes: its memory comes back when the last tensor that shares it is gone.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.processes import new_lock

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


class BufferPool:
    """Lends uint8 tensors. Thread-safe.

    To allocate a batch anew would cost a page fault for every 4 KiB, about as much time as to copy the batch.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._lending: Lending[NDArray[np.uint8]] = Lending()
        self._lock = new_lock()

    def lend(self, shape: tuple[int, ...]) -> Tensor:
        """A uint8 tensor of the given shape, with arbitrary content."""
        size = math.prod(shape)
        with self._lock:
            self._free += self._lending.returned()
            fitting = [i for i, buffer in enumerate(self._free) if buffer.size >= size]
            buffer = self._free.pop(fitting[-1]) if fitting else None
            if buffer is None and self._free:
                # All free buffers are too small. Drop one for the larger one, so that the number of buffers stays.
                self._free.pop()
        if buffer is None:
            buffer = np.empty(size, np.uint8)
        # The tensor's storage keeps this view alive: when the view is collected, no tensor shares the memory any more.
        view = buffer[:size]
        self._lending.add(view, buffer)
        return torch.from_numpy(view).view(shape)
