from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import pytest

from mmdata.loader.workers.threads import Promise, ThreadedBatches, Work
from tests.programs import PATIENCE_S, run_program

SEEN_BY_ALL = """
import threading, torch
torch.set_num_threads(3)
from mmdata.loader.workers.threads import ThreadedBatches, Work

workers, born_later = [], []
class Pipeline:
    current_epoch = 0
    def steps(self, epoch, start):
        yield from range(4)
    def begin(self, step, stop):
        return Work([lambda: workers.append(torch.get_num_threads())], lambda: step)
threads = ThreadedBatches(Pipeline(), num_threads=2, prefetch=1)
threads.begin(0, 0)
for step in range(4):
    threads.take(0, step)
thread = threading.Thread(target=lambda: born_later.append(torch.get_num_threads()))
thread.start()
thread.join()
print(workers, torch.get_num_threads(), born_later)
"""


class Memory:
    """What a batch lies in."""


class Counted:
    """Numbers as steps."""

    current_epoch = 0

    def __init__(self, num_steps: int, begin: Callable[[int, threading.Event], Work]) -> None:
        self._num_steps, self._begin = num_steps, begin

    def steps(self, epoch: int, start: int) -> Generator[int, None, None]:
        yield from range(start, self._num_steps)

    def begin(self, step: int, stop: threading.Event | None = None) -> Work:
        assert stop is not None
        return self._begin(step, stop)


def begun(begin: Callable[[int, threading.Event], Work], count: int, steps: int) -> ThreadedBatches[Any]:
    threads: ThreadedBatches[Any] = ThreadedBatches(Counted(steps, begin), num_threads=count, prefetch=3)
    threads.begin(0, 0)
    return threads


def test_workers_use_one_thread_of_torch_and_leave_the_others_theirs():
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = run_program([sys.executable, "-c", SEEN_BY_ALL], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[1, 1, 1, 1] 3 [3]"


def test_units_of_one_batch_are_shared_by_the_threads():
    meeting = threading.Barrier(3, timeout=PATIENCE_S)
    job = Work([meeting.wait] * 3, lambda: 7)  # no thread gets past its unit before three are at one
    assert begun(lambda *_: job, count=3, steps=1).take(0, 0) == 7


def test_whoever_waits_for_a_batch_that_was_not_begun_is_told_when_the_threads_end():
    at_work = threading.Event()

    def begin(step: int, stop: threading.Event) -> Work:
        def unit() -> None:
            at_work.set()
            stop.wait(PATIENCE_S)

        return Work([unit], lambda: step)

    threads = begun(begin, count=1, steps=2)
    promises: list[Promise[int]] = [Promise(), Promise()]
    got: list[int | type[BaseException]] = []

    def take(promise: Promise[int]) -> None:
        try:
            got.append(promise.take())
        except CancelledError as error:
            got.append(type(error))

    takers = [threading.Thread(target=take, args=(promise,), daemon=True) for promise in promises]
    for promise, taker in zip(promises, takers, strict=True):  # the only worker is at the first batch
        threads.ask(promise)
        taker.start()
    assert at_work.wait(PATIENCE_S)
    threads.close()
    promises.append(Promise())
    threads.ask(promises[-1])  # too late
    take(promises[-1])
    for taker in takers:
        taker.join(timeout=PATIENCE_S)
    assert sorted(got, key=str) == [0, CancelledError, CancelledError]


@pytest.mark.parametrize("ended_by", ["nobody wants it", "an error", "no more steps"])
def test_memory_of_batches_that_are_given_up_goes_at_once(ended_by: str):
    lent: list[weakref.ref[Memory]] = []
    steps = 1 if ended_by == "no more steps" else 4

    def begin(step: int, stop: threading.Event, of_worker: Memory) -> Work:
        of_batch = Memory()
        lent.append(weakref.ref(of_batch))

        def unit() -> None:
            if ended_by != "no more steps":
                assert stop.wait(20 if ended_by == "nobody wants it" else 0), of_batch
            assert of_worker

        return Work([unit] * 8, lambda: of_batch)

    worker = Memory()
    lent.append(weakref.ref(worker))
    gc.collect()
    gc.disable()  # its next full round may be minutes away, and a batch is some 100 MB
    try:
        threads = begun(partial(begin, of_worker=worker), 2, steps)
        for _ in range(3):
            threads.ask(Promise())
        while len(lent) < 2:
            time.sleep(0.01)
        threads.close()
        del threads, worker
        assert [ref() for ref in lent] == [None] * len(lent)
    finally:
        gc.enable()
