"""Worker threads: they share the units of one batch after the other, and results come in the order of the tasks.

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
from time import monotonic, perf_counter
from typing import Generic, TypeVar

import torch

from mmdata.cores import NumWorkers, usable_cores
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.work import LoadedBatch, Task, Work
from mmdata.loader.workers.autotune import START, Tuner
from mmdata.loader.workers.promise import Promise, Stop
from mmdata.loader.workers.steps import RankSteps
from mmdata.loader.workers.turns import Turns

T = TypeVar("T")
TaskT = TypeVar("TaskT")
END_S = 5.0
"""Seconds that threads are waited for: they end at the next row, unless a user's transform or a disk hangs."""


class WorkerThreads(Generic[TaskT, T]):
    """Threads that begin a task in turn, and share its units. They end with this object.

    Args:
        tasks: iterated in the threads, one at a time.
        begin: called with a task, and with an event that is set when nobody wants the result any more.
        count: of threads; each has one thread of torch, since more would compete with the other workers' cores. The
            caller's own number of threads stays as it is.
        name: what the threads' names begin with. Clocks are kept by these names, so threads whose clocks are added up
            in one loader must differ in them, also when they are threads of different processes.
    """

    def __init__(
        self,
        tasks: Generator[TaskT, None, None],
        begin: Callable[[TaskT, threading.Event], Work[T]],
        count: int,
        *,
        name: str = "mmdata-worker",
    ) -> None:
        self._name = name
        self._ahead: deque[Promise[T]] = deque()
        self._line = _WorkQueue(tasks, begin)
        self._threads: list[threading.Thread] = []
        # Called by `close`, when this object goes, and at the end of the program.
        self._owner = os.getpid()
        self._finalize = weakref.finalize(self, _close, self._line, self._threads, self._owner)
        self.resize(count)

    def __len__(self) -> int:
        """Results that were asked for and not taken yet."""
        return len(self._ahead)

    def resize(self, count: int) -> None:
        """Have so many threads; one too many ends after its unit."""
        new = self._line.resize(count)
        if not new:
            return
        callers = torch.get_num_threads()
        limited: SimpleQueue[int] = SimpleQueue()
        self._threads[:] = [one for one in self._threads if one.ident is None or one.is_alive()]
        try:
            for name in new:
                thread = threading.Thread(target=_work, args=(self._line, name, limited), daemon=True)
                thread.name = f"{self._name}_{name}"
                self._threads.append(thread)  # before it starts: an interrupt may come while it does
                thread.start()
            for _ in new:
                limited.get()
        finally:
            # What a worker says holds for it alone, but new threads begin with the last word.
            torch.set_num_threads(callers)

    def close(self) -> None:
        """End the threads, and wait a while until they have."""
        try:
            if self._finalize.alive and self._owner == os.getpid():  # a forked child has none of the threads
                self._line.end()
        finally:  # an interrupt may come at any line, and a finalizer that it has reached does not run again
            self._finalize()

    def ask(self) -> None:
        """Have the next task made."""
        promise: Promise[T] = Promise()
        self._ahead.append(promise)
        self._line.ask(promise)

    def take(self) -> T:
        """The next result, as soon as it is there.

        Raises:
            StopIteration: there are no more tasks.
            CancelledError: the threads have been ended.
            Exception: what `tasks`, `begin` or its job raised.
        """
        return self._ahead.popleft().take()


class _WorkQueue(Generic[TaskT, T]):
    """Where threads find work. It knows nothing of whoever takes the results, who may go at any moment."""

    def __init__(self, tasks: Generator[TaskT, None, None], begin: Callable[[TaskT, threading.Event], Work[T]]) -> None:
        self.tasks = Turns(tasks)
        self.stop = Stop()
        # Its holder may take it again: see `_close`. It is entered itself, not through `_changed`: see `promise`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # waited for by the threads alone
        self._begin = begin
        self._beginning = False  # tasks are begun one at a time, so that the n-th result is that of the n-th task
        self._asked: deque[Promise[T]] = deque()  # for tasks to begin
        self._units: deque[Callable[[], None]] = deque()  # of batches in progress, the oldest first
        self._count = 0
        self._working: set[int] = set()  # the threads

    def resize(self, count: int) -> list[int]:
        """Have so many threads; returns those that are to be started."""
        with self._lock:
            self._count = count
            new = [name for name in range(count) if name not in self._working]
            self._working.update(new)
            self._changed.notify_all()
        return new

    def ask(self, promise: Promise[T]) -> None:
        """Have the next task made, to keep this promise."""
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

    def next_work(self, thread: int) -> Callable[[], None] | None:
        """Wait for something to do: a unit, or else to begin a batch. None: there is no more for this thread."""
        with self._lock:
            while thread < self._count:
                if self._units:
                    return self._units.popleft()
                if self.stop.is_set():
                    break
                if self._asked and not self._beginning:
                    self._beginning = True
                    return partial(self._begin_next, self._asked.popleft())
                self._changed.wait()
            self._working.remove(thread)
            return None

    def _begin_next(self, promise: Promise[T]) -> None:
        units: list[Callable[[], None]] = []
        try:
            batch = _PendingBatch(self._begin(self._next_task(), self.stop), promise, self.stop)
            units = [partial(batch.do, unit) for unit in batch.job.units]
        except BaseException as error:
            promise.fail(error)
            del promise  # or it, the error and its traceback, which has this frame, would keep each other
        with self._lock:
            self._beginning = False
            self._units += units
            self._changed.notify_all()

    def _next_task(self) -> TaskT:
        try:
            return next(self.tasks)
        except StopIteration:
            if self.stop.is_set():  # they were closed: whoever waits must not take this for their end
                raise CancelledError from None
            raise


