"""Worker threads: all threads share the units of one batch, then of the next; results come in the order of the steps.

So the latency of a batch falls with the number of threads, and its memory does not grow with it. Threads are daemons:
a program that ends does not wait for a server that does not answer. They are ended before the interpreter is.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

import torch

from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.work import LoadedBatch, Work
from mmdata.loader.workers.interrupt_safe import Promise, SharedGenerator, Stop
from mmdata.loader.workers.steps import RankSteps
from mmdata.plan import Step

T = TypeVar("T")
StepT = TypeVar("StepT")
END_S = 5.0
"""Seconds for which `close` waits for the threads. They end at the next row, unless a transform or a disk hangs."""


class WorkerThreads(Generic[StepT, T]):
    """Threads that begin one step after the other, and share the units of each. They end with this object.

    Args:
        steps: iterated by the threads, one thread at a time.
        begin: called with a step, and with an event that is set when the results are not wanted any more.
        count: number of threads. Each uses one thread of torch, since more would compete for the other workers' cores;
            the caller's own `torch.get_num_threads` does not change.
        name: prefix of the threads' names. `Stats.workers` keeps its sums by these names, so the threads of several
            processes of one loader need prefixes of their own.
    """

    def __init__(
        self,
        steps: Generator[StepT, None, None],
        begin: Callable[[StepT, threading.Event], Work[T]],
        count: int,
        *,
        name: str = "mmdata-worker",
    ) -> None:
        self._name = name
        self._requested: deque[Promise[T]] = deque()  # oldest first
        self._queue = _WorkQueue(steps, begin)
        self._threads: list[threading.Thread] = []
        self._owner = os.getpid()
        # `_close` runs when `close` is called, when this object is collected, or when the program ends. It gets the
        # queue and the threads, not this object: a finalizer that refers to its object would keep it alive.
        self._finalize = weakref.finalize(self, _close, self._queue, self._threads, self._owner)
        self._start(count)

    def __len__(self) -> int:
        """Results that were requested and not taken yet."""
        return len(self._requested)

    def _start(self, count: int) -> None:
        callers = torch.get_num_threads()
        limited: SimpleQueue[None] = SimpleQueue()  # one item for each thread that has set its number of torch threads
        try:
            for number in range(count):
                thread = threading.Thread(target=_work, args=(self._queue, limited), daemon=True)
                thread.name = f"{self._name}_{number}"
                self._threads.append(thread)  # first: after an interrupt within `start`, `_close` must find it
                thread.start()
            for _ in range(count):
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
                self._queue.end()
        finally:
            self._finalize()

    def ask(self) -> None:
        """Queue the next batch."""
        promise: Promise[T] = Promise()
        self._requested.append(promise)
        self._queue.ask(promise)

    def take(self) -> T:
        """Wait for the next result.

        Raises:
            StopIteration: there are no more steps.
            CancelledError: the threads have been ended.
            Exception: what `steps`, `begin` or its work raised.
        """
        return self._requested.popleft().take()


class _WorkQueue(Generic[StepT, T]):
    """Where the threads find work.

    It has no reference to `WorkerThreads`, which can so be collected while the threads wait here.
    """

    def __init__(self, steps: Generator[StepT, None, None], begin: Callable[[StepT, threading.Event], Work[T]]) -> None:
        self.steps = SharedGenerator(steps)
        self.stop = Stop()
        # Reentrant: the garbage collector may run `_close` in a thread that holds the lock. Entered itself, not through
        # `_changed`: an interrupt within `Condition.__enter__`, which is Python, could leave the lock held.
        self._lock = threading.RLock()
        # Only the worker threads wait for it: interrupts reach the main thread alone.
        self._changed = threading.Condition(self._lock)
        self._begin = begin
        # One thread at a time takes a step and begins it, so that the n-th promise gets the result of the n-th step.
        self._beginning = False
        self._requested: deque[Promise[T]] = deque()  # of steps that no thread has begun
        self._units: deque[Callable[[], None]] = deque()  # of the batches in progress, the oldest batch first

    def ask(self, promise: Promise[T]) -> None:
        """Queue the next batch; the promise gets it."""
        with self._lock:
            self._requested.append(promise)
            if self.stop.is_set():
                promise.cancel()
            self._changed.notify()

    def end(self) -> None:
        """Have the threads end; promises of steps that were not begun get a CancelledError."""
        self.stop.set()
        with self._lock:
            for promise in self._requested:
                promise.cancel()
            self._changed.notify_all()

    def next_work(self) -> Callable[[], None] | None:
        """Wait for work: a unit, or else a step to begin; None: the thread is to end."""
        with self._lock:
            while True:
                # Units before new steps: the oldest batch, for which the caller waits, is finished first.
                if self._units:
                    return self._units.popleft()
                if self.stop.is_set():
                    return None
                if self._requested and not self._beginning:
                    self._beginning = True
                    return partial(self._begin_next, self._requested.popleft())
                self._changed.wait()

    def _begin_next(self, promise: Promise[T]) -> None:
        units: list[Callable[[], None]] = []
        try:
            batch = _SharedWork(self._begin(self._next_step(), self.stop), promise, self.stop)
            units = [partial(batch.do, unit) for unit in batch.work.units]
        except BaseException as error:
            promise.fail(error)
            # The promise holds the error, whose traceback holds this frame: without `del` they would keep each other.
            del promise
        with self._lock:
            self._beginning = False
            self._units += units
            self._changed.notify_all()

    def _next_step(self) -> StepT:
        try:
            return next(self.steps)
        except StopIteration:
            # A closed generator ends as one that has no more steps does: the caller must be able to tell them apart.
            if self.stop.is_set():
                raise CancelledError from None
            raise


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


def _work(queue: _WorkQueue[StepT, T], limited: SimpleQueue[None]) -> None:
    # The first use of torch in a thread sets its number of threads to the default: so it comes before set_num_threads.
    torch.get_num_threads()
    torch.set_num_threads(1)
    limited.put(None)
    while work := queue.next_work():
        work()
        del work  # it holds its batch, whose memory must not wait until this thread has the next work


def _close(queue: _WorkQueue[StepT, T], threads: list[threading.Thread], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has none of the threads
    queue.end()
    # The garbage collector runs in any thread, also in a worker: it cannot join itself, and the other workers may wait
    # for a lock that it holds.
    if threading.current_thread() in threads:
        return
    until = monotonic() + END_S
    for thread in threads:
        with suppress(RuntimeError):  # never started, because of an interrupt; if it does start, it ends immediately
            thread.join(max(0.0, until - monotonic()))
    queue.steps.close()


class ThreadedBatches:
    """Makes the batches of one rank in threads of this process; with 0 threads, `take` makes each in the caller's.

    Args:
        steps: of the rank.
        maker: makes the batches.
        num_threads: worker threads.
        prefetch: batches that may be ready or in progress while the caller uses another.
    """

    def __init__(self, steps: RankSteps, maker: BatchMaker, *, num_threads: int, prefetch: int) -> None:
        self._steps, self._maker = steps, maker
        self._num_threads, self._prefetch = num_threads, prefetch
        self._threads: WorkerThreads[Step, LoadedBatch] | None = None
        self._unthreaded: Iterator[LoadedBatch] = iter(())

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on."""
        self.stop()
        steps = self._steps.begin(epoch, start)
        if self._num_threads:
            self._threads = WorkerThreads(steps, self._maker.begin, self._num_threads)
        else:
            self._unthreaded = map(self._maker.make, steps)

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """Wait for the next batch, which is that of the given step.

        Raises:
            LoadError, DataError, ConfigError: see `BatchBuilder`.
        """
        self._steps.current_epoch = epoch
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

    def _fill(self, threads: WorkerThreads[Step, LoadedBatch]) -> None:
        while len(threads) < self._prefetch:
            threads.ask()
