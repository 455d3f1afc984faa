"""Worker threads: they make tasks ahead of whoever takes the results, which come in the order of the tasks.

They are daemons, so that no program waits for a server that does not answer, and are ended before the interpreter is.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

import torch

from mmdata.loader.assemble import Made, Task
from mmdata.loader.tasks import Tasks
from mmdata.loader.worker import Worker

T = TypeVar("T")
END_S = 5.0
"""Seconds that threads are waited for: they end at the next row, unless a user's transform or a disk hangs."""


class WorkerThreads(Generic[T]):
    """Threads that take turns at taking a task, and then make it. They end with this object.

    Args:
        tasks: iterated in the threads, one at a time.
        make: called with a task, and with an event that is set when nobody wants the result any more.
        count: of threads; each has one thread of torch, since more would compete with the other workers' cores. The
            caller's own number of threads stays as it is.
    """

    def __init__(
        self, tasks: Generator[Task, None, None], make: Callable[[Task, threading.Event], T], count: int
    ) -> None:
        self._ahead: deque[Future[T]] = deque()
        self._jobs: SimpleQueue[Future[T] | None] = SimpleQueue()
        self._stop = threading.Event()
        turn = threading.Lock()
        work = (self._jobs, tasks, make, self._stop, turn)
        threads = [threading.Thread(target=_work, args=work, name=f"mmdata-worker_{i}") for i in range(count)]
        for thread in threads:
            thread.daemon = True
            thread.start()
        # Also called when this object goes, and at the end of the program.
        self.close = weakref.finalize(self, _close, self._jobs, tasks, self._stop, threads, self._ahead, os.getpid())

    def __len__(self) -> int:
        """Results that were asked for and not taken yet."""
        return len(self._ahead)

    def ask(self) -> None:
        """Have the next task made."""
        future: Future[T] = Future()
        self._ahead.append(future)
        self._jobs.put(future)
        if self._stop.is_set():
            future.cancel()

    def take(self) -> T:
        """The next result, as soon as it is there.

        Raises:
            StopIteration: there are no more tasks.
            CancelledError: the threads have been ended.
            Exception: what `tasks` or `make` raised.
        """
        return self._ahead.popleft().result()


def _work(
    jobs: SimpleQueue[Future[T] | None],
    tasks: Generator[Task, None, None],
    make: Callable[[Task, threading.Event], T],
    stop: threading.Event,
    turn: threading.Lock,
) -> None:
    """One thread. It knows nothing of whoever takes the results, who may then go at any moment."""
    torch.set_num_threads(1)
    while True:
        with turn:  # so that the n-th result is that of the n-th task
            future = jobs.get()
            if future is None:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                task = next(tasks)
            except BaseException as error:
                future.set_exception(error)
                continue
        try:
            future.set_result(make(task, stop))
        except BaseException as error:
            future.set_exception(error)
        del future, task  # or a batch that was dropped would live until the next one is made


def _close(
    jobs: SimpleQueue[Future[T] | None],
    tasks: Generator[Task, None, None],
    stop: threading.Event,
    threads: list[threading.Thread],
    ahead: deque[Future[T]],
    owner: int,
) -> None:
    if os.getpid() != owner:
        return  # a forked child has none of the threads
    stop.set()
    for future in list(ahead):
        future.cancel()
    for _ in threads:
        jobs.put(None)
    until = monotonic() + END_S
    for thread in threads:
        if thread is not threading.current_thread():  # the garbage collector may run in any
            thread.join(max(0.0, until - monotonic()))
    if not any(thread.is_alive() for thread in threads):
        tasks.close()


class ThreadedBatches:
    """The batches of one rank, made in threads of this process, or (0 threads) when they are taken.

    Args:
        tasks: of the rank.
        worker: makes them.
        count: of threads.
        room: batches that may be ready or being made.
    """

    def __init__(self, tasks: Tasks, worker: Worker, *, count: int, room: int) -> None:
        self._tasks, self._worker = tasks, worker
        self._count, self._room = count, room
        self._threads: WorkerThreads[Made] | None = None
        self._here: Iterator[Made] = iter(())

    def begin(self, epoch: int, start: int, *, onward: bool) -> None:
        """Make the batches from step `start` of an epoch on; `onward`: also those of the epochs after it."""
        self.stop()
        tasks = self._tasks.begin(epoch, start, onward=onward)
        if self._count:
            self._threads = WorkerThreads(tasks, self._worker.make, self._count)
        else:
            self._here = map(self._worker.make, tasks)

    def take(self, epoch: int, step: int) -> Made:
        """The next batch, which is that of the given step.

        Raises:
            LoadError, DataError, ConfigError: see `Worker.make`.
        """
        self._tasks.asked = epoch
        if self._threads is None:
            return next(self._here)
        while len(self._threads) < self._room:
            self._threads.ask()
        return self._threads.take()

    def stop(self) -> None:
        """Make no more, and give up what was made."""
        self._here = iter(())
        if self._threads:
            self._threads.close()
            self._threads = None
