"""Memory that two processes share, and messages about it. Nothing of it has a name: it ends with the processes."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import ConfigError
from mmdata.loader.buffer_pool import BufferPool
from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.stats import Stats
from mmdata.loader.work import LoadedBatch
from mmdata.loader.workers.channel import REMEDY

ALIGNMENT = 64
"""Bytes at a multiple of which an array begins."""
BLOCK = 2**16
"""Buffers are a multiple of so many bytes: batches of about one size then fit into each other's."""


@dataclass(frozen=True)
class _Buffer:
    number: int
    size: int
    file: int


class ExportedBuffers:
    """Buffers of this process that another one maps, each with a number. Safe to use from many threads.

    Attributes:
        removed: numbers of buffers that are gone, and that the other process does not know to be.
    """

    def __init__(self) -> None:
        self.removed: deque[int] = deque()
        self._numbers = itertools.count()
        self._at: dict[int, _Buffer] = {}  # by address
        self._told: set[int] = set()

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes; they are gone with the array.

        Raises:
            ConfigError: no memory, or no descriptor, is left.
        """
        size = -(-size // BLOCK) * BLOCK
        try:
            file = anonymous_file(size)
            try:
                buffer = np.frombuffer(mmap.mmap(file, size), np.uint8)
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            raise ConfigError(
                f"data.loading.worker_type process: no {size} bytes of shared memory: {error}; {REMEDY}"
            ) from error
        address = buffer.ctypes.data
        self._at[address] = _Buffer(next(self._numbers), size, file)
        weakref.finalize(buffer, self._remove, address).atexit = False
        return buffer

    def number(self, tensor: Tensor) -> int | None:
        """Of the buffer that a tensor begins at; None: it lies elsewhere."""
        buffer = self._at.get(tensor.data_ptr())
        return None if buffer is None else buffer.number

    def untold(self, tensor: Tensor) -> tuple[int, int, int] | None:
        """(number, size, descriptor) of a tensor's buffer, when asked for the first time."""
        buffer = self._at[tensor.data_ptr()]
        if buffer.number in self._told:
            return None
        self._told.add(buffer.number)
        return buffer.number, buffer.size, buffer.file

    def _remove(self, address: int) -> None:
        """May run at any moment, when the garbage collector does: it waits for nothing."""
        buffer = self._at.pop(address)
        os.close(buffer.file)
        if buffer.number in self._told:
            self._told.remove(buffer.number)
            self.removed.append(buffer.number)


class ImportedBuffers:
    """Buffers of another process."""

    def __init__(self) -> None:
        self._dropped: deque[int] = deque()  # that the other process does not know of
        self._buffers: dict[int, NDArray[np.uint8]] = {}

    def add(self, number: int, size: int, file: int) -> None:
        """Map a buffer; closes its descriptor.

        Raises:
            ConfigError: no descriptor, or no room for a mapping, is left.
        """
        try:
            self._buffers[number] = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except OSError as error:
            raise ConfigError(
                f"data.loading.worker_type process: {size} bytes cannot be mapped: {error}; {REMEDY}"
            ) from error
        finally:
            os.close(file)

    def forget(self, number: int) -> None:
        """The other process has given a buffer up; what still looks at it here keeps it."""
        self._buffers.pop(number, None)

    def view(self, number: int) -> NDArray[np.uint8]:
        """A buffer's bytes; its number is dropped once nothing looks at them any more."""
        view = self._buffers[number][:]
        weakref.finalize(view, self._dropped.append, number).atexit = False
        return view

    def news(self) -> dict[str, Any]:
        """What the other process is to know.

        Returns:
            dropped: numbers of buffers that nothing here looks at any more; forks: how often this process has forked.
            A child's batches lie in the same memory: what was lent at a fork must not be written again, and the
            count of that fork comes no later than the numbers of what was lent then.
        """
        with forks.lock:
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            return {"dropped": dropped, "forks": forks.count}


@dataclass(frozen=True)
class Packed:
    """A batch in shared memory.

    Attributes:
        message: what it holds, and where.
        buffers: tensors at the beginning of the buffers that it lies in.
    """

    message: dict[str, Any]
    buffers: list[Tensor]


def to_shared(made: LoadedBatch, memory: ExportedBuffers, ring: BufferPool) -> Packed:
    """Put a batch into shared memory; what lies there already is not copied.

    Args:
        made: the batch.
        memory: where its pixels lie.
        ring: lends more of that memory, for all else.
    """
    tensors = {key: value for key, value in made.batch.items() if isinstance(value, Tensor)}
    others = {key: value for key, value in made.batch.items() if key not in tensors}
    buffers = [tensor for tensor in tensors.values() if memory.number(tensor) is not None]
    elsewhere = {key: tensor for key, tensor in tensors.items() if memory.number(tensor) is None}
    starts = [0, *itertools.accumulate(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in elsewhere.values())]
    room = ring.lend((starts[-1],))
    buffers.append(room)
    places = {key: (memory.number(tensor), 0) for key, tensor in tensors.items() if key not in elsewhere}
    for (key, tensor), start in zip(elsewhere.items(), starts, strict=False):
        room[start : start + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        places[key] = (memory.number(room), start)
    arrays = {
        key: [*places[key], str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for key, tensor in tensors.items()
    }
    masked, stats = [asdict(entry) for entry in made.masked], asdict(made.stats)
    return Packed({"arrays": arrays, "others": others, "masked": masked, "stats": stats}, buffers)


def from_shared(message: dict[str, Any], memory: ImportedBuffers) -> LoadedBatch:
    """The batch that `to_shared` described; its tensors are views of shared memory, each with a storage of its own."""
    batch: dict[str, Any] = {}
    views: dict[int, NDArray[np.uint8]] = {}
    for key, (number, start, dtype, shape) in message["arrays"].items():
        if number not in views:
            views[number] = memory.view(number)
        count = int(np.prod(shape, dtype=np.int64))
        # Of an array's array NumPy would keep the buffer alive, and not the view of it.
        array = np.frombuffer(memoryview(cast(Any, views[number])), np.dtype(dtype), count, start)
        batch[key] = torch.from_numpy(array).view(shape)
    batch.update(message["others"])
    masked = [LedgerEntry(**entry) for entry in message["masked"]]
    return LoadedBatch(cast(Batch, batch), masked, Stats(**message["stats"]))


def anonymous_file(size: int) -> int:
    """A descriptor of memory without a name: in RAM on Linux, elsewhere of a temporary file that is deleted at once."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("mmdata", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    try:
        os.ftruncate(file, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)  # no room: an error here, where a write would end the process later
    except BaseException:
        os.close(file)
        raise
    return file


class Forks:
    """Counts forks, from the moment it is made.

    Attributes:
        count: of forks that have happened or are just about to.
        lock: while a thread holds it, no other one forks.
    """

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before, after_in_parent=self.lock.release, after_in_child=self.lock.release
            )

    def _before(self) -> None:
        self.lock.acquire()
        self.count += 1


forks = Forks()
"""Of this process."""
