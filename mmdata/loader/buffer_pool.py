"""Memory for the pixels of batches, used again as soon as a batch is gone.

A batch may be kept for as long as its user likes: its memory comes back when the last tensor that shares it is gone.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def own_memory(size: int) -> NDArray[np.uint8]:
    """Bytes of this process."""
    return np.empty(size, np.uint8)


class BufferPool:
    """Lends uint8 tensors. Safe to use from many threads.

    Allocating a batch anew would cost a page fault for every 4 KiB of it, about as much time as copying it.

    Args:
        allocate: gives so many bytes or more.
    """

    def __init__(self, allocate: Callable[[int], NDArray[np.uint8]] = own_memory) -> None:
        self._allocate = allocate
        self._free: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def forget_lent(self) -> None:
        """Never lend again what is lent now: it is freed when the last tensor that shares it is gone."""
        with self._lock:
            self._free = self._free.copy()  # what is lent comes back to the old list, which goes with the last of it

    def lend(self, shape: tuple[int, ...]) -> Tensor:
        """A uint8 tensor of the given shape; what it holds is arbitrary."""
        size = math.prod(shape)
        with self._lock:
            fitting = [i for i, buffer in enumerate(self._free) if buffer.size >= size]
            buffer = self._free.pop(fitting[-1]) if fitting else None
            if buffer is None and self._free:
                self._free.pop()  # too small: replaced by a larger one, so that the ring does not grow
        if buffer is None:
            buffer = self._allocate(size)
        # The tensor's storage keeps this view alive, and the view's end is the sign that no tensor shares it any more.
        view = buffer[:size]
        # The garbage collector may run it at any moment, in the midst of `lend` too: it must not wait for the lock.
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return torch.from_numpy(view).view(shape)
