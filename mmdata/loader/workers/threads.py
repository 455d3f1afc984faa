"""Worker threads: all threads share the units of one batch, then of the next; results come in the order of the steps.

So the latency of a batch falls with the number of threads, and its memory does not grow with it. One more thread takes
the steps and begins them. Threads are daemons: a program that ends does not wait for a server that does not answer.
They are ended before the interpreter is.

`concurrent.futures.Future`, `threading.Event` and `threading.Condition` enter and leave their locks in lines of Python.
A Ctrl-C between two of these lines, in the main thread, leaves a lock held, so that other threads wait for ever, or
releases it twice, which is a RuntimeError. `SimpleQueue`, `Promise` and `Stop` wait and wake in a single call into C.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from queue import SimpleQueue
from time import monotonic
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")
Begin = Callable[[Any, threading.Event], "Work"]
END_S = 5.0
"""Seconds for which `stop` waits for the threads. They end at the next row, unless a transform or a disk hangs."""


class Work(NamedTuple):
    """Work in units, which threads may do concurrently.

    Attributes:
        units: each is called once, in any order; no further one after one has raised.
        finish: called once, when all units have returned; returns the result.
    """

    units: Sequence[Callable[[], None]]
    finish: Callable[[], Any]

    def run(self) -> Any:
        """Do all of it in the caller's thread."""
        for unit in self.units:
            unit()
        return self.finish()


