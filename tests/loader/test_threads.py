from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial

import pytest

from mmdata.loader.workers.threads import WorkerThreads
from mmdata.loader.workers.work import Work
from tests.programs import PATIENCE_S, run_program

SEEN_BY_ALL = """
import threading, torch
torch.set_num_threads(3)
from mmdata.loader.workers.threads import WorkerThreads
from mmdata.loader.workers.work import Work

workers, born_later = [], []
def begin(step, stop):
    return Work([lambda: workers.append(torch.get_num_threads())], lambda: step)
threads = WorkerThreads((n for n in range(4)), begin, 2)
for _ in range(4):
    threads.ask()
for _ in range(4):
    threads.take()
thread = threading.Thread(target=lambda: born_later.append(torch.get_num_threads()))
thread.start()
thread.join()
print(workers, torch.get_num_threads(), born_later)
"""


class Memory:
    """What a batch lies in."""


def counted(n: int) -> Iterator[int]:
    yield from range(n)


def started(make: Callable[[int], Work[int]], count: int, steps: int) -> WorkerThreads[int, int]:
    threads: WorkerThreads[int, int] = WorkerThreads(counted(steps), lambda step, _: make(step), count)
    for _ in range(steps):
        threads.ask()
    return threads


def test_workers_use_one_thread_of_torch_and_leave_the_others_theirs():
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = run_program([sys.executable, "-c", SEEN_BY_ALL], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[1, 1, 1, 1] 3 [3]"


def test_units_of_one_batch_are_shared_by_the_threads():
    meeting = threading.Barrier(3, timeout=PATIENCE_S)
    job = Work([meeting.wait] * 3, lambda: 7)  # no thread gets past its unit before three are at one
    assert started(lambda _: job, count=3, steps=1).take() == 7


def test_results_come_in_the_order_of_the_tasks_whichever_is_finished_first():
    later_is_done = threading.Event()

    def make(step: int) -> Work[int]:
        unit = (lambda: later_is_done.wait(PATIENCE_S)) if step == 0 else later_is_done.set
        return Work([unit], lambda: step * 10)

    threads = started(make, count=2, steps=2)
    assert [threads.take(), threads.take()] == [0, 10]


def test_the_first_error_of_a_batch_is_its_result_and_the_next_batch_is_made():
    def fail() -> None:
        raise ValueError("unit 1")

    def make(step: int) -> Work[int]:
        return Work([lambda: None, fail, lambda: None] if step == 0 else [lambda: None], lambda: step)

    threads = started(make, count=2, steps=2)
    with pytest.raises(ValueError, match="unit 1"):
        threads.take()
    assert threads.take() == 1


def test_whoever_waits_for_a_batch_that_was_not_begun_is_told_when_the_threads_end():
    begun = threading.Event()

    def begin(step: int, stop: threading.Event) -> Work[int]:
        def unit() -> None:
            begun.set()
            stop.wait(PATIENCE_S)

        return Work([unit], lambda: step)

    threads: WorkerThreads[int, int] = WorkerThreads(counted(2), begin, 1)
    got: list[int | type[BaseException]] = []

    def take() -> None:
        try:
            got.append(threads.take())
        except CancelledError as error:
            got.append(type(error))

    takers = [threading.Thread(target=take, daemon=True) for _ in range(2)]
    threads.ask()
    threads.ask()
    for taker in takers:
        taker.start()
    assert begun.wait(PATIENCE_S)
    while len(threads):  # both wait: one for the batch that the only worker is at, one for that after it
        time.sleep(0.01)
    threads.close()
    for taker in takers:
        taker.join(timeout=PATIENCE_S)
    assert sorted(got, key=str) == [0, CancelledError]


@pytest.mark.parametrize("ended_by", ["nobody wants it", "an error", "no more steps"])
def test_memory_of_batches_that_are_given_up_goes_at_once(ended_by: str):
    lent: list[weakref.ref[Memory]] = []
    steps = counted(1 if ended_by == "no more steps" else 4)

    def begin(step: int, stop: threading.Event, of_worker: Memory) -> Work[Memory]:
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
        threads: WorkerThreads[int, Memory] = WorkerThreads(steps, partial(begin, of_worker=worker), 2)
        for _ in range(3):
            threads.ask()
        while len(lent) < 2:
            time.sleep(0.01)
        threads.close()
        del threads, worker
        assert [ref() for ref in lent] == [None] * len(lent)
    finally:
        gc.enable()
