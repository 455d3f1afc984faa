"""A process of `processes`: it gets the conversion and then units, and sends back receipts, progress or an error."""

from __future__ import annotations

import pickle
import queue
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from mmdata.convert.engines import Progress, make_units
from mmdata.convert.fetch import FetchStage
from mmdata.convert.unit import Job, Unit
from mmdata.errors import DataError

REPORT_S = 0.2
"""Seconds between two reports of progress."""


def main() -> None:
    """Make units until the connection ends; argv[1] is its file descriptor."""
    connection = Connection(int(sys.argv[1]))
    try:
        job: Job = connection.recv()
        with FetchStage.from_config(job.config) as fetch:
            for unit in _units(connection):
                _make(job, unit, fetch, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the first process has ended
    except BaseException as error:
        connection.send(_sendable(error))


def _make(job: Job, unit: Unit, fetch: FetchStage, connection: Connection) -> None:
    rows, reported = 0, time.monotonic()
    for event in make_units(job, [unit], fetch, 1):
        if not isinstance(event, Progress):
            connection.send(Progress(rows))
            connection.send(event)
            return
        rows += event.rows
        if time.monotonic() - reported > REPORT_S:
            connection.send(Progress(rows))
            rows, reported = 0, time.monotonic()


def _units(connection: Connection) -> Iterator[Unit]:
    """The units that are sent; a thread receives the next one while one is made."""
    received: queue.SimpleQueue[Unit | BaseException | None] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                received.put(connection.recv())
        except (EOFError, OSError):
            received.put(None)
        except BaseException as error:  # whatever a pickle does
            received.put(error)

    threading.Thread(target=receive, name="receive", daemon=True).start()
    while (unit := received.get()) is not None:
        if isinstance(unit, BaseException):
            raise unit
        yield unit


def _sendable(error: BaseException) -> BaseException:
    """The error if it can be sent; else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a pickle does
        return DataError(f"{type(error).__name__}: {error}")
    return error
