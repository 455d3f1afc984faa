"""Batches in memory that two processes share. The memory has no name: it ends with the processes.

A batch is pickled without its arrays, which lie in the shared memory and are not copied on the way.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.errors import ConfigError
from mmdata.loader.workers.buffers import BufferPool, Lending

ALIGNMENT = 64
"""Arrays begin at a multiple of this many bytes, so that any dtype can be read in place."""
BLOCK = 2**16
"""Bytes. Sizes of buffers are rounded up to a multiple, so that batches of similar size can use the same buffers."""
REMEDY = (
    "raise the limit (`ulimit -n 65536` for files, the container's for memory), "
    "or set data.loading.worker_type to thread"
)


class Packed(NamedTuple):
    """A result in shared memory.

    Attributes:
        body: the result, pickled without its arrays.
        arrays: for each array the number of its buffer, where in it the array begins, and its size in bytes.
    """

    body: bytes
    arrays: list[tuple[int, int, int]]


class ExportedBuffers:
    """Buffers that a worker process fills and the training process maps. Thread-safe.

    Args:
        announce: tells the training process the number, the size and the descriptor of each new buffer.
    """

    def __init__(self, announce: Callable[[int, int, int], None]) -> None:
        self._announce = announce
        self._numbers = itertools.count()
        self._by_address: dict[int, int] = {}
        self._freed: deque[int] = deque()  # the training process still has them mapped

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes, freed with the array.

        Raises:
            ConfigError: no memory or file descriptor is left.
        """
        size = -(-size // BLOCK) * BLOCK
        number = next(self._numbers)
        try:
            file = anonymous_file(size)
            try:
                buffer = np.frombuffer(mmap.mmap(file, size), np.uint8)
                self._announce(number, size, file)
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigError(
                f"data.loading.worker_type process: no {size} bytes of shared memory: {error}; {REMEDY}"
            ) from error
        self._by_address[buffer.ctypes.data] = number
        weakref.finalize(buffer, self._free, buffer.ctypes.data).atexit = False
        return buffer

    def pack(self, result: object, pool: BufferPool) -> tuple[Packed, dict[int, object]]:
        """Put a result into shared memory.

        Args:
            result: an array at the beginning of a buffer, as the pixels are, is not copied.
            pool: lends one buffer of this memory for all other arrays: each buffer costs a file descriptor.

        Returns:
            The result, and for each of its buffers, by number, what keeps it from being lent again.
        """
        arrays: list[memoryview] = []
        body = io.BytesIO()
        _Pickler(body, 5, buffer_callback=lambda array: arrays.append(array.raw())).dump(result)
        numbers = [self._by_address.get(_address(array)) if array.nbytes else None for array in arrays]
        others = [_aligned(array) for array, number in zip(arrays, numbers, strict=True) if number is None]
        lent = pool.lend((max(1, sum(others)),))
        rest, values, end = self._by_address[lent.data_ptr()], lent.numpy(), 0
        kept: dict[int, object] = {rest: lent}
        places: list[tuple[int, int, int]] = []
        for array, number in zip(arrays, numbers, strict=True):
            if number is None:
                values[end : end + array.nbytes] = array
                places.append((rest, end, array.nbytes))
                end += _aligned(array)
            else:
                kept[number] = array
                places.append((number, 0, array.nbytes))
        return Packed(body.getvalue(), places), kept

    def freed(self) -> list[int]:
        """Numbers of the buffers that the training process can unmap since the last call."""
        return [self._freed.popleft() for _ in range(len(self._freed))]

    def _free(self, address: int) -> None:
        # A finalizer: the garbage collector may run it in any thread at any moment, so it must not wait for a lock.
        self._freed.append(self._by_address.pop(address))


class ImportedBuffers:
    """Buffers of a worker process, mapped into the training process."""

    def __init__(self) -> None:
        self._lending: Lending[int] = Lending()  # numbers; returned: released, and the worker process is not told yet
        self._buffers: dict[int, NDArray[np.uint8]] = {}

    def map(self, number: int, size: int, connection: Connection) -> None:
        """Map a buffer, whose descriptor comes next.

        Raises:
            ConfigError: no descriptor or address space is left.
        """
        try:
            file = recv_handle(connection)
            try:
                self._buffers[number] = np.frombuffer(mmap.mmap(file, size), np.uint8)
            finally:
                os.close(file)
        except ConnectionError:
            raise
        except (RuntimeError, OSError) as error:  # at the limit on open files the message comes without its descriptor
            raise ConfigError(
                f"data.loading.worker_type process: {size} bytes cannot be mapped in process {os.getpid()}, where too "
                f"many files may be open: {error}; {REMEDY}"
            ) from error

    def unmap(self, numbers: Iterable[int]) -> None:
        """Unmap buffers that the worker process has freed, once no tensor uses them."""
        for number in numbers:
            self._buffers.pop(number, None)

    def unpack(self, packed: Packed) -> Any:
        """The result; its arrays are views of shared memory. A buffer is released when the last of them is gone."""
        views: dict[int, NDArray[np.uint8]] = {}
        arrays: list[memoryview] = []
        for number, start, size in packed.arrays:
            if number not in views:
                views[number] = self._buffers[number][:]
                self._lending.add(views[number], number)
            # Of a memoryview: a slice of an array would keep the whole mapping alive, and not `views[number]`.
            arrays.append(memoryview(cast(Any, views[number]))[start : start + size])
        return pickle.loads(packed.body, buffers=arrays)

    def release_notice(self) -> tuple[list[int], int]:
        """What the worker process must know before it writes into its buffers again.

        Returns:
            Numbers of buffers that no tensor of this process uses any more, and the number of forks.
        """
        # A forked child shares the memory of its parent's batches: buffers in use at a fork must never be written
        # again. So the forks are counted after the buffers: a fork that had a buffer in use is then counted, too.
        return self._lending.returned(), forks[0]


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, which protocol 5 keeps out of the pickle."""

    def reducer_override(self, obj: object) -> Any:
        return (torch.from_numpy, (obj.numpy(),)) if isinstance(obj, Tensor) else NotImplemented


def _address(array: memoryview) -> int:
    return np.frombuffer(array, np.uint8).ctypes.data


def _aligned(array: memoryview) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


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


forks = [0]
"""How often this process has begun or ended a fork: what it receives between the two is in the child, too."""


def _count_fork() -> None:
    forks[0] += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)
