"""A generator that threads share is closed at any moment without an error."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from mmdata.loader.workers.turns import Turns


class Watched:
    """A generator of numbers that waits inside for `go`, and says when it was closed and by which thread."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.closed_by: list[str] = []

    def numbers(self) -> Generator[int, None, None]:
        try:
            for number in range(10):
                self.inside.set()
                assert self.go.wait(60)
                yield number
        finally:
            self.closed_by.append(threading.current_thread().name)


def test_closing_while_a_thread_is_inside_leaves_it_to_that_thread():
    watched, given = Watched(), []
    turns = Turns(watched.numbers())
    thread = threading.Thread(target=lambda: given.append(next(turns)), name="inside")
    thread.start()
    assert watched.inside.wait(60)
    turns.close()
    turns.close()
    assert watched.closed_by == []
    watched.go.set()
    thread.join()
    assert (given, watched.closed_by) == ([0], ["inside"])
    assert list(turns) == []


def test_asking_while_another_thread_closes_it_is_its_end():
    closing, go = threading.Event(), threading.Event()

    def numbers() -> Generator[int, None, None]:
        try:
            yield 0
        finally:
            closing.set()
            assert go.wait(60)

    turns = Turns(numbers())
    assert next(turns) == 0
    thread = threading.Thread(target=turns.close)
    thread.start()
    assert closing.wait(60)
    turns._closed = False  # as whoever asked saw it, just before
    try:
        assert list(turns) == []
    finally:
        go.set()
        thread.join()


def test_closing_an_idle_generator_closes_it_here():
    watched = Watched()
    watched.go.set()
    turns = Turns(watched.numbers())
    assert next(turns) == 0
    turns.close()
    assert watched.closed_by == [threading.current_thread().name]
    assert list(turns) == []


def test_a_generator_that_ends_or_raises_does_so_for_the_one_that_asks():
    def fails() -> Generator[int, None, None]:
        yield 1
        raise ValueError("no")

    turns = Turns(fails())
    assert next(turns) == 1
    with pytest.raises(ValueError, match=r"^no$"):
        next(turns)
    assert list(turns) == []


def test_many_threads_get_each_once_and_one_closes_it_meanwhile():
    for closes_after in (0, 7, 500, 10_000):
        turns = Turns(number for number in range(2000))
        got: list[int] = []

        def take(turns: Turns[int] = turns, got: list[int] = got, closes_after: int = closes_after) -> None:
            for number in turns:
                got.append(number)
                if len(got) >= closes_after:
                    turns.close()

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == list(range(len(got)))
        assert len(got) == 2000 or closes_after < 2000
        assert list(turns) == []
