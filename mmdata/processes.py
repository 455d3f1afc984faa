"""Calls a function for several items, in threads or in processes of this machine, whose results come in order.

A process starts in scripts and notebooks alike, imports nothing of the program that started it, and ends with it. A
thread may wait for a server: a program that ends does not wait for it.
"""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar, cast

from mmdata.cores import usable_cores
from mmdata.errors import ConfigError, DataError

WORTH_BYTES = 2**28
"""Bytes of tars from which on several processes are faster than one: each takes half a second to start."""
STEP_S = 0.2
"""Seconds between two reports of how far an item is."""
AHEAD = 64
"""Calls for each thread that may be made before the result of the first is taken, if nothing else is said."""
JOIN_S = 5.0
"""Longest wait for the threads at the end: one may wait for a server that does not answer."""
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from mmdata.processes import main; main()"

logger = logging.getLogger("mmdata")

T = TypeVar("T")
R = TypeVar("R")
Step = Callable[[int], None]
"""Told how far an item is."""


def workers_for(num_bytes: int, num_workers: int | None) -> int:
    """Processes that read so many bytes of tars: those asked for, or one for each core if there is enough to read."""
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"num_workers (--workers) {num_workers}: must be at least 1")
    return num_workers or (usable_cores() if num_bytes >= WORTH_BYTES else 1)


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
        function: and the items and results are sent from process to process: they can be pickled.
        items: given to it, in their order.
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
    started: list[_Worker] = []
    try:
        for _ in range(workers):
            started.append(_Worker(function))
        done: dict[int, Any] = {}
        following = iter(range(len(items)))
        for worker in started:
            worker.give(next(following, -1), items)
        for place in range(len(items)):
            while place not in done:
                for worker in _ready(started):
                    kind, content = worker.receive(names)
                    if kind == "step":
                        step(worker.place)(content)
                    elif kind == "log":
                        logger.log(*content)
                    else:
                        done[worker.place] = (kind, content)
                        worker.give(next(following, -1), items)
            kind, content = done.pop(place)
            if kind == "failed":
                raise content
            yield content
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
    workers = [threading.Thread(target=_work, args=(function, tasks), name="mmdata-tars") for _ in range(threads)]
    waiting: deque[Future[R]] = deque()
    try:
        for worker in workers:
            worker.daemon = True
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
            worker.join(max(0.0, until - monotonic()))


def _work(function: Callable[[T], R], tasks: SimpleQueue[tuple[Future[R], T] | None]) -> None:
    while (task := tasks.get()) is not None:
        future, item = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(item))
        except BaseException as error:
            future.set_exception(error)


def _ready(workers: list[_Worker]) -> list[_Worker]:
    ready = cast("list[Connection]", wait([one.connection for one in workers if one.place >= 0]))
    return [one for one in workers if one.connection in ready]


class _Worker:
    """A process.

    Attributes:
        connection: to it.
        place: of the item that it is at work on; -1: none.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.place = -1
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to all processes of a terminal; the first one decides
            )
        self._send(function)

    def give(self, place: int, items: Sequence[Any]) -> None:
        """Give it the item at this place; -1: none."""
        self.place = place
        if place >= 0:
            self._send(items[place])

    def receive(self, names: Sequence[str]) -> tuple[str, Any]:
        """What it says: a kind and its content."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise DataError(
                f"a process died ({how}) at work on '{names[self.place]}'; has the machine memory enough? "
                "--workers 1 needs least"
            ) from None

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
    connection = Connection(int(sys.argv[1]))
    logger.addHandler(_Forward(connection))
    logger.propagate = False
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        function = connection.recv()
        while True:
            item = connection.recv()
            try:
                answer = ("done", function(item, _Steps(connection)))
            except (BrokenPipeError, ConnectionResetError):
                return
            except Exception as error:
                answer = ("failed", _sendable(error))
            connection.send(answer)


class _Steps:
    """Tells the first process how far an item is, a few times a second."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._told = connection, monotonic()

    def __call__(self, offset: int) -> None:
        if monotonic() - self._told > STEP_S:
            self._told = monotonic()
            self._connection.send(("step", offset))


class _Forward(logging.Handler):
    """Sends log records to the first process, where the user's handlers are."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self._connection.send(("log", (record.levelno, "%s", record.getMessage())))


def _sendable(error: Exception) -> Exception:
    """The error if it can be sent; else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a pickle does
        return DataError(f"{type(error).__name__}: {error}")
    return error
