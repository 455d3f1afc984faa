"""Worker threads: they share the units of one batch after the other, and results come in the order of the steps.

So a batch takes no longer than its rows take all threads together, and more threads take no more memory.
They are daemons, so that no program waits for a server that does not answer, and are ended before the interpreter is.
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
from mmdata.loader.workers.promise import Promise, Stop
from mmdata.loader.workers.steps import RankSteps
from mmdata.loader.workers.turns import Turns
from mmdata.plan import Step

T = TypeVar("T")
StepT = TypeVar("StepT")
END_S = 5.0
"""Seconds that threads are waited for: they end at the next row, unless a user's transform or a disk hangs."""


class WorkerThreads(Generic[StepT, T]):
    """Threads that begin a step in turn, and share its units. They end with this object.

    Args:
        steps: iterated in the threads, one at a time.
        begin: called with a step, and with an event that is set when nobody wants the result any more.
        count: of threads; each has one thread of torch, since more would compete with the other workers' cores. The
            caller's own number of threads stays as it is.
        name: what the threads' names begin with. Clocks are kept by these names, so threads whose clocks are added up
            in one loader must differ in them, also when they are threads of different processes.
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
        self._ahead: deque[Promise[T]] = deque()
        self._queue = _WorkQueue(steps, begin)
        self._threads: list[threading.Thread] = []
        # Called by `close`, when this object goes, and at the end of the program.
        self._owner = os.getpid()
        self._finalize = weakref.finalize(self, _close, self._queue, self._threads, self._owner)
        self._start(count)

    def __len__(self) -> int:
        """Results that were asked for and not taken yet."""
        return len(self._ahead)

    def _start(self, count: int) -> None:
        callers = torch.get_num_threads()
        limited: SimpleQueue[None] = SimpleQueue()
        try:
            for number in range(count):
                thread = threading.Thread(target=_work, args=(self._queue, limited), daemon=True)
                thread.name = f"{self._name}_{number}"
                self._threads.append(thread)  # before it starts: an interrupt may come while it does
                thread.start()
            for _ in range(count):
                limited.get()
        finally:
            # torch.set_num_threads holds for the calling thread alone, but new threads begin with its last value.
            torch.set_num_threads(callers)

    def close(self) -> None:
        """End the threads, and wait a while until they have."""
        try:
            if self._finalize.alive and self._owner == os.getpid():  # a forked child has none of the threads
                self._queue.end()
        finally:  # an interrupt may come at any line, and a finalizer that it has reached does not run again
            self._finalize()

    def ask(self) -> None:
        """Have the next step made."""
        promise: Promise[T] = Promise()
        self._ahead.append(promise)
        self._queue.ask(promise)

    def take(self) -> T:
        """The next result, as soon as it is there.

        Raises:
            StopIteration: there are no more steps.
            CancelledError: the threads have been ended.
            Exception: what `steps`, `begin` or its work raised.
        """
        return self._ahead.popleft().take()


class _WorkQueue(Generic[StepT, T]):
    """Where threads find work. It knows nothing of whoever takes the results, who may go at any moment."""

    def __init__(self, steps: Generator[StepT, None, None], begin: Callable[[StepT, threading.Event], Work[T]]) -> None:
        self.steps = Turns(steps)
        self.stop = Stop()
        # Its holder may take it again: see `_close`. It is entered itself, not through `_changed`: see `promise`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # waited for by the threads alone
        self._begin = begin
        self._beginning = False  # steps are begun one at a time, so that the n-th result is that of the n-th step
        self._asked: deque[Promise[T]] = deque()  # for steps to begin
        self._units: deque[Callable[[], None]] = deque()  # of batches in progress, the oldest first

    def ask(self, promise: Promise[T]) -> None:
        """Have the next step made, to keep this promise."""
        with self._lock:
            self._asked.append(promise)
            if self.stop.is_set():
                promise.cancel()
            self._changed.notify()

    def end(self) -> None:
        """Do no more, and tell whoever waits for what has not been begun."""
        self.stop.set()
        with self._lock:
            for promise in self._asked:
                promise.cancel()
            self._changed.notify_all()

    def next_work(self) -> Callable[[], None] | None:
        """Wait for something to do: a unit, or else a batch to begin. None: the threads are to end."""
        with self._lock:
            while True:
                if self._units:
                    return self._units.popleft()
                if self.stop.is_set():
                    return None
                if self._asked and not self._beginning:
                    self._beginning = True
                    return partial(self._begin_next, self._asked.popleft())
                self._changed.wait()

    def _begin_next(self, promise: Promise[T]) -> None:
        units: list[Callable[[], None]] = []
        try:
            batch = _SharedWork(self._begin(self._next_step(), self.stop), promise, self.stop)
            units = [partial(batch.do, unit) for unit in batch.work.units]
        except BaseException as error:
            promise.fail(error)
            del promise  # or it, the error and its traceback, which has this frame, would keep each other
        with self._lock:
            self._beginning = False
            self._units += units
            self._changed.notify_all()

    def _next_step(self) -> StepT:
        try:
            return next(self.steps)
        except StopIteration:
            if self.stop.is_set():  # they were closed: whoever waits must not take this for their end
                raise CancelledError from None
            raise


class _SharedWork(Generic[T]):
    """Work that threads share: the thread that does its last unit finishes it; its first error is its end."""

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
            del self  # or the batch's memory would be kept by its own error, whose traceback has this frame


def _work(queue: _WorkQueue[StepT, T], limited: SimpleQueue[None]) -> None:
    torch.get_num_threads()  # a thread's first use of torch's threads would set its number anew
    torch.set_num_threads(1)
    limited.put(None)
    while work := queue.next_work():
        work()
        del work  # or a batch that was dropped would live until there is more to do


def _close(queue: _WorkQueue[StepT, T], threads: list[threading.Thread], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has none of the threads
    queue.end()
    if threading.current_thread() in threads:
        return  # the garbage collector may run in any; the others may wait for what this one holds
    until = monotonic() + END_S
    for thread in threads:
        with suppress(RuntimeError):  # interrupted while it was started: it finds nothing to do
            thread.join(max(0.0, until - monotonic()))
    queue.steps.close()


class ThreadedBatches:
    """Makes the batches of one rank in threads of this process, or (0 threads) in the caller's when they are taken.

    Args:
        steps: of the rank.
        maker: makes the batches.
        num_threads: worker threads.
        prefetch: batches that may be ready or being made while the caller works on another.
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
        """The next batch, which is that of the given step.

        Raises:
            LoadError, DataError, ConfigError: see `BatchBuilder`.
        """
        self._steps.current_epoch = epoch
        if self._threads is None:
            return next(self._unthreaded)
        self._ask(self._threads)
        made = self._threads.take()
        self._ask(self._threads)  # with a prefetch of 1 nothing would be made while the caller works on this batch
        return made

    def stop(self) -> None:
        """Make no more, and drop what was made."""
        self._unthreaded = iter(())
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def close(self) -> None:
        """End the threads; `begin` starts others."""
        self.stop()

    def _ask(self, threads: WorkerThreads[Step, LoadedBatch]) -> None:
        while len(threads) < self._prefetch:
            threads.ask()
