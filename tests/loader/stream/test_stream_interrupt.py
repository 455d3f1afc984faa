"""Ctrl-C in a stream, or in a loader, is a KeyboardInterrupt, whatever it interrupts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import pytest

import mmdata
from mmdata.errors import Interrupted
from mmdata.loader.growing.plan import read_windows
from tests.interrupts import forget_threads_that_never_began, interrupt_at_thread
from tests.programs import PATIENCE_S
from tests.storage.servers import serve


def source(kind: str, shards: Path, config: Any) -> mmdata.Loader | Any:
    settings = config(num_workers=3, prefetch_batches=3)
    if kind == "stream":
        return mmdata.stream(shards, settings)
    return mmdata.Loader.from_config({**settings, "shards": str(shards)})


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    before = threading.enumerate()  # a loader of another test may wait for the garbage collector
    yield
    ours = [thread for thread in {*threading.enumerate()} - {*before} if thread.name.startswith("mmdata-")]
    until = time.monotonic() + PATIENCE_S
    while left := [thread.name for thread in ours if thread.is_alive()]:
        assert time.monotonic() < until, left
        time.sleep(0.01)
    forget_threads_that_never_began()


def test_closing_ends_the_reading_of_a_pass_that_has_no_window_yet(
    shards: Path, config: Any, monkeypatch: pytest.MonkeyPatch, no_threads_left: None
):
    waits = Event()

    def windows(tars: Any, number: int, ended: Event) -> Any:
        if number:
            waits.set()
            ended.wait()
            raise Interrupted
        yield from read_windows(tars, number, ended)

    monkeypatch.setattr("mmdata.loader.growing.plan.read_windows", windows)
    stream = mmdata.stream(shards, config(num_workers=1))
    list(stream)
    assert waits.wait(PATIENCE_S)
    stream.close()


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupt_while_a_thread_starts_that_reads_ahead_is_a_keyboard_interrupt(
    shards: Path, config: Any, no_threads_left: None, is_begun: bool
):
    before = sys.gettrace()
    sys.settrace(interrupt_at_thread("mmdata-index", is_begun=is_begun))
    try:
        with pytest.raises(KeyboardInterrupt):
            mmdata.stream(shards, config(num_workers=0))
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("name", ["mmdata-worker_steps", "mmdata-worker_0", "mmdata-worker_2"])
def test_an_interrupt_while_a_thread_starts_is_a_keyboard_interrupt(
    shards: Path, config: Any, no_threads_left: None, name: str, is_begun: bool
):
    stream = mmdata.stream(shards, config(num_workers=3, prefetch_batches=3))
    before = sys.gettrace()
    sys.settrace(interrupt_at_thread(name, is_begun=is_begun))
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iter(stream))
    finally:
        sys.settrace(before)
    assert sum(int(batch["valid"].sum()) for batch in stream) == 38


def test_an_interrupt_does_not_wait_for_a_server(
    shards: Path, config: Any, no_threads_left: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mmdata.processes.JOIN_S", 0.1)
    monkeypatch.setattr("mmdata.loader.workers.threads.END_S", 0.1)
    with serve(shards) as server:
        server.held = "000000.tar"
        late = threading.Timer(300, server.release.set)

        def interrupt() -> None:
            assert server.holding.wait(PATIENCE_S)
            late.start()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            with pytest.raises(KeyboardInterrupt):
                mmdata.stream(f"{server.url}/000000.tar", config(num_workers=2))
            assert not server.release.is_set()
        finally:
            server.release.set()
            late.cancel()


# Python itself drops an interrupt that comes while it runs a finalizer: that of a batch's memory, or of a thread.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <(finalize|function WeakSet):pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("kind", ["stream", "loader"])
def test_interrupts_at_any_moment_are_keyboard_interrupts(
    shards: Path, config: Any, no_threads_left: None, no_gc_callbacks: None, kind: str
):
    batches = source(kind, shards, config)
    expected = [batch["keys"] for batch in batches]
    begun = time.monotonic()
    batches.set_epoch(0)
    assert [batch["keys"] for batch in batches] == expected
    epoch_s = time.monotonic() - begun

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for i in range(60):
            try:
                batches.set_epoch(0)
                signal.setitimer(signal.ITIMER_REAL, max(1e-4, epoch_s * i / 60))
                for _ in batches:
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0
    batches.set_epoch(0)
    assert [batch["keys"] for batch in batches] == expected
