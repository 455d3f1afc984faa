"""Small files read into large pieces of memory, many files to a piece: the system hands out large pieces faster."""

from __future__ import annotations

import os
import threading

import numpy as np

from mmdata.safe_read import open_regular

PIECE_BYTES = 2**22
"""From this size on numpy asks the system for huge pages; with small ones most of the time would be page faults."""
ALIGNMENT = 16
"""Bytes; what numpy gives a piece itself, and more than any column needs."""


class _Piece(threading.local):
    """The piece that a thread fills; of one's own, so that no lock can be held where a process forks."""

    memory = memoryview(b"")
    used = 0


_piece = _Piece()


def read_together(path: str | os.PathLike[str], what: str) -> memoryview:
    """The bytes of a regular file, read-only. A piece is free again once the last file in it is.

    Args:
        path: of the file.
        what: what it is, for messages.

    Raises:
        FileNotFoundError: there is none.
        DataError: it is a folder, a FIFO or a device.
    """
    descriptor = open_regular(path, what)
    try:
        room = _room(os.fstat(descriptor).st_size)
        filled = 0
        while filled < len(room) and (count := os.preadv(descriptor, [room[filled:]], filled)):
            filled += count
    finally:
        os.close(descriptor)
    return room[:filled].toreadonly()


def _room(size: int) -> memoryview:
    if size > PIECE_BYTES // 8:
        return np.empty(size, np.uint8).data
    if _piece.used + size > len(_piece.memory):
        _piece.memory, _piece.used = np.empty(PIECE_BYTES, np.uint8).data, 0
    begin = _piece.used
    _piece.used = begin + -(-size // ALIGNMENT) * ALIGNMENT
    return _piece.memory[begin : begin + size]
