"""The training process's end of the worker processes: starts them, takes their batches, replaces one that is killed.

The training loop reads one small message a batch and makes views of shared memory; the processes do everything else.
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
from mmdata.cores import most_workers
from mmdata.errors import ConfigError, DataError, LoadError
from mmdata.launcher import Ranks
from mmdata.loader.work import LoadedBatch
from mmdata.loader.workers.channel import Channel, error_of
from mmdata.loader.workers.shared_memory import REMEDY, ImportedBuffers, from_shared

logger = logging.getLogger("mmdata")

START = "import sys; sys.path[:] = sys.argv[2:]; from mmdata.loader.workers.child import main; main(int(sys.argv[1]))"
"""The path is this process's before anything is imported: `python -m` would look into the current folder first."""
MAX_RESTARTS = 3
"""For one batch: one that kills its process each time would do so for ever."""
AGAIN = "Iterating anew starts another; the loader's state is what was yielded before"
KILLED = "the kernel's out-of-memory killer does this: lower data.loading.prefetch_batches or data.loading.num_workers"


class WorkerProcesses:
    """Worker processes that make a loader's batches: process p makes every num_processes-th batch from the p-th on.

    They are started when first needed, wait between epochs, and end with this object or with this process.

    Args:
        data: settings.
        identity: of the plan; theirs must be the same.
        ranks: which share of each global batch.

    Raises:
        ConfigError: a transform that another process cannot import.
    """

    def __init__(self, data: DataConfig, identity: dict[str, Any], ranks: Ranks) -> None:
        if data.transform.startswith("__main__:"):
            raise ConfigError(
                f"transform '{data.transform}': data.loading.worker_type is process, and another process cannot "
                "import what is defined in the program itself; put it into a file of its own, or set "
                "data.loading.worker_type to thread"
            )
        self._settings = {"data": data.model_dump(mode="json"), **ranks._asdict()}
        self._identity = json.loads(json.dumps(identity))
        self._num_processes = data.loading.num_processes
        self._num_threads = max(most_workers(data.loading.num_workers), data.loading.num_processes)
        self._processes: dict[int, _WorkerProcess] = {}  # by place, 0 … num_processes-1
        self._pid = 0
        self._killed = 0  # processes, since the last batch
        self._run = 0  # counts the positions that were gone to
        self._taken = 0  # batches of this run

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on.

        Processes that are ready begin immediately, others with the first `take`.
        """
        self.stop()
        self._run += 1
        self._taken = 0
        if self._pid == os.getpid():
            with self._ended_by_errors(), suppress(LoadError):  # one is gone: `take` says so, or starts another
                self._direct(epoch, start)

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """The next batch, which is that of the given step.

        A process that is killed is replaced, and nothing is lost: what it had made is made again.

        Raises:
            LoadError: a process has ended by itself, or one was killed again and again without a batch in between.
            Exception: what a worker raised, as a `LoadError` unless it is one of `mmdata.errors`.
        """
        with self._ended_by_errors():
            while True:
                with self._replaced(epoch, step):
                    self._start(wait=True)
                    self._direct(epoch, step)
                    made = self._processes[self._taken % self._num_processes].take(epoch, step)
                    self._taken, self._killed = self._taken + 1, 0
                    return made

    def are_ready(self, epoch: int, step: int) -> bool:
        """Whether all processes are ready for `begin`. Starts those that are missing, and waits for nothing.

        The position is that of the caller, for messages. Raises what `take` would while they start.
        """
        with self._ended_by_errors():
            with self._replaced(epoch, step):
                return self._start(wait=False)
            return False

    def stop(self) -> None:
        """Make no more."""
        for process in self._processes.values():
            if process.run == self._run and self._pid == os.getpid():
                with self._ended_by_errors(), suppress(LoadError):  # one that is gone has stopped
                    process.tell("stop", self._run)

    def close(self) -> None:
        """End the processes; `take` starts others."""
        for process in self._processes.values():
            process.close()
        self._processes = {}

    @contextmanager
    def _ended_by_errors(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.close()  # one may be gone, or was interrupted in the middle of a message
            raise

    @contextmanager
    def _replaced(self, epoch: int, step: int) -> Generator[None]:
        """Forget a process that was killed, so that another is started; the fourth in a row is an error."""
        try:
            yield
        except WorkerProcessKilled as error:
            if self._killed == MAX_RESTARTS:
                self._killed = 0
                raise LoadError(
                    f"{error}. So did {MAX_RESTARTS} others before it, with no batch in between: set "
                    f"data.loading.worker_type to thread, or see what is in that batch. {AGAIN}"
                ) from None
            self._killed += 1
            logger.warning("%s. Another goes on at epoch %d, step %d; nothing is lost", str(error), epoch, step)
            self._processes = {place: one for place, one in self._processes.items() if not one.ended}

    def _start(self, *, wait: bool) -> bool:
        """Have the processes running; in a forked child of the process that started them, others. Are they ready?"""
        if self._pid != os.getpid():
            self._processes = {}  # those of the parent
            self._pid = os.getpid()
        for place in range(self._num_processes):
            if place not in self._processes:
                threads = len(range(place, self._num_threads, self._num_processes))  # 5 threads in 2 processes: 3 and 2
                share = {"threads": threads, "place": place, "places": self._num_processes}
                self._processes[place] = _WorkerProcess({**self._settings, **share})
        return all(process.is_ready(self._identity, wait=wait) for process in self._processes.values())

    def _direct(self, epoch: int, step: int) -> None:
        """Have the processes that are ready make the batches from a position on, where they are at another."""
        due = self._taken % self._num_processes
        for place, process in self._processes.items():
            if process.ready and process.run != self._run:
                first = (place - due) % self._num_processes
                process.begin(self._run, epoch=epoch, start=step, place=first)


class WorkerProcessKilled(LoadError):
    """A signal has ended a worker process."""


class _WorkerProcess:
    """One process, and the memory it shares with this one.

    Attributes:
        ready: it has opened the index and made a plan.
        run: that it is at.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.ready = False
        self.run = -1
        self._memory = ImportedBuffers()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise ConfigError(f"data.loading.worker_type process: no socket: {error}; {REMEDY}") from error
        self._channel = Channel(ours)
        try:
            with theirs:
                # In a session of its own: Ctrl-C at the terminal is for this process alone.
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

    def is_ready(self, identity: dict[str, Any], *, wait: bool) -> bool:
        """Whether it has opened the index and made a plan, which must be this process's; `wait`: until it has.

        Raises:
            DataError: it is another.
        """
        if not self.ready and (wait or self._channel.wait(0)):
            message, _ = self._receive("while it opened the index")
            if message.get("ready") != identity:
                raise DataError(
                    f"the loader's worker process made another plan, {message.get('ready')}, than this process, "
                    f"{identity}: the shards or the tokenizer have changed since the loader was built; build it anew"
                )
            self.ready = True
        return self.ready

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self._process.poll() is not None

    def begin(self, run: int, **position: int) -> None:
        """Have it make the batches from a position on."""
        self.tell("begin", run, **position)
        self.run = run

    def tell(self, what: str, run: int, **more: int) -> None:
        """Ask for something, and say which memory nothing looks at any more."""
        self._send({"do": what, "run": run, **self._memory.news(), **more}, f"'{what}'")

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """Its next batch, which is that of the given step."""
        while True:
            message, files = self._receive(f"epoch {epoch}, step {step} was to come next")
            for (number, size), file in zip(message["buffers"], files, strict=True):
                self._memory.add(number, size, file)
            for number in message["removed"]:
                self._memory.forget(number)
            made = from_shared(message["made"], self._memory)
            if message["run"] == self.run:
                self.tell("go on", self.run, epoch=epoch)
                return made

    def close(self) -> None:
        """End the process."""
        self._ending()

    def _send(self, message: dict[str, Any], what: str) -> None:
        try:
            self._channel.send(message)
        except EOFError:
            raise self._gone(f"when it was to be told {what}") from None

    def _receive(self, when: str) -> tuple[dict[str, Any], list[int]]:
        """The next message that is no log record; raises what is an error, unless it is of another run."""
        while True:
            try:
                message, files = self._channel.receive()
            except EOFError:
                raise self._gone(when) from None
            if "log" in message:
                logger.log(message["log"][0], "%s", message["log"][1])
            elif "error" in message:
                if message.get("run", self.run) == self.run:
                    raise error_of(message["error"])
            else:
                return message, files

    def _gone(self, when: str) -> LoadError:
        if not self._ending.alive:
            return LoadError(
                f"the loader's worker process {self._process.pid} was closed, {when}: the program ends, or another "
                f"thread has met an error. {AGAIN}"
            )
        code = self._process.wait()  # its end of the socket is closed: it has ended
        name = f"the loader's worker process {self._process.pid} is gone"
        if code < 0:
            why = KILLED if -code == signal.SIGKILL else "a defect in a library does so, or a person"
            return WorkerProcessKilled(f"{name} (killed by {signal.Signals(-code).name}), {when}; {why}")
        return LoadError(
            f"{name} (exit code {code}), {when}; what it printed says why, or set data.loading.worker_type to thread. "
            f"{AGAIN}"
        )


def _end(channel: Channel, process: subprocess.Popen[bytes], owner: int) -> None:
    channel.close()
    if owner == os.getpid():  # a forked child has a copy, which is not its own
        process.kill()  # it holds nothing that outlives it
        process.wait()
