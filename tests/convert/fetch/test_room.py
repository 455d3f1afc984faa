"""The bytes of rows fetched ahead are bounded, and the row that is waited for is never held up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mmdata.convert.fetch.fetcher import Fetcher
from mmdata.convert.fetch.room import NoRoom, Room
from mmdata.convert.fetch.stage import FetchStage
from mmdata.convert.sources.rows import InputRow
from tests.convert.fetch.conftest import quick
from tests.convert.fetch.sites import Answer, Site, dribble


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def test_rows_wait_in_their_order_and_the_first_does_not() -> None:
    async def test() -> None:
        room, got = Room(100), []

        async def reserve(row: int, size: int) -> None:
            await room.reserve(row, size)
            got.append(row)

        await reserve(5, 90)
        waiting = [asyncio.ensure_future(reserve(row, size)) for row, size in ((9, 50), (7, 60), (8, 20))]
        await asyncio.sleep(0)
        assert got == [5]
        await reserve(0, 1000)
        assert (got, room.used) == ([5, 0], 1090)
        room.free(0)
        assert got == [5, 0]
        room.move(7)
        await asyncio.sleep(0)
        assert (got, room.used) == ([5, 0, 7], 150)
        room.free(5)
        await asyncio.gather(*waiting[1:])
        assert got == [5, 0, 7, 8]
        room.free(7)
        room.free(8)
        await waiting[0]
        assert room.used == 50

    in_loop(test)


def test_row_that_is_cancelled_leaves_its_place() -> None:
    async def test() -> None:
        room = Room(10)
        await room.reserve(1, 10)
        gone = asyncio.ensure_future(room.reserve(2, 5))
        await asyncio.sleep(0)
        gone.cancel()
        later = asyncio.ensure_future(room.reserve(3, 5))
        await asyncio.sleep(0)
        room.free(1)
        await later
        assert room.used == 5

    in_loop(test)


def test_row_grows_settles_and_is_freed() -> None:
    async def test() -> None:
        room = Room(100)
        await room.reserve(1, 60)
        room.need(1, 70)
        with pytest.raises(NoRoom, match="no room for 100 bytes") as raised:
            room.need(1, 101)
        assert raised.value.size == 100  # twice as many, but never more than there may be
        with pytest.raises(NoRoom, match="no room for 90 bytes"):
            room.need(2, 80, 90)
        room.need(0, 500)
        room.settle(1, 30)
        assert room.used == 530
        room.free(1)
        room.free(0)
        room.free(0)
        assert room.used == 0

    in_loop(test)


class Watched(Fetcher):
    """Keeps the most bytes that were counted."""

    most_used = 0

    async def __aenter__(self) -> Any:
        hold = self.room._hold

        def look(row: int, size: int) -> None:
            hold(row, size)
            self.most_used = max(self.most_used, self.room.used)

        self.room._hold = look  # type: ignore[method-assign]
        return await super().__aenter__()


@pytest.mark.parametrize("declared", [True, False])
def test_bytes_ahead_are_bounded_whatever_servers_say_of_their_size(site: Site, declared: bool) -> None:
    size, ahead = 300_000, 1_000_000
    site.answers["/a.jpg"] = Answer(200, b"x" * size) if declared else dribble(b"x" * 30_000, 0.0, times=10)
    settings = quick(bytes_ahead=ahead, ignore_opt_outs=True, per_host=8)
    fetcher = Watched(settings, fault_of=lambda _: "")
    rows = [InputRow(number, "", site.url(f"/a.jpg?{number}", f"127.0.0.{1 + number % 5}")) for number in range(60)]
    with FetchStage(settings, fetcher) as stage:
        found = list(stage(rows))
    assert [(row.number, len(row.image or b"")) for row in found] == [(number, size) for number in range(60)]
    assert fetcher.most_used <= ahead + size
