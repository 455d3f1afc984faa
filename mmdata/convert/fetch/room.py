"""Room for the bytes of rows that are fetched ahead. The row that is waited for always has room, so nothing hangs."""

from __future__ import annotations

import asyncio
import heapq

from mmdata.convert.fetch.faults import NoRoom

FIRST_GUESS = 2**17
"""Bytes reserved for a body before any was read."""


class Room:
    """The bytes of all rows that are fetched ahead.

    Args:
        most: their number, at most; the first row may exceed it.

    Attributes:
        used: bytes taken or reserved.
        guess: bytes to reserve for a body of unknown size: twice the average of those before.
    """

    def __init__(self, most: int) -> None:
        self.used = 0
        self.guess = min(FIRST_GUESS, most)
        self._most = most
        self._first = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: the lowest row comes first

    async def reserve(self, row: int, count: int) -> None:
        """Wait until `count` bytes are free, and take them. The first row does not wait."""
        if row > self._first and (self._waiting or self.used + count > self._most):
            free: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (row, count, free))
            self._wake()
            await free  # `_wake` takes the bytes, so that a later row cannot take them in between
        else:
            self.used += count

    def grow(self, row: int, count: int, *, whole: int) -> None:
        """Take `count` bytes more, at once.

        Args:
            row: that needs them.
            count: of bytes.
            whole: bytes that the row needs in all.

        Raises:
            NoRoom: there are too few, and the row is not the first.
        """
        if row > self._first and self.used + count > self._most:
            raise NoRoom(min(whole, self._most))
        self.used += count

    def give_back(self, count: int) -> None:
        """Free bytes."""
        self.used -= count
        self._wake()

    def learn(self, size: int) -> None:
        """Adjust the guess to the size of a body."""
        self.guess = min(max(1, round(0.95 * self.guess + 0.05 * 2 * size)), self._most)

    def move(self, first: int) -> None:
        """Say which row is waited for now."""
        self._first = first
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            row, count, free = self._waiting[0]
            if not free.done():
                if row > self._first and self.used + count > self._most:
                    return
                self.used += count
                free.set_result(None)
            heapq.heappop(self._waiting)


class Space:
    """The bytes of one row.

    Attributes:
        reserved: bytes of `Room` that the row has.
    """

    def __init__(self, room: Room, row: int) -> None:
        self._room = room
        self._row = row
        self.reserved = 0

    async def reserve(self, count: int) -> None:
        """Have `count` bytes and no other, waiting for them."""
        self.free()
        await self._room.reserve(self._row, count)
        self.reserved = count

    def need(self, size: int, *, whole: int | None = None) -> None:
        """Have at least `size` bytes.

        Args:
            size: bytes of the body so far, or in all.
            whole: bytes in all, if known.

        Raises:
            NoRoom: there are too few.
        """
        if size > self.reserved:
            self._room.grow(self._row, size - self.reserved, whole=whole or 2 * size)
            self.reserved = size

    def settle(self, size: int) -> None:
        """Keep `size` bytes, of a body that was read whole."""
        self._room.learn(size)
        self._room.give_back(self.reserved - size)
        self.reserved = size

    def free(self) -> None:
        """Give all back."""
        self._room.give_back(self.reserved)
        self.reserved = 0
