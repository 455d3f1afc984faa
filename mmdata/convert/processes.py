"""Units in several processes of this machine. They start in scripts and notebooks alike, and import nothing of theirs.

A process that dies is replaced, and its units are made again; one that dies over a unit each time ends the conversion
with an error that names the unit's rows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, cast

from mmdata.convert.engines import Engine, Progress
from mmdata.convert.staging import Receipt
from mmdata.convert.unit import Job, Unit
from mmdata.errors import DataError

RETRIES = 1
"""Times that a unit is made again after the process that made it died."""
_MEMORY = "; has the machine memory enough? --workers 1 needs least"
AHEAD = 2
"""Units that a process holds, the one in work included."""

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from mmdata.convert.worker import main; main()"


def processes(num_workers: int | None = None) -> Engine:
    """An engine of processes.

    Args:
        num_workers: processes; None takes one for each core.
    """
    workers = num_workers or os.cpu_count() or 1

    def run(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        pool = _Pool(job, iter(units), workers)
        try:
            yield from pool.run()
        finally:
            pool.close()

    return run


class _Pool:
    """The processes and the units that they hold."""

    def __init__(self, job: Job, units: Iterator[Unit], workers: int) -> None:
        self._job = job
        self._units = units
        self._again: deque[Unit] = deque()  # units of processes that died
        self._deaths: Counter[int] = Counter()
        self._most = workers
        self._workers: list[_ConversionWorker] = []

    def run(self) -> Iterator[Receipt | Progress]:
        while True:
            self._feed()
            if not any(worker.units for worker in self._workers):
                return
            ready = cast("list[Connection]", wait([worker.connection for worker in self._workers]))
            for worker in [one for one in self._workers if one.connection in ready]:
                message = worker.receive()
                if message is None:
                    self._bury(worker)
                elif isinstance(message, BaseException):
                    raise message
                else:
                    yield message

    def close(self) -> None:
        for worker in self._workers:
            worker.end()

    def _feed(self) -> None:
        """Give each process units until it holds enough of them; start processes while there are units for them."""
        for ahead in range(AHEAD):
            for place in range(self._most):
                if place < len(self._workers) and len(self._workers[place].units) > ahead:
                    continue
                unit = self._again.popleft() if self._again else next(self._units, None)
                if unit is None:
                    return
                if place == len(self._workers):
                    self._workers.append(_ConversionWorker(self._job))
                self._workers[place].give(unit)

    def _bury(self, worker: _ConversionWorker) -> None:
        """Take the units of a process that died, to make them again.

        Raises:
            DataError: it is not the first process that dies over its unit.
        """
        self._workers.remove(worker)
        code = worker.end()
        if worker.units:
            unit = worker.units[0]
            self._deaths[unit.number] += 1
            if self._deaths[unit.number] > RETRIES:
                raise DataError(
                    f"a process died {self._deaths[unit.number]} times ({_how(code)}) over rows {unit.start} to "
                    f"{unit.stop - 1}{_MEMORY if code == -signal.SIGKILL else ''}"
                )
        self._again.extendleft(reversed(worker.units))


class _ConversionWorker:
    """A process.

    Attributes:
        connection: to it.
        units: that it holds, the one in work first.
    """

    def __init__(self, job: Job) -> None:
        self.connection, theirs = Pipe()
        self.units: deque[Unit] = deque()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to all processes of a terminal; this one decides
            )
        self._send(job)

    def give(self, unit: Unit) -> None:
        """Give it a unit."""
        self.units.append(unit)
        self._send(unit)

    def receive(self) -> Receipt | Progress | BaseException | None:
        """What it says: a unit is done, rows are, or it failed; None if it died."""
        try:
            message: Any = self.connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(message, Receipt):
            done = self.units.popleft()
            assert done.number == message.unit
        return message

    def end(self) -> int:
        """Kill it; the exit code, negative for a signal."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=0)
        self._process.kill()
        return self._process.wait()

    def _send(self, message: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; receiving tells
            self.connection.send(message)


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