class Pipeline(Protocol):
    """The steps of one rank, and how each becomes a batch.

    Attributes:
        current_epoch: the epoch of the batches that the caller takes.
    """

    current_epoch: int

    def steps(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """The steps from step `start` of an epoch on, and those of the next epochs, until an epoch has no steps."""
        ...

    def begin(self, step: Any, stop: threading.Event | None = None) -> Work:
        """The work on a step. Its units raise Interrupted once `stop` is set."""
        ...

    def stop(self) -> None:
        """End what a step waits for; called before the threads are ended."""
        ...


class ThreadedBatches(Generic[T]):
    """Makes the batches of one rank in threads of this process; with 0 threads, `take` makes each in the caller's.

    The threads end with this object.

    Args:
        pipeline: the steps of the rank, and the work on each.
        num_threads: that do the units. Each uses one thread of torch, since more would compete for the other workers'
            cores; the caller's own `torch.get_num_threads` does not change.
        prefetch: batches that may be ready or in progress while the caller uses another.
        part: (p, n): of the steps every n-th, from the p-th on.
        name: prefix of the threads' names. `Stats.workers` keeps its sums by these names, so the threads of several
            processes of one loader need prefixes of their own.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        num_threads: int,
        prefetch: int,
        part: tuple[int, int] = (0, 1),
        name: str = "mmdata-worker",
    ) -> None:
        self._pipeline, self._num_threads, self._prefetch = pipeline, num_threads, prefetch
        self._part, self._name = part, name
        self._asked: deque[Promise[T]] = deque()  # not taken yet, oldest first
        self._unthreaded: Iterator[T] = iter(())
        self._queues: _Queues[T] | None = None  # of the threads that run
        self._owner = 0  # the process that has them

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on; drops those that were made."""
        self.stop()
        steps, begin = _every(self._pipeline.steps(epoch, start), *self._part), self._pipeline.begin
        if not self._num_threads:
            self._unthreaded = (begin(step).run() for step in steps)
            return
        queues: _Queues[T] = _Queues(self._num_threads)
        threads: list[threading.Thread] = []
        self._owner = os.getpid()
        # `_close` runs when `stop` is called, when this object is collected, or when the program ends. It gets the
        # queues and the threads, not this object: a finalizer that refers to its object would keep it alive.
        self._finalize = weakref.finalize(self, _close, queues, threads, self._owner)
        self._queues = queues  # last: `stop` needs the others
        work = {f"{self._name}_steps": partial(_begin_steps, steps, begin, queues)}
        work |= {f"{self._name}_{number}": partial(_do_units, queues) for number in range(self._num_threads)}
        _start(work, threads)

    def take(self, epoch: int, step: int) -> T:
        """Wait for the next batch, which is that of the given step.

        Raises:
            StopIteration: there are no more steps.
            CancelledError: the threads have been ended.
            Exception: what the pipeline or its work raised.
        """
        self._pipeline.current_epoch = epoch
        if not self._num_threads:
            return next(self._unthreaded)
        self._fill()
        made = self._asked.popleft().take()
        # Filled again after the take: with a prefetch of 1 no batch would be made while the caller uses this one.
        self._fill()
        return made

    def ask(self, promise: Promise[T]) -> None:
        """Have the next batch made, for a promise that `take` does not wait for."""
        if (queues := self._queues) is not None:
            queues.asked.put(promise)
        if queues is None or queues.stop.is_set():  # the thread that begins steps may have ended already
            promise.fail(CancelledError())

    def stop(self) -> None:
        """Make no more batches, and drop those that were made; `begin` starts again."""
        self._unthreaded = iter(())
        self._asked.clear()
        if (queues := self._queues) is None:  # another thread may stop it, too
            return
        try:
            # A finalizer runs once. If an interrupt cut it short, the threads would never be told to end: so they are
            # told before it.
            if self._finalize.alive and self._owner == os.getpid():  # a forked child has none of the threads
                queues.end()
        finally:
            self._finalize()
        self._queues = None

    def close(self) -> None:
        """End the threads; `begin` starts others."""
        self.stop()

    def _fill(self) -> None:
        while len(self._asked) < self._prefetch:
            promise: Promise[T] = Promise()
            self._asked.append(promise)  # first: after an interrupt the next take must not skip a batch
            self.ask(promise)


class _Queues(Generic[T]):
    """Where the threads find work. It has no reference to `ThreadedBatches`, which can so be collected while they wait.

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


class Promise(Generic[T]):
    """One result, which one thread makes and another takes once."""

    def __init__(self) -> None:
        # A SimpleQueue puts and gets in C: no interrupt can leave its lock held.
        self._box: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def keep(self, result: T) -> None:
        """Give the result."""
        self._box.put((result, None))

    def fail(self, error: BaseException) -> None:
        """Give an error, which `take` raises. After an earlier result or error it has no effect."""
        self._box.put((None, error))

    def take(self) -> T:
        """Wait for the result; raises the error that was given instead."""
        result, error = self._box.get()
        if error is None:
            return result
        try:
            raise error
        finally:
            # The error's traceback refers to this frame: without `del` they would keep each other, and the batch's
            # memory, until the garbage collector runs.
            del self, error


class Stop(threading.Event):
    """An event that is set once, for good: what is being made is not wanted any more."""

    def __init__(self) -> None:
        super().__init__()
        self._stopped = False
        # Held until the event is set. To wait is to acquire it, which is one call into C; `Event.wait` is many lines.
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._stopped

    def set(self) -> None:
        """Set it, and wake all threads that wait."""
        # The flag first: if an interrupt comes before the gate opens, workers still see that they are to end.
        self._stopped = True
        with suppress(RuntimeError):  # the gate was open already
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most `timeout` seconds; returns whether it is set."""
        if self._gate.acquire(timeout=-1 if timeout is None else timeout):
            # Each thread that passes opens the gate for the next. A second `set` may have opened it meanwhile.
            with suppress(RuntimeError):
                self._gate.release()
        return self._stopped


def _start(work: dict[str, Callable[[], None]], threads: list[threading.Thread]) -> None:
    callers = torch.get_num_threads()
    limited: SimpleQueue[None] = SimpleQueue()  # one item for each thread that has set its number of torch threads
    names = list(work)
    try:
        for name in names:
            thread = threading.Thread(target=_work, args=(work, name, limited), name=name, daemon=True)
            threads.append(thread)  # first: after an interrupt within `start`, `_close` must find it
            thread.start()
        for _ in names:
            limited.get()
    except BaseException:
        # Python keeps a thread forever whose start was interrupted before the system began it. It must not keep the
        # work as well, and with it the plan of a stream, whose own threads end with it.
        work.clear()
        raise
    finally:
        # torch.set_num_threads sets the calling thread's number, and also the number that new threads begin with:
        # without this line the caller's next threads would have 1.
        torch.set_num_threads(callers)


def _every(steps: Generator[T, None, None], first: int, step: int) -> Generator[T, None, None]:
    """Every step-th step, beginning with step number `first`."""
    with closing(steps):  # `islice` does not close what it is given
        yield from islice(steps, first, None, step)


def _begin_steps(steps: Generator[Any, None, None], begin: Begin, queues: _Queues[Any]) -> None:
    try:
        while (promise := queues.asked.get()) is not None:
            _begin_next(steps, begin, queues, promise)
            del promise
    finally:
        steps.close()


def _begin_next(steps: Iterator[Any], begin: Begin, queues: _Queues[Any], promise: Promise[Any]) -> None:
    try:
        if queues.stop.is_set():
            raise CancelledError
        batch = _SharedWork(begin(next(steps), queues.stop), promise, queues.stop)
        for unit in batch.work.units:
            queues.units.put(partial(batch.do, unit))
        if queues.stop.is_set():  # the threads may have ended before these units came
            promise.fail(CancelledError())
    except BaseException as error:
        promise.fail(error)
        # The promise holds the error, whose traceback holds this frame: without `del` they would keep each other.
        del promise


class _SharedWork:
    """Work that threads share. The thread that does the last unit calls `finish`; the first error ends the work."""

    def __init__(self, work: Work, promise: Promise[Any], stop: threading.Event) -> None:
        self.work = work
        self._promise, self._stop = promise, stop
        self._left = len(work.units)
        self._failed = False
        self._lock = threading.Lock()

    def do(self, unit: Callable[[], None]) -> None:
        try:
            if self._stop.is_set() or self._failed:
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


def _do_units(queues: _Queues[Any]) -> None:
    while unit := queues.units.get():
        unit()
        del unit  # it holds its batch, whose memory must not wait until this thread has the next work


def _work(work: dict[str, Callable[[], None]], name: str, limited: SimpleQueue[None]) -> None:
    # The first use of torch in a thread sets its number of threads to the default: so it comes before set_num_threads.
    torch.get_num_threads()
    torch.set_num_threads(1)
    do = work.pop(name, None)
    limited.put(None)
    if do is not None:
        do()


def _close(queues: _Queues[Any], threads: list[threading.Thread], owner: int) -> None:
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
