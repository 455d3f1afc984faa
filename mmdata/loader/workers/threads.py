"""Worker threads: all threads share the units of one batch, then of the next; results come in the order of the steps.

So the latency of a batch falls with the number of threads, and its memory does not grow with it. One more thread takes
the steps and begins them. What passes between threads goes through `SimpleQueue`, whose calls are C: an interrupt can
leave no lock held. Threads are daemons: a program that ends does not wait for a server that does not answer. They are
ended before the interpreter is.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

import torch

from mmdata.loader.workers.interrupt_safe import Promise, Stop
from mmdata.loader.workers.work import Pipeline, Work

T = TypeVar("T")
StepT = TypeVar("StepT")
END_S = 5.0
"""Seconds for which `close` waits for the threads. They end at the next row, unless a transform or a disk hangs."""


class WorkerThreads(Generic[StepT, T]):
    """Threads that share the units of one step after the other. They end with this object.

    Args:
        steps: iterated, and closed, by the thread that begins them.
        begin: called with a step, and with an event that is set when the results are not wanted any more.
        count: number of threads that do the units. Each uses one thread of torch, since more would compete for the
            other workers' cores; the caller's own `torch.get_num_threads` does not change.
        name: prefix of the threads' names. `Stats.workers` keeps its sums by these names, so the threads of several
            processes of one loader need prefixes of their own.
    """

    def __init__(
        self,
        steps: Iterator[StepT],
        begin: Callable[[StepT, threading.Event], Work[T]],
        count: int,
        *,
        name: str = "mmdata-worker",
    ) -> None:
        self._requested: deque[Promise[T]] = deque()  # oldest first
        self._queues: _Queues[T] = _Queues(count)
        self._threads: list[threading.Thread] = []
        self._owner = os.getpid()
        # `_close` runs when `close` is called, when this object is collected, or when the program ends. It gets the
        # queues and the threads, not this object: a finalizer that refers to its object would keep it alive.
        self._finalize = weakref.finalize(self, _close, self._queues, self._threads, self._owner)
        work = {f"{name}_steps": partial(_begin_steps, steps, begin, self._queues)}
        self._start({**work, **{f"{name}_{number}": partial(_do_units, self._queues) for number in range(count)}})

    def __len__(self) -> int:
        """Results that were requested and not taken yet."""
        return len(self._requested)

    def _start(self, work: dict[str, Callable[[], None]]) -> None:
        callers = torch.get_num_threads()
        limited: SimpleQueue[None] = SimpleQueue()  # one item for each thread that has set its number of torch threads
        try:
            for name, do in work.items():
                thread = threading.Thread(target=_work, args=(do, limited), name=name, daemon=True)
                self._threads.append(thread)  # first: after an interrupt within `start`, `_close` must find it
                thread.start()
            for _ in work:
                limited.get()
        finally:
            # torch.set_num_threads sets the calling thread's number, and also the number that new threads begin with:
            # without this line the caller's next threads would have 1.
            torch.set_num_threads(callers)

    def close(self) -> None:
        """End the threads, and wait for them, at most `END_S`."""
        try:
            # A finalizer runs once. If an interrupt cut it short, the threads would never be told to end: so they are
            # told before it.
            if self._finalize.alive and self._owner == os.getpid():  # a forked child has none of the threads
                self._queues.end()
        finally:
            self._finalize()

    def ask(self) -> None:
        """Queue the next batch."""
        promise: Promise[T] = Promise()
        self._requested.append(promise)
        self._queues.asked.put(promise)
        if self._queues.stop.is_set():  # the thread that begins steps may have ended already
            promise.cancel()

    def take(self) -> T:
        """Wait for the next result.

        Raises:
            StopIteration: there are no more steps.
            CancelledError: the threads have been ended.
            Exception: what `steps`, `begin` or its work raised.
        """
        return self._requested.popleft().take()


class _Queues(Generic[T]):
    """Where the threads find work. It has no reference to `WorkerThreads`, which can so be collected while they wait.

    Attributes:
        asked: the n-th promise gets the result of the n-th step. None: there will be no more.
        units: of the batches in progress, the oldest batch first: the caller waits for it. None: a thread is to end.
        stop: set when the results are not wanted any more.
    """

    def __init__(self, count: int) -> None:
        self.asked: SimpleQueue[Promise[T] | None] = SimpleQueue()
        self.units: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.stop = Stop()
        self._count = count

    def end(self) -> None:
        """Have the threads end. Promises of steps that were not begun get a CancelledError."""
        self.stop.set()
        self.asked.put(None)
        for _ in range(self._count):
            self.units.put(None)


def _begin_steps(
    steps: Iterator[StepT], begin: Callable[[StepT, threading.Event], Work[T]], queues: _Queues[T]
) -> None:
    try:
        while (promise := queues.asked.get()) is not None:
            _begin_next(steps, begin, queues, promise)
            del promise
    finally:
        if (close := getattr(steps, "close", None)) is not None:
            close()


def _begin_next(
    steps: Iterator[StepT],
    begin: Callable[[StepT, threading.Event], Work[T]],
    queues: _Queues[T],
    promise: Promise[T],
) -> None:
    try:
        if queues.stop.is_set():
            raise CancelledError
        batch = _SharedWork(begin(next(steps), queues.stop), promise, queues.stop)
        for unit in batch.work.units:
            queues.units.put(partial(batch.do, unit))
        if queues.stop.is_set():  # the threads may have ended before these units came
            promise.cancel()
    except BaseException as error:
        promise.fail(error)
        # The promise holds the error, whose traceback holds this frame: without `del` they would keep each other.
        del promise


class _SharedWork(Generic[T]):
    """Work that threads share. The thread that does the last unit calls `finish`; the first error ends the work."""

    def __init__(self, work: Work[T], promise: Promise[T], stop: threading.Event) -> None:
        self.work = work
        self._promise, self._stop = promise, stop
        self._left = len(work.units)
        self._failed = False
        self._lock = threading.Lock()

    def do(self, unit: Callable[[], None]) -> None:
        try:
            if self._stop.is_set():
                raise CancelledError
            unit()
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if last:
                self._promise.keep(self.work.finish())
        except BaseException as error:
            with self._lock:
                first, self._failed = not self._failed, True
            if first:
                self._promise.fail(error)
            # The promise holds the error, whose traceback holds this frame: without `del` it would keep the batch's
            # memory.
            del self


def _do_units(queues: _Queues[T]) -> None:
    while unit := queues.units.get():
        unit()
        del unit  # it holds its batch, whose memory must not wait until this thread has the next work


def _work(work: Callable[[], None], limited: SimpleQueue[None]) -> None:
    # The first use of torch in a thread sets its number of threads to the default: so it comes before set_num_threads.
    torch.get_num_threads()
    torch.set_num_threads(1)
    limited.put(None)
    work()


def _close(queues: _Queues[T], threads: list[threading.Thread], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has none of the threads
    queues.end()
    # The garbage collector runs in any thread, also in a worker: it cannot join itself, and the other workers may wait
    # for a lock that it holds.
    if threading.current_thread() in threads:
        return
    until = monotonic() + END_S
    for thread in threads:
        with suppress(RuntimeError):  # never started, because of an interrupt; if it does start, it ends immediately
            thread.join(max(0.0, until - monotonic()))


class ThreadedBatches(Generic[T]):
    """Makes the batches of one rank in threads of this process; with 0 threads, `take` makes each in the caller's.

    Args:
        pipeline: the steps of the rank, and the work on each.
        num_threads: worker threads.
        prefetch: batches that may be ready or in progress while the caller uses another.
    """

    def __init__(self, pipeline: Pipeline[T], *, num_threads: int, prefetch: int) -> None:
        self._pipeline = pipeline
        self._num_threads, self._prefetch = num_threads, prefetch
        self._threads: WorkerThreads[Any, T] | None = None
        self._unthreaded: Iterator[T] = iter(())

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on."""
        self.stop()
        steps = self._pipeline.steps(epoch, start)
        if self._num_threads:
            self._threads = WorkerThreads(steps, self._pipeline.begin, self._num_threads)
        else:
            begin = self._pipeline.begin  # the generator must not hold this object, which holds it
            self._unthreaded = (begin(step).run() for step in steps)

    def take(self, epoch: int, step: int) -> T:
        """Wait for the next batch, which is that of the given step; raises what its worker raised."""
        self._pipeline.current_epoch = epoch
        if self._threads is None:
            return next(self._unthreaded)
        self._fill(self._threads)
        made = self._threads.take()
        # Filled again after the take: with a prefetch of 1 no batch would be made while the caller uses this one.
        self._fill(self._threads)
        return made

    def stop(self) -> None:
        """Make no more batches, and drop those that were made."""
        self._unthreaded = iter(())
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def close(self) -> None:
        """End the threads; `begin` starts others."""
        self.stop()

    def _fill(self, threads: WorkerThreads[Any, T]) -> None:
        while len(threads) < self._prefetch:
            threads.ask()
