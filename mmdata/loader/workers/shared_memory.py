"""Memory that two processes share, and the messages about it. The memory has no name: it ends with the processes."""

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
from mmdata.loader.lending import Lending
from mmdata.loader.stats import Stats
from mmdata.loader.work import LoadedBatch
from mmdata.loader.workers.channel import REMEDY

ALIGNMENT = 64
"""Arrays begin at a multiple of this many bytes, so that any dtype can be read in place."""
BLOCK = 2**16
"""Bytes. Sizes of buffers are rounded up to a multiple, so that batches of similar size can use the same buffers."""


@dataclass(frozen=True)
class _Buffer:
    number: int
    size: int
    file: int


class ExportedBuffers:
    """Buffers that a worker process allocates and the training process maps, each with a number. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._by_address: dict[int, _Buffer] = {}
        self._announced: set[int] = set()
        self._freed: deque[int] = deque()  # announced, then freed; the training process still has them mapped

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes, freed with the array.

        Raises:
            ConfigError: no memory or file descriptor is left.
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
        self._by_address[address] = _Buffer(next(self._numbers), size, file)
        weakref.finalize(buffer, self._free, address).atexit = False
        return buffer

    def number(self, tensor: Tensor) -> int | None:
        """Number of the shared buffer at this tensor's address; None if it is not in shared memory."""
        buffer = self._by_address.get(tensor.data_ptr())
        return None if buffer is None else buffer.number

    def announce(self, tensors: list[Tensor]) -> tuple[dict[str, Any], list[int]]:
        """What the training process must know before it reads these tensors, each at the beginning of a buffer.

        Returns:
            `buffers`, (number, size) of those that it has not mapped yet, and `freed`, numbers that it can unmap; the
            descriptors of `buffers`.
        """
        buffers = [self._by_address[tensor.data_ptr()] for tensor in tensors]
        new = [buffer for buffer in buffers if buffer.number not in self._announced]
        self._announced.update(buffer.number for buffer in new)
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        return {"buffers": [(buffer.number, buffer.size) for buffer in new], "freed": freed}, [b.file for b in new]

    def _free(self, address: int) -> None:
        # A finalizer: the garbage collector may run it in any thread at any moment, so it must not wait for a lock.
        buffer = self._by_address.pop(address)
        os.close(buffer.file)
        if buffer.number in self._announced:
            self._announced.remove(buffer.number)
            self._freed.append(buffer.number)


class ImportedBuffers:
    """Buffers of a worker process, mapped into the training process."""

    def __init__(self) -> None:
        self._lending: Lending[int] = Lending()  # numbers; returned: released, and the worker process is not told yet
        self._buffers: dict[int, NDArray[np.uint8]] = {}

    def add(self, number: int, size: int, file: int) -> None:
        """Map a buffer, and close its descriptor.

        Raises:
            ConfigError: no descriptor or address space is left.
        """
        try:
            self._buffers[number] = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except OSError as error:
            raise ConfigError(
                f"data.loading.worker_type process: {size} bytes cannot be mapped: {error}; {REMEDY}"
            ) from error
        finally:
            os.close(file)

    def unmap(self, number: int) -> None:
        """Unmap a buffer that the worker process has freed, once no tensor uses it."""
        self._buffers.pop(number, None)

    def view(self, number: int) -> NDArray[np.uint8]:
        """A buffer's bytes; the buffer is released when the last tensor of them is gone."""
        view = self._buffers[number][:]
        self._lending.add(view, number)
        return view

    def release_notice(self) -> dict[str, Any]:
        """What the worker process must know before it writes into its buffers again.

        Returns:
            `released`: numbers of buffers that no tensor of this process uses any more. `forks`: how often this process
            has forked.
        """
        # A forked child shares the memory of its parent's batches: buffers in use at a fork must never be written
        # again. So the count of a fork must reach the worker process no later than the release of such a buffer, and
        # the lock keeps other threads from forking between the two lines.
        with forks.lock:
            return {"released": self._lending.returned(), "forks": forks.count}


@dataclass(frozen=True)
class Packed:
    """A batch in shared memory.

    Attributes:
        message: entries of the batch, and where its tensors are, as JSON.
        buffers: for each buffer of the batch a tensor at its beginning.
    """

    message: dict[str, Any]
    buffers: list[Tensor]


def to_shared(made: LoadedBatch, memory: ExportedBuffers, pool: BufferPool) -> Packed:
    """Put a batch into shared memory; tensors that are there already, as the pixels are, are not copied.

    Args:
        made: the batch.
        memory: allocates the shared buffers.
        pool: lends a buffer of that memory for the other tensors.
    """
    tensors = {key: value for key, value in made.batch.items() if isinstance(value, Tensor)}
    others = {key: value for key, value in made.batch.items() if key not in tensors}
    shared = {key: tensor for key, tensor in tensors.items() if memory.number(tensor) is not None}
    small = {key: tensor for key, tensor in tensors.items() if key not in shared}
    # All small tensors go into one buffer, one after the other: a buffer costs a file descriptor.
    starts = [0, *itertools.accumulate(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in small.values())]
    buffer = pool.lend((starts[-1],))
    places = {key: (memory.number(tensor), 0) for key, tensor in shared.items()}
    for (key, tensor), start in zip(small.items(), starts, strict=False):
        buffer[start : start + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        places[key] = (memory.number(buffer), start)
    arrays = {
        key: [*places[key], str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for key, tensor in tensors.items()
    }
    masked, stats = [asdict(entry) for entry in made.masked], asdict(made.stats)
    message = {"arrays": arrays, "others": others, "masked": masked, "stats": stats, "mark": made.mark}
    return Packed(message, [*shared.values(), buffer])


def from_shared(message: dict[str, Any], memory: ImportedBuffers) -> LoadedBatch:
    """The batch that `to_shared` described; its tensors are views of shared memory, each with a storage of its own."""
    batch: dict[str, Any] = {}
    views: dict[int, NDArray[np.uint8]] = {}
    for key, (number, start, dtype, shape) in message["arrays"].items():
        if number not in views:
            views[number] = memory.view(number)
        count = int(np.prod(shape, dtype=np.int64))
        # Made from a memoryview: a slice of an array keeps the whole mapping alive, not `views[number]`, and the buffer
        # is released when `views[number]` is collected.
        array = np.frombuffer(memoryview(cast(Any, views[number])), np.dtype(dtype), count, start)
        batch[key] = torch.from_numpy(array).view(shape)
    batch.update(message["others"])
    masked = [LedgerEntry(**entry) for entry in message["masked"]]
    return LoadedBatch(cast(Batch, batch), masked, Stats(**message["stats"]), message["mark"])


def anonymous_file(size: int) -> int:
    """Descriptor of `size` bytes without a name: memory on Linux, on other systems a deleted temporary file."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("mmdata", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    try:
        os.ftruncate(file, size)
        if hasattr(os, "posix_fallocate"):
            # Where memory is full this raises an OSError; a write to pages that do not exist would be a SIGBUS.
            os.posix_fallocate(file, 0, size)
    except BaseException:
        os.close(file)
        raise
    return file


class Forks:
    """Counts the forks of this process.

    Attributes:
        count: forks so far, one in progress included.
        lock: while a thread holds it, no other thread forks.
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
