"""The worker processes as the training process sees them: started, asked for batches, ended.

For each batch the training loop reads one small message and makes views of shared memory; the processes do the rest.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from mmdata.config import DataConfig
from mmdata.config.callables import is_importable, name_of
from mmdata.cores import most_workers
from mmdata.errors import ConfigError, DataError, LoadError
from mmdata.launcher import Ranks
from mmdata.loader.work import LoadedBatch
from mmdata.loader.workers.channel import Channel, error_of
from mmdata.loader.workers.shared_memory import REMEDY, ImportedBuffers, from_shared

logger = logging.getLogger("mmdata")

START = "import sys; sys.path[:] = sys.argv[2:]; from mmdata.loader.workers.child import main; main(int(sys.argv[1]))"
"""Sets this process's import path before any import: `python -m` would look into the current folder first."""
RETRY = (
    "Resuming is exact: a loader, this one too, that loads the state_dict() of now goes on with the batch that is due, "
    "in another process"
)
KILLED = (
    "the kernel's out-of-memory killer does this where memory is short: lower data.loading.prefetch_batches or "
    "data.loading.num_workers"
)


def not_importable(data: DataConfig) -> str:
    """The user's transform that another process cannot import by its name, in words; "" if there is none."""
    for setting in ("transform", "text_transform"):
        if (own := getattr(data, setting)) is not None and not is_importable(own):
            return f"{setting} '{name_of(own)}'"
    return ""


