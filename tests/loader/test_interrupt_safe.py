"""What threads share where an interrupt may come: a result, a stop signal, a generator that closes at any moment."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Generator
from concurrent.futures import CancelledError
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from mmdata.loader.workers.interrupt_safe import Promise, SharedGenerator, Stop
from tests.programs import PATIENCE_S


def test_promise_is_taken_by_whoever_waits():
    promise: Promise[int] = Promise()
    threading.Timer(0.05, promise.keep, [3]).start()
    assert promise.take() == 3


def test_promise_that_is_not_kept_is_the_first_error_that_was_given():
    promise: Promise[int] = Promise()
    promise.fail(ValueError("first"))
    promise.cancel()
    with pytest.raises(ValueError, match="first"):
        promise.take()


def test_promise_that_nobody_keeps_is_a_cancelled_error():
    promise: Promise[int] = Promise()
    promise.cancel()
    with pytest.raises(CancelledError):
        promise.take()


def test_promise_goes_with_the_error_that_was_taken_from_it():
    promise: Promise[int] = Promise()
    gone = weakref.ref(promise)
    gc.disable()
    try:
        promise.fail(ValueError())
        with suppress(ValueError):
            promise.take()
        del promise
        assert gone() is None
    finally:
        gc.enable()


def test_stop_wakes_all_who_wait_and_stays():
    stop = Stop()
    assert not stop.is_set()
    assert not stop.wait(0.01)
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(stop.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    stop.set()
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [True] * 5
    assert stop.is_set()
    assert stop.wait()
    with pytest.raises(TypeError, match="for good"):
        stop.clear()


@pytest.mark.parametrize("which", range(1, 40))
def test_interrupt_at_any_line_of_set_and_keep_leaves_no_lock_held(which: int):
    """The line is the n-th that runs in them, and in what they call."""
    stop, promise, lines = Stop(), Promise[int](), 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines == which:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    with suppress(KeyboardInterrupt):
        sys.settrace(trace)
        try:
            stop.set()
            promise.keep(1)
        finally:
            sys.settrace(None)
    stop.set()
    promise.keep(1)
    done = threading.Thread(target=lambda: (stop.wait(), stop.set(), promise.take(), promise.keep(1)), daemon=True)
    done.start()
    done.join(PATIENCE_S)
    assert not done.is_alive()


class Watched:
    """A generator of numbers that waits inside for `go`, and says when it was closed and by which thread."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.closed_by: list[str] = []

    def numbers(self) -> Generator[int, None, None]:
        try:
            for number in range(10):
                self.inside.set()
                assert self.go.wait(PATIENCE_S)
                yield number
        finally:
            self.closed_by.append(threading.current_thread().name)


def test_shared_generator_closed_while_a_thread_is_inside_leaves_it_to_that_thread():
    watched, given = Watched(), []
    shared = SharedGenerator(watched.numbers())
    thread = threading.Thread(target=lambda: given.append(next(shared)), name="inside")
    thread.start()
    assert watched.inside.wait(PATIENCE_S)
    shared.close()
    shared.close()
    assert watched.closed_by == []
    watched.go.set()
    thread.join()
    assert (given, watched.closed_by) == ([0], ["inside"])
    assert list(shared) == []


def test_asking_while_another_thread_closes_it_is_its_end():
    closing, go = threading.Event(), threading.Event()

    def numbers() -> Generator[int, None, None]:
        try:
            yield 0
        finally:
            closing.set()
            assert go.wait(PATIENCE_S)

    shared = SharedGenerator(numbers())
    assert next(shared) == 0
    thread = threading.Thread(target=shared.close)
    thread.start()
    assert closing.wait(PATIENCE_S)
    shared._closed = False  # as the caller of __next__ saw it, just before
    try:
        assert list(shared) == []
    finally:
        go.set()
        thread.join()


def test_closing_an_idle_generator_closes_it_here():
    watched = Watched()
    watched.go.set()
    shared = SharedGenerator(watched.numbers())
    assert next(shared) == 0
    shared.close()
    assert watched.closed_by == [threading.current_thread().name]
    assert list(shared) == []


def test_a_generator_that_ends_or_raises_does_so_for_the_one_that_asks():
    def fails() -> Generator[int, None, None]:
        yield 1
        raise ValueError("no")

    shared = SharedGenerator(fails())
    assert next(shared) == 1
    with pytest.raises(ValueError, match=r"^no$"):
        next(shared)
    assert list(shared) == []


def test_many_threads_get_each_once_and_one_closes_it_meanwhile():
    for closes_after in (0, 7, 500, 10_000):
        shared = SharedGenerator(number for number in range(2000))
        got: list[int] = []

        def take(shared: SharedGenerator[int] = shared, got: list[int] = got, closes_after: int = closes_after) -> None:
            for number in shared:
                got.append(number)
                if len(got) >= closes_after:
                    shared.close()

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == list(range(len(got)))
        assert len(got) == 2000 or closes_after < 2000
        assert list(shared) == []