class _PendingBatch(Generic[T]):
    """A batch in progress: whoever does its last unit finishes it; its first error is its end."""

    def __init__(self, job: Work[T], promise: Promise[T], stop: threading.Event) -> None:
        self.job = job
        self._promise, self._stop = promise, stop
        self._left = len(job.units)
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
                self._promise.keep(self.job.finish())
        except BaseException as error:
            with self._lock:
                first, self._failed = not self._failed, True
            if first:
                self._promise.fail(error)
            del self  # or the batch's memory would be kept by its own error, whose traceback has this frame


def _work(line: _WorkQueue[TaskT, T], thread: int, limited: SimpleQueue[int]) -> None:
    torch.get_num_threads()  # a thread's first use of torch's threads would set its number anew
    torch.set_num_threads(1)
    limited.put(thread)
    while work := line.next_work(thread):
        work()
        del work  # or a batch that was dropped would live until there is more to do


def _close(line: _WorkQueue[TaskT, T], threads: list[threading.Thread], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has none of the threads
    line.end()
    if threading.current_thread() in threads:
        return  # the garbage collector may run in any; the others may wait for what this one holds
    until = monotonic() + END_S
    for thread in threads:
        with suppress(RuntimeError):  # interrupted while it was started: it finds nothing to do
            thread.join(max(0.0, until - monotonic()))
    line.tasks.close()


class ThreadedBatches:
    """The batches of one rank, made in threads of this process, or (0 threads) when they are taken.

    Args:
        tasks: of the rank.
        worker: makes them.
        count: of threads; auto: as many as `Tuner` finds that they are needed.
        room: batches that may be ready or being made, beside the one that was taken last.
    """

    def __init__(self, tasks: RankSteps, worker: BatchMaker, *, count: NumWorkers, room: int) -> None:
        self._tasks, self._worker = tasks, worker
        self._tuner = Tuner(most=usable_cores(), ahead=room) if count == "auto" else None
        self._count, self._room = (START if count == "auto" else count), room
        self._taken_at = 0.0  # by the clock
        self._threads: WorkerThreads[Task, LoadedBatch] | None = None
        self._here: Iterator[LoadedBatch] = iter(())

    def begin(self, epoch: int, start: int, *, onward: bool) -> None:
        """Make the batches from step `start` of an epoch on; `onward`: also those of the epochs after it."""
        self.stop()
        tasks = self._tasks.begin(epoch, start, onward=onward)
        if self._count:
            count = self._tuner.count if self._tuner else self._count
            self._threads = WorkerThreads(tasks, self._worker.begin, count)
        else:
            self._here = map(self._worker.make, tasks)

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """The next batch, which is that of the given step.

        Raises:
            LoadError, DataError, ConfigError: see `Assembler.begin`.
        """
        self._tasks.asked = epoch
        if self._threads is None:
            return next(self._here)
        self._ask(self._threads)
        asked_at = perf_counter()
        made = self._threads.take()
        if self._tuner:
            now, before = perf_counter(), self._taken_at
            self._taken_at = now
            if step == 0 or not before:
                self._tuner.pause()  # there may have been an evaluation between the epochs
            self._threads.resize(self._tuner.add(made.stats.rows, now - before, now - asked_at))
        self._ask(self._threads)  # or with a room of one nothing would be made while the caller works on this one
        return made

    def stop(self) -> None:
        """Make no more, and give up what was made."""
        self._here, self._taken_at = iter(()), 0.0
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def _ask(self, threads: WorkerThreads[Task, LoadedBatch]) -> None:
        while len(threads) < self._room:
            threads.ask()
