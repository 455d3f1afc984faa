"""Cores for workers; a function called for several items in threads or processes; what a fork must find free.

A process that is started here imports nothing of the program that started it, and ends with it. A thread may wait for a
server: a program that ends does not wait for it.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from time import monotonic
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast
from weakref import ref

from mmdata.errors import ConfigError, DataError
from mmdata.system import IS_POSIX

WORTH_BYTES = 2**28
"""Bytes of tars from which on several processes are faster than one: each takes half a second to start."""
STEP_S = 0.2
"""Seconds between two reports of how far an item is."""
AHEAD = 64
"""Calls for each thread that may be made before the result of the first is taken, if nothing else is said."""
JOIN_S = 5.0
"""Longest wait for the threads at the end: one may wait for a server that does not answer."""
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from mmdata.processes import main; main()"

NumWorkers = int | Literal["auto"]
"""The type of `data.loading.num_workers`; "auto" is all usable cores of the rank."""

T = TypeVar("T")
R = TypeVar("R")
Step = Callable[[int], None]
"""Told how far an item is."""

held = set[int]()
"""Descriptors of files that this process has locked. A child would share these locks, and keep them."""
THREADS_A_PROCESS = 4
"""Workers of a worker process. A row takes 0.2 ms in which its thread holds Python's lock (the GIL), so that a process
makes less than 5,000 rows a second however many threads it has."""
MOST_PROCESSES = 8
"""Each takes the memory of one more interpreter."""
_locks = set[ref[Lock]]()


def most_workers(num_workers: NumWorkers) -> int:
    """The number of workers that a setting stands for."""
    return usable_cores() if num_workers == "auto" else num_workers


def worker_processes(num_workers: NumWorkers) -> int:
    """The number of processes, at least 1, that share so many workers beside a GPU."""
    return max(1, min(MOST_PROCESSES, -(-most_workers(num_workers) // THREADS_A_PROCESS)))


def usable_cores(environment: Mapping[str, str] | None = None, *, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores for the workers of one rank, at least 1.

    They are the cores that this process may run on, within the container's quota, divided by the number of ranks of
    this host (LOCAL_WORLD_SIZE, set by torchrun).
    """
    quota = cpu_quota(cgroup)
    cores = num_cores() if quota is None else min(num_cores(), max(1, int(quota)))
    ranks = (os.environ if environment is None else environment).get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(ranks) if ranks.isdecimal() else 1))


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the container's quota (cgroup v2 or v1) allows; None without a quota."""
    try:
        words = (root / "cpu.max").read_text().split()
    except OSError:
        try:
            words = [(root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    return None if words[0] in ("max", "-1") else int(words[0]) / int(words[1])


class ItemEvent(NamedTuple):
    """What a process tells of an item.

    Attributes:
        place: of the item, from 0.
        kind: "step", "done" or "failed".
        content: how far the item is, the result, or the error.
    """

    place: int
    kind: Literal["step", "done", "failed"]
    content: Any


def workers_for(num_bytes: int, num_workers: int | None) -> int:
    """Processes that read so many bytes of tars: those asked for, or one for each core if there is enough to read.

    On Windows it is one: there no process inherits a pipe.
    """
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"num_workers (--workers) {num_workers}: must be at least 1")
    return (num_workers or (usable_cores() if num_bytes >= WORTH_BYTES else 1)) if IS_POSIX else 1


def map_in_processes(
    function: Callable[[T, Step], R],
    items: Sequence[T],
    *,
    names: Sequence[str],
    workers: int,
    step: Callable[[int], Step],
) -> Iterator[R]:
    """The results of `function(item, step)` for each item, in order; the first error in this order is raised.

    Args:
        function, items: see `events_of_processes`.
        names: of the items, for messages.
        workers: processes; 1: this one.
        step: of the place of an item, gives what is told how far it is, in this process.

    Raises:
        DataError: a process died; names the item that it was at work on.
    """
    workers = min(workers, len(items))
    if workers < 2:
        for place, item in enumerate(items):
            yield function(item, step(place))
        return
    done: dict[int, ItemEvent] = {}
    following = 0
    for event in events_of_processes(function, items, name=lambda place: f"'{names[place]}'", workers=workers):
        if event.kind == "step":
            step(event.place)(event.content)
            continue
        done[event.place] = event
        while following in done:
            first = done.pop(following)
            following += 1
            if first.kind == "failed":
                raise first.content
            yield first.content


def events_of_processes(
    function: Callable[[T, Step], R],
    items: Iterable[T],
    *,
    name: Callable[[int], str],
    workers: int,
) -> Iterator[ItemEvent]:
    """What processes tell of `function(item, step)` for each item, as it comes.

    Args:
        function: and the items and results are sent from process to process: they can be pickled.
        items: taken as processes need them, and one ahead.
        name: of the item at a place, for messages.
        workers: most processes; there are no more of them than items.

    Raises:
        DataError: a process died; names the item that it was at work on.
    """
    started: list[_Worker] = []
    numbered = enumerate(items)
    following = next(numbered, None)
    try:
        while True:
            for number in range(workers):
                if following is None:
                    break
                if number == len(started):
                    started.append(_Worker(function))
                if started[number].place is None:
                    started[number].give(*following)
                    following = next(numbered, None)
            busy = {worker.connection: worker for worker in started if worker.place is not None}
            if not busy:
                return
            for connection in cast("list[Connection]", wait(list(busy))):
                yield busy[connection].receive(name)
    finally:
        for worker in started:
            worker.end()


def map_concurrently(
    function: Callable[[T], R], items: Iterable[T], *, threads: int, end: Callable[[], object], ahead: int = AHEAD
) -> Iterator[R]:
    """The results of `function` for each item, in order; the first error in this order is raised.

    Unlike those of a ThreadPoolExecutor, the threads are daemons, which the interpreter does not wait for.

    Args:
        function: called in one of the threads.
        items: given to it.
        threads: how many.
        end: called when the iteration ends, also early: ends the calls that are under way. No other begins then.
        ahead: calls for each thread that may be made before the result of the first is taken.
    """
    tasks: SimpleQueue[tuple[Future[R], T] | None] = SimpleQueue()
    waiting: deque[Future[R]] = deque()

    def work() -> None:
        while (task := tasks.get()) is not None:
            future, item = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(item))
                except BaseException as error:
                    future.set_exception(error)

    workers = [threading.Thread(target=work, name="mmdata-tars", daemon=True) for _ in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for item in items:
            future: Future[R] = Future()
            waiting.append(future)
            tasks.put((future, item))
            if len(waiting) >= ahead * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in workers:
            tasks.put(None)
        end()
        until = monotonic() + JOIN_S
        for worker in workers:
            with suppress(RuntimeError):  # never started, because of an interrupt
                worker.join(max(0.0, until - monotonic()))


class _Worker:
    """A process.

    Attributes:
        connection: to it.
        place: of the item that it is at work on; None: it waits for one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.place: int | None = None
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to all processes of a terminal; the first one decides
            )
        self._send(function)

    def give(self, place: int, item: object) -> None:
        """Give it the item at a place."""
        self.place = place
        self._send(item)

    def receive(self, name: Callable[[int], str]) -> ItemEvent:
        """What it tells of its item."""
        assert self.place is not None
        try:
            event = ItemEvent(self.place, *self.connection.recv())
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise DataError(
                f"a process died ({how}) at work on {name(self.place)}; has the machine memory enough? "
                "--workers 1 needs least"
            ) from None
        if event.kind != "step":
            self.place = None
        return event

    def end(self) -> None:
        """Kill it."""
        self.connection.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; receiving tells
            self.connection.send(message)


def main() -> None:
    """Serve the process that started this one, until it ends."""
    connection, told = Connection(int(sys.argv[1])), monotonic()
    ignore_warnings_of_pillow()
    hung_up = select.poll()
    hung_up.register(connection, 0)  # the end of the other side is told without being asked for
    threading.Thread(target=lambda: (hung_up.poll(), os._exit(0)), daemon=True).start()

    def receive() -> bytes:
        try:
            return connection.recv_bytes()
        except (EOFError, OSError):  # it has ended, maybe in the middle of a message
            os._exit(0)

    def send(kind: str, content: object) -> None:
        try:
            connection.send((kind, content))
        except ConnectionError:
            os._exit(0)

    def step(offset: int) -> None:
        nonlocal told
        if monotonic() - told > STEP_S:
            told = monotonic()
            send("step", offset)

    function, pickled = None, receive()
    while True:
        item = receive()
        try:
            function = function or pickle.loads(pickled)  # here: why it cannot be read is told as the item's failure
            result = function(pickle.loads(item), step)
        except Exception as error:
            send("failed", _sendable(error))
        else:
            send("done", result)


def ignore_warnings_of_pillow() -> None:
    """Odd metadata gives a warning in other words for each file, which names none; what cannot be read is an error."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


def _sendable(error: Exception) -> Exception:
    """The error if it can be sent; else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a pickle does
        return DataError(f"{type(error).__name__}: {error}")
    return error


def new_lock() -> Lock:
    """A lock that is free in a forked child, whichever thread of the parent held it.

    What it guards must be of use after each single operation: the thread that held it may have been between two.
    """
    lock = Lock()
    # `discard` is C code, in which no interrupt is lost. A WeakSet would run Python code when the lock is collected.
    _locks.add(ref(lock, _locks.discard))
    return lock


class cached_property(Generic[T]):
    """`functools.cached_property` without the lock that it has before Python 3.12, one for all objects of a class."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> T:
        if instance is None:  # asked of the class, by `help` for one
            return cast("T", self)
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


def _free_in_child() -> None:
    for reference in list(_locks):
        if (lock := reference()) is not None and lock.locked():
            lock.release()
    for descriptor in held:
        os.close(descriptor)
    held.clear()


if IS_POSIX:
    os.register_at_fork(after_in_child=_free_in_child)
