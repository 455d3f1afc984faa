"""Batches in memory that two processes share. The memory has no name: it ends with the processes.

The training process owns the memory: it sends a file in memory with each request, and the worker process copies the
batch into it. The file is used again when no tensor of the training process uses it any more.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
import weakref
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.errors import ConfigError
from mmdata.loader.workers.buffers import Lending
from mmdata.system import IS_POSIX

ALIGNMENT = 64
"""Arrays begin at a multiple of this many bytes, so that any dtype can be read in place."""
REMEDY = (
    "raise the limit (`ulimit -n 65536` for files, the container's for memory), or set data.loading.num_processes to 0"
)

Span = tuple[int, int]
"""Where an array begins in a file, and its size, in bytes."""


class SharedBuffer:
    """A file in memory, which another process fills.

    Attributes:
        file: its descriptor.
        memory: what this process has mapped of it.
    """

    def __init__(self) -> None:
        self.file = anonymous_file()
        self.memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        weakref.finalize(self, os.close, self.file).atexit = False

    def map(self, size: int) -> None:
        """Map at least `size` bytes."""
        if self.memory.size < size:
            self.memory = np.frombuffer(mmap.mmap(self.file, size), np.uint8)


class SharedBuffers:
    """The buffers that a worker process fills for this process, each used again when its batch is gone."""

    def __init__(self) -> None:
        self._free: list[SharedBuffer] = []
        self._lending: Lending[SharedBuffer] = Lending()
        self._forks = forks[0]

    def take(self) -> SharedBuffer:
        """A buffer that no tensor uses; raises an OSError where no file can be opened."""
        returned = self._lending.returned()
        # A forked child shares the memory of its parent's batches: buffers in use at a fork must never be written
        # again. So the forks are counted after the buffers: a fork that had a buffer in use is then counted, too.
        if self._forks == forks[0]:
            self._free += returned
        else:
            self._forks, self._lending = forks[0], Lending()
        return self._free.pop() if self._free else SharedBuffer()

    def give_back(self, buffer: SharedBuffer) -> None:
        """Use a buffer again of which nothing was read."""
        self._free.append(buffer)

    def read(self, buffer: SharedBuffer, body: bytes, spans: list[Span]) -> Any:
        """What `write` has written into a buffer, which is in use until the largest array of it is gone.

        The largest array, that of the pixels, is not copied. The others are, so that whoever keeps the labels of all
        batches does not keep their pixels. Raises an OSError where no memory can be mapped.
        """
        buffer.map(max(start + size for start, size in spans))
        # A new array: the buffer comes back when it is gone. A slice of an array would keep the whole mapping alive,
        # and not this one: so the pixels are a slice of a memoryview.
        borrower = buffer.memory[:]
        self._lending.add(borrower, buffer)
        view = memoryview(cast(Any, borrower))
        parts = [view[start : start + size] for start, size in spans]
        largest = max(parts, key=len)
        return pickle.loads(body, buffers=[part if part is largest else bytearray(part) for part in parts])


def write(result: object, file: int) -> tuple[bytes, list[Span]]:
    """Write the arrays of a result into a buffer.

    Returns:
        The result, pickled without its arrays, and where each of these lies.

    Raises:
        ConfigError: no memory is left.
    """
    arrays: list[memoryview] = []
    body = io.BytesIO()
    _Pickler(body, 5, buffer_callback=lambda array: arrays.append(array.raw())).dump(result)
    spans: list[Span] = []
    try:
        with open(file, "wb", closefd=False) as stream:
            stream.seek(0)  # the position is that of the process that opened the file, and moves with each batch
            for array in arrays:
                stream.write(bytes(-stream.tell() % ALIGNMENT))
                spans.append((stream.tell(), array.nbytes))
                stream.write(array)
    except OSError as error:
        raise out_of_memory(error) from error
    return body.getvalue(), spans


def out_of_memory(error: Exception) -> ConfigError:
    """The error for want of shared memory or of descriptors."""
    return ConfigError(
        f"data.loading.num_processes: no shared memory in process {os.getpid()}, where too many files may be "
        f"open: {error}; {REMEDY}"
    )


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, which protocol 5 keeps out of the pickle."""

    def reducer_override(self, obj: object) -> Any:
        return (torch.from_numpy, (obj.numpy(),)) if isinstance(obj, Tensor) else NotImplemented


def anonymous_file() -> int:
    """Descriptor of a file without a name: memory on Linux, on other systems a deleted temporary file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mmdata", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as temporary:
        return os.dup(temporary.fileno())


forks = [0]
"""How often this process has begun or ended a fork: what it receives between the two is in the child, too."""


def _count_fork() -> None:
    forks[0] += 1


if IS_POSIX:
    os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)
