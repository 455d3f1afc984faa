"""A semaphore of bytes for rows that are fetched ahead. The row that is waited for always passes, so nothing hangs."""

from __future__ import annotations

import asyncio
import heapq

FIRST_GUESS = 2**17
"""Bytes reserved for a body before any was read."""


class NoRoom(Exception):
    """There is no room for a body now.

    Attributes:
        size: bytes for which room is needed before the URL is asked for again.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"no room for {size} bytes")
        self.size = size


class Room:
    """The bytes of rows that are fetched ahead, by the number of the row.

    Args:
        most: bytes of all rows, at most; the first row may exceed it.

    Attributes:
        used: bytes that rows hold.
        guess: bytes to reserve for a body of unknown size: twice the average of those before.
    """

    def __init__(self, most: int) -> None:
        self.used = 0
        self.guess = min(FIRST_GUESS, most)
        self._most = most
        self._first = 0
        self._held: dict[int, int] = {}
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: the lowest row comes first

    async def reserve(self, row: int, size: int) -> None:
        """Free what a row holds, and wait until it has `size` bytes. The first row does not wait."""
        self.free(row)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (row, size, turn))
        self._wake()
        await turn  # `_wake` takes the bytes, so that a later row cannot take them in between

    def need(self, row: int, size: int, whole: int | None = None) -> None:
        """Let a row hold at least `size` bytes, at once.

        Args:
            row: its number.
            size: bytes of its body so far, or in all.
            whole: bytes in all, if known.

        Raises:
            NoRoom: there are too few, and the row is not the first.
        """
        more = size - self._held.get(row, 0)
        if more <= 0:
            return
        if not self._fits(row, more):
            raise NoRoom(min(whole or 2 * size, self._most))
        self._hold(row, size)

    def settle(self, row: int, size: int) -> None:
        """Keep `size` bytes, of a body that was read whole."""
        self.guess = min(max(1, round(0.95 * self.guess + 0.05 * 2 * size)), self._most)
        self._hold(row, size)
        self._wake()

    def free(self, row: int) -> None:
        """Give back all bytes of a row."""
        self.used -= self._held.pop(row, 0)
        self._wake()

    def move(self, first: int) -> None:
        """Say which row is waited for now."""
        self._first = first
        self._wake()

    def _fits(self, row: int, more: int) -> bool:
        return row <= self._first or self.used + more <= self._most

    def _hold(self, row: int, size: int) -> None:
        self.used += size - self._held.get(row, 0)
        self._held[row] = size

    def _wake(self) -> None:
        while self._waiting:
            row, size, turn = self._waiting[0]
            if not turn.done():  # else it was cancelled
                if not self._fits(row, size):
                    return
                self._hold(row, size)
                turn.set_result(None)
            heapq.heappop(self._waiting)