class WorkerProcesses:
    """Worker processes that make a loader's batches: process p makes every num_processes-th batch from the p-th on.

    They start when they are first needed, wait between epochs, and end with this object or with this process.

    Args:
        data: settings.
        identity: of the batches; the worker processes must find the same.
        ranks: which share of each global batch.

    Raises:
        ConfigError: another process cannot import the transform.
    """

    def __init__(self, data: DataConfig, identity: dict[str, Any], ranks: Ranks) -> None:
        if cannot := not_importable(data):
            raise ConfigError(
                f"{cannot}: data.loading.worker_type is process, and another process "
                "cannot import it by its name: it is defined in the program itself, inside a function, or made when "
                "the program runs. Define it at the top of a file of its own, or set data.loading.worker_type to thread"
            )
        self._settings = {"data": data.model_dump(mode="json"), **ranks._asdict()}
        self._identity = json.loads(json.dumps(identity))
        self._num_processes = data.loading.num_processes
        self._num_threads = max(most_workers(data.loading.num_workers), data.loading.num_processes)
        self._processes: dict[int, _WorkerProcess] = {}  # by number, 0 … num_processes-1
        self._owner = 0  # the process that started them
        # Each `begin` starts a run. Messages carry its number, so that batches of an earlier run are recognised.
        self._run = 0
        self._taken = 0  # batches of this run

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on.

        Processes that run already begin immediately, others with the first `take`.
        """
        self.stop()
        self._run += 1
        self._taken = 0
        if self._owner == os.getpid() and self._processes:
            with self._closed_by_errors(), suppress(LoadError):  # one has ended: `take` raises
                self._begin_run(epoch, start)

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """Wait for the next batch, which is that of the given step.

        Raises:
            LoadError: a process has ended.
            Exception: what a worker raised, as a `LoadError` unless it is one of `mmdata.errors`.
        """
        with self._closed_by_errors():
            if not self._processes or self._owner != os.getpid():
                self._start()
                self._begin_run(epoch, step)
            made = self._processes[self._taken % self._num_processes].take(epoch, step)
            self._taken += 1
            return made

    def stop(self) -> None:
        """Make no more batches."""
        for process in self._processes.values():
            # A closed one needs no message. At the end of the program, where the finalizer has closed it, modules may
            # be torn down already, and an error could not be built.
            if process.is_open and process.run == self._run and self._owner == os.getpid():
                with self._closed_by_errors(), suppress(LoadError):  # one that has ended has stopped
                    process.request("stop", self._run)

    def close(self) -> None:
        """End the processes; `take` starts others."""
        for process in self._processes.values():
            process.close()
        self._processes = {}

    @contextmanager
    def _closed_by_errors(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.close()  # a process may have ended, or an interrupt may have cut a message short
            raise

    def _start(self) -> None:
        """Start the processes, and wait until all are ready."""
        # A forked child starts its own: those of its parent are not its own to end.
        self._processes, self._owner = {}, os.getpid()
        for process in range(self._num_processes):
            num_threads = len(range(process, self._num_threads, self._num_processes))  # 5 in 2 processes: 3 and 2
            share = {"num_threads": num_threads, "process": process, "num_processes": self._num_processes}
            self._processes[process] = _WorkerProcess({**self._settings, **share})
        for process in self._processes.values():
            process.wait_until_ready(self._identity)

    def _begin_run(self, epoch: int, step: int) -> None:
        for number, process in self._processes.items():
            process.request("begin", self._run, epoch=epoch, start=step, first=number)
            process.run = self._run


class _WorkerProcess:
    """One worker process, and the memory that it shares with this process.

    Attributes:
        run: number of the run of which it makes batches; -1: none.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.run = -1
        self._memory = ImportedBuffers()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise ConfigError(f"data.loading.worker_type process: no socket: {error}; {REMEDY}") from error
        self._channel = Channel(ours)
        try:
            with theirs:
                # In a session of its own, so that Ctrl-C at the terminal interrupts the training process alone.
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-c", START, str(theirs.fileno()), *map(str, sys.path)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise ConfigError(
                f"data.loading.worker_type process: '{sys.executable}' cannot be started: {error}; {REMEDY}"
            ) from error
        self._ending = weakref.finalize(self, _end, self._channel, self._process, os.getpid())
        self._send(settings, "its settings")

    def wait_until_ready(self, identity: dict[str, Any]) -> None:
        """Wait until it has opened the index and made a plan.

        Raises:
            DataError: its batches would not be those of `identity`.
        """
        message, _ = self._receive("while it opened the index")
        if message.get("ready") != identity:
            raise DataError(
                f"the loader's worker process made another plan, {message.get('ready')}, than this process, "
                f"{identity}: the shards or the tokenizer have changed since the loader was built; build it anew"
            )

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called, nor the finalizer."""
        return self._ending.alive

    def request(self, what: str, run: int, **position: int) -> None:
        """Send "begin", "stop" or "go on", with the buffers that this process has released since the last request."""
        self._send({"do": what, "run": run, **self._memory.release_notice(), **position}, f"'{what}'")

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """Wait for its next batch, which is that of the given step."""
        while True:
            message, files = self._receive(f"before the batch of epoch {epoch}, step {step}")
            for (number, size), file in zip(message["buffers"], files, strict=True):
                self._memory.add(number, size, file)
            for number in message["freed"]:
                self._memory.unmap(number)
            # Also of a batch of an earlier run, which is dropped: to drop its tensors releases its buffers.
            made = from_shared(message["made"], self._memory)
            if message["run"] == self.run:
                self.request("go on", self.run, epoch=epoch)
                return made

    def close(self) -> None:
        """End the process."""
        self._ending()

    def _send(self, message: dict[str, Any], what: str) -> None:
        try:
            self._channel.send(message)
        except EOFError:
            raise self._end_error(f"before it got {what}") from None

    def _receive(self, when: str) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message that is not a log record. Raises an error that comes, unless of an earlier run."""
        while True:
            try:
                message, files = self._channel.receive()
            except EOFError:
                raise self._end_error(when) from None
            if "log" in message:
                logger.log(message["log"][0], "%s", message["log"][1])
            elif "error" in message:
                if message.get("run", self.run) == self.run:
                    raise error_of(message["error"])
            else:
                return message, files

    def _end_error(self, when: str) -> LoadError:
        """The error for a process that has ended; says what ended it."""
        if not self._ending.alive:
            return LoadError(
                f"the loader's worker process {self._process.pid} was closed {when}: the program ends, or another "
                f"thread raised an error. {RETRY}"
            )
        code = self._process.wait()  # returns soon: the process closes its end of the socket only by ending
        name = f"the loader's worker process {self._process.pid} has ended"
        if code < 0:
            why = KILLED if -code == signal.SIGKILL else "a defect in a library does this, or a person"
            return LoadError(f"{name} (killed by {signal.Signals(-code).name}) {when}; {why}. {RETRY}")
        return LoadError(
            f"{name} (exit code {code}) {when}; what it printed says why, or set data.loading.worker_type to thread. "
            f"{RETRY}"
        )


def _end(channel: Channel, process: subprocess.Popen[bytes], owner: int) -> None:
    channel.close()
    if owner == os.getpid():  # in a forked child the process is not its own to end
        process.kill()  # without notice: a worker process has nothing that outlives it
        process.wait()
