"""Reads parts of files into large blocks of memory, many to a block, because large blocks cost fewer page faults."""

from __future__ import annotations

import os
import threading

import numpy as np

from mmdata.safe_read import open_regular

BLOCK_BYTES = 2**22
"""From this size on numpy asks the kernel for huge pages; with small pages most of the time would be page faults."""
ALIGNMENT = 16
"""Alignment of a part in its block, in bytes: as numpy's own, and more than any column needs."""


class _Block(threading.local):
    """The block that a thread fills. Each thread has its own, so that no lock can be held when the process forks."""

    memory = memoryview(b"")
    used = 0


_block = _Block()


def read_together(path: str | os.PathLike[str], what: str, offset: int, size: int) -> memoryview:
    """Bytes [offset, offset + size) of a regular file, read-only, fewer at its end.

    A block's memory is freed with the last part in it.

    Args:
        path: of the file.
        what: kind of file, for messages.
        offset, size: of the part.

    Raises:
        FileNotFoundError: there is none.
        DataError: it is a folder, a FIFO or a device.
    """
    descriptor = open_regular(path, what)
    try:
        room = _room(min(size, max(os.fstat(descriptor).st_size - offset, 0)))
        filled = 0
        while filled < len(room) and (count := os.preadv(descriptor, [room[filled:]], offset + filled)):
            filled += count
    finally:
        os.close(descriptor)
    return room[:filled].toreadonly()


def _room(size: int) -> memoryview:
    """Writable memory for a part; a large one gets memory of its own."""
    if size > BLOCK_BYTES // 8:
        return np.empty(size, np.uint8).data
    if _block.used + size > len(_block.memory):
        _block.memory, _block.used = np.empty(BLOCK_BYTES, np.uint8).data, 0
    begin = _block.used
    _block.used = begin + -(-size // ALIGNMENT) * ALIGNMENT
    return _block.memory[begin : begin + size]
