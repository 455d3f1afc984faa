"""Worker processes: threads with interpreters of their own, whose batches come back in shared memory.

The training process (`WorkerProcesses`) asks, and a worker process (`serve`) answers in the order of its steps. For
each batch the training loop sends a buffer, reads one small message and makes views of shared memory; the processes do
the rest. A process ends when its connection closes, however the training process ended.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from mmdata.errors import ConfigError, DataError, LoadError, printable
from mmdata.loader.workers.shared import REMEDY, SharedBuffer, SharedBuffers, out_of_memory, write
from mmdata.loader.workers.threads import Pipeline, Promise, ThreadedBatches

T = TypeVar("T")

logger = logging.getLogger("mmdata")

START = (
    "import sys; sys.path[:] = sys.argv[2:]; from mmdata.loader.workers.process import serve; serve(int(sys.argv[1]))"
)
"""Sets this process's import path before any import: `python -m` would look into the current folder first."""
ORPHAN_CHECK_S = 1.0
"""Seconds between checks whether the training process has ended. Usually the connection reports that immediately, but a
forked child of the training process may hold it open."""
RETRY = (
    "Resuming is exact: a loader, this one too, that loads the state_dict() of now goes on with the batch that is due, "
    "in another process"
)
KILLED = (
    "the kernel's out-of-memory killer does this where memory is short: lower data.loading.prefetch_batches or "
    "data.loading.num_workers"
)
CLOSED = "the program ends, or another thread raised an error"
KNOWN_ERRORS = {"ConfigError": ConfigError, "DataError": DataError, "LoadError": LoadError}
LINE_END = "\n"
LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the operating system that come of this process, and not of the other."""


class WorkerProcesses(Generic[T]):
    """Worker processes that make a loader's batches.

    They start when they are first needed, wait between epochs, and end with this object or with this process. An error
    ends them, since an interrupt may have cut a message short; the next `begin` starts others.

    Args:
        opened: opens the pipeline in the worker process; pickled by its name.
        num_processes: of which process p makes every num_processes-th batch from the p-th on.
        num_threads: of all processes together.
        prefetch: batches that are made before the caller asks for them, by all processes together.
    """

    def __init__(self, opened: Callable[[], Pipeline], *, num_processes: int, num_threads: int, prefetch: int) -> None:
        self._opened, self._num_processes = opened, num_processes
        self._num_threads, self._prefetch = num_threads, prefetch
        self._processes: list[_WorkerProcess] = []
        self._owner = 0  # the process that started them
        self._taken = 0  # batches of this run

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on.

        Raises:
            ConfigError: a process cannot be started.
            LoadError: a process has ended.
        """
        self.stop()
        self._taken = 0
        with self._closed_by_errors():
            # A forked child starts its own: those of its parent are not its own to end.
            if self._owner != os.getpid() or not self._processes:
                self._processes, self._owner = [], os.getpid()
                for number in range(self._num_processes):
                    # Of 5 threads in 2 processes, 3 and 2.
                    num_threads = len(range(number, max(self._num_threads, self._num_processes), self._num_processes))
                    part = (number, self._num_processes)
                    self._processes.append(_WorkerProcess(self._opened, part, num_threads))
            for process in self._processes:
                process.begin(epoch, start)
                for _ in range(-(-self._prefetch // self._num_processes)):
                    process.ask(epoch)

    def take(self, epoch: int, step: int) -> T:
        """Wait for the next batch, which is that of the given step.

        Raises:
            LoadError: its process has ended.
            Exception: what a worker raised, as a `LoadError` unless it is one of `mmdata.errors`.
        """
        when = f"before the batch of epoch {epoch}, step {step}"
        if not self._processes:
            raise LoadError(f"the loader's worker processes were closed {when}: {CLOSED}. {RETRY}")
        with self._closed_by_errors():
            process = self._processes[self._taken % self._num_processes]
            made = process.take(when)
            process.ask(epoch)
            self._taken += 1
            return made

    def stop(self) -> None:
        """Make no more batches."""
        # A closed one needs no message. At the end of the program, where the finalizer has closed it, modules may be
        # torn down already, and nothing else could be called.
        running = [process for process in self._processes if process.is_open]
        if running and self._owner == os.getpid():
            with self._closed_by_errors(), suppress(LoadError):  # one that has ended has stopped
                for process in running:
                    process.stop()

    def close(self) -> None:
        """End the processes; `begin` starts others."""
        for process in self._processes:
            process.close()
        self._processes = []

    @contextmanager
    def _closed_by_errors(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


class _WorkerProcess:
    """One worker process, and the memory that it shares with this process.

    It answers each request for a batch once, in their order. Answers to requests from before `begin` are skipped.
    """

    def __init__(self, opened: Callable[[], Pipeline], part: tuple[int, int], num_threads: int) -> None:
        self._memory = SharedBuffers()
        self._asked: deque[SharedBuffer] = deque()  # of the requests whose answers are to come
        self._unwanted = 0  # how many of these, the first ones, are from before the last `begin`
        try:
            self._connection, theirs = Pipe()
            with theirs:
                # In a session of its own, so that Ctrl-C at the terminal interrupts the training process alone.
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-c", START, str(theirs.fileno()), *map(str, sys.path)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(
                f"data.loading.num_processes: '{sys.executable}' cannot be started: {error}; {REMEDY}"
            ) from error
        self._ending = weakref.finalize(self, _end, self._connection, self._process, os.getpid())
        self._send("its settings", opened, part, num_threads)

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called, nor the finalizer."""
        return self._ending.alive

    def begin(self, epoch: int, start: int) -> None:
        """Have the next batch be that of step `start` of an epoch."""
        self._unwanted = len(self._asked)
        self._send("'begin'", "begin", epoch, start)

    def ask(self, epoch: int) -> None:
        """Ask for one more batch; `epoch`: of the batches that the caller takes."""
        with self._naming_its_end("before it got 'next'"):
            buffer = self._memory.take()
            self._connection.send(("next", epoch))
            send_handle(self._connection, buffer.file, self._process.pid)
            self._asked.append(buffer)

    def take(self, when: str) -> Any:
        """Wait for the next batch."""
        with self._naming_its_end(when):
            while True:
                kind, *content = self._connection.recv()
                if kind == "log":
                    level, text = content
                    logger.log(level, "%s", text)
                    continue
                if kind == "no start":
                    raise _error_of(*content)
                buffer = self._asked.popleft()
                if self._unwanted:  # asked for before the last `begin`: nobody wants it, nor its error
                    self._unwanted -= 1
                    self._memory.give_back(buffer)
                    continue
                if kind == "error":
                    raise _error_of(*content)
                assert kind == "batch", kind  # "nothing" is no answer to what is wanted
                return self._memory.read(buffer, *content)

    def stop(self) -> None:
        """Have no more batches made."""
        self._send("'stop'", "stop")

    def close(self) -> None:
        """End the process."""
        self._ending()

    def _send(self, what: str, *message: object) -> None:
        with self._naming_its_end(f"before it got {what}"):
            self._connection.send(message)

    @contextmanager
    def _naming_its_end(self, when: str) -> Generator[None]:
        """Raise a LoadError that says what ended the process, or that it was closed."""
        try:
            yield
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno in LIMITS:
                raise out_of_memory(error) from error
            raise self._end_error(when) from error

    def _end_error(self, when: str) -> LoadError:
        if not self.is_open:
            return LoadError(f"the loader's worker process {self._process.pid} was closed {when}: {CLOSED}. {RETRY}")
        self._connection.close()  # it has ended, or ends now
        code = self._process.wait()
        name = f"the loader's worker process {self._process.pid} has ended"
        if code < 0:
            why = KILLED if -code == signal.SIGKILL else "a defect in a library does this, or a person"
            return LoadError(f"{name} (killed by {signal.Signals(-code).name}) {when}; {why}. {RETRY}")
        return LoadError(
            f"{name} (exit code {code}) {when}; what it printed says why, or set data.loading.num_processes to 0. "
            f"{RETRY}"
        )


def _end(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
    connection.close()
    if owner == os.getpid():  # in a forked child the process is not its own to end
        process.kill()  # without notice: a worker process has nothing that outlives it
        process.wait()


def _error_of(kind: str, text: str, of_worker: str) -> Exception:
    """An error of a worker: of its own type if that is one of `mmdata.errors`, else a `LoadError`."""
    error = KNOWN_ERRORS[kind](text) if kind in KNOWN_ERRORS else LoadError(f"{kind}: {text}")
    error.__cause__ = Exception(f"in the loader's worker process:\n{printable(of_worker, keep=LINE_END)}")
    return error


def serve(descriptor: int) -> None:
    """Be a worker process of the training process, which has the other end of this socket, until it ends."""
    # The setting num_workers says how many threads there are; tokenizers would start one more for each core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):  # the training process decides what an interrupt, or Slurm's, ends
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = os.getppid()
    os.set_inheritable(descriptor, False)
    answers = _Answers(Connection(descriptor))
    logger.propagate = False
    logger.addHandler(logging.NullHandler())  # the training process has logged the warnings about settings already
    try:
        server = _BatchServer(answers, *answers.connection.recv())
        logger.handlers = [answers]
        while True:
            while not answers.connection.poll(ORPHAN_CHECK_S):
                if os.getppid() != parent:
                    os._exit(0)
            server.obey(*answers.connection.recv())
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:  # a user's module may raise SystemExit
        answers.send_error("no start", error)
    # Not sys.exit: that would wait for worker threads, which may wait for a server.
    os._exit(0)


class _Answers(logging.Handler):
    """Sends what the worker process has to say, from any thread: answers, and log records for the user's handlers."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self._lock = threading.Lock()  # the parts of two messages must not mix

    def send(self, *message: object) -> None:
        """Send a message."""
        try:
            with self._lock:
                self.connection.send(message)
        except ConnectionError:  # the training process has ended
            os._exit(0)

    def send_error(self, kind: str, error: BaseException) -> None:
        """Send type, message and traceback of an error."""
        self.send(kind, type(error).__name__, str(error), traceback.format_exc())

    def emit(self, record: logging.LogRecord) -> None:
        """Send the level and the text of a log record."""
        self.send("log", record.levelno, record.getMessage())


class _BatchServer:
    """Makes batches in a worker process, as the training process asks for them.

    Args:
        answers: to the training process.
        opened: opens the pipeline.
        part: number of this process, from 0, and how many there are.
        num_threads: of this process.
    """

    def __init__(
        self, answers: _Answers, opened: Callable[[], Pipeline], part: tuple[int, int], num_threads: int
    ) -> None:
        self._answers = answers
        self._asked: SimpleQueue[tuple[int, Promise[Any]]] = SimpleQueue()
        self._pipeline = opened()
        self._batches: ThreadedBatches[Any] = ThreadedBatches(
            self._pipeline, num_threads=num_threads, prefetch=0, part=part, name=f"mmdata-process_{part[0]}-worker"
        )
        threading.Thread(target=self._answer, daemon=True).start()

    def obey(self, do: str, *of: int) -> None:
        """Do what the training process asks for; see `_WorkerProcess`."""
        if do == "next":
            (self._pipeline.current_epoch,) = of
            try:
                file = recv_handle(self._answers.connection)
            except ConnectionError:
                raise
            except (RuntimeError, OSError) as error:  # at the limit on open files there is no descriptor to be had
                raise out_of_memory(error) from error
            promise: Promise[Any] = Promise()
            self._batches.ask(promise)
            self._asked.put((file, promise))
        elif do == "begin":
            self._batches.begin(*of)
        else:
            self._pipeline.stop()
            self._batches.stop()

    def _answer(self) -> None:
        """Send the batches in the order in which they were asked for."""
        while True:
            self._send_next(*self._asked.get())

    def _send_next(self, file: int, promise: Promise[Any]) -> None:
        try:
            written = write(promise.take(), file)
        except (StopIteration, CancelledError):  # the next epoch has no steps, or nobody wants it
            self._answers.send("nothing")
        except BaseException as error:  # a user's transform may raise SystemExit, and the training process waits
            self._answers.send_error("error", error)
        else:
            self._answers.send("batch", *written)
        finally:
            os.close(file)
