"""A worker process: threads with an interpreter of their own, which put batches into shared memory.

It makes what threads of the training process would make, of the same plan. `mmdata.loader.workers.parent` starts it and
sends it messages over a socket. It ends when that socket closes, however the training process ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import closing, suppress
from itertools import islice
from typing import Any

from torch import Tensor

from mmdata.config import DataConfig
from mmdata.launcher import Ranks
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.buffer_pool import BufferPool
from mmdata.loader.corpus import open_corpus
from mmdata.loader.state import identity_of
from mmdata.loader.work import Work
from mmdata.loader.workers.channel import Channel, message_of
from mmdata.loader.workers.shared_memory import ExportedBuffers, Packed, to_shared
from mmdata.loader.workers.steps import RankSteps
from mmdata.loader.workers.threads import WorkerThreads
from mmdata.plan import Step
from mmdata.plan.from_config import build_plan

ORPHAN_CHECK_S = 1.0
"""Seconds between checks whether the training process has ended. Usually the socket reports that immediately, but a
forked child of the training process may hold the socket open."""


def main(descriptor: int) -> None:
    """Serve the training process, which has the other end of this socket, until it ends."""
    # The setting num_workers says how many threads there are; tokenizers would start one more for each core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process decides what an interrupt ends
    parent = os.getppid()
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    logger = logging.getLogger("mmdata")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())  # the training process has logged the warnings about settings already
    try:
        settings, _ = channel.receive()
        process = WorkerProcess(channel, settings)
        logger.handlers = [_ForwardHandler(channel)]
        while True:
            while not channel.wait(ORPHAN_CHECK_S):
                if os.getppid() != parent:
                    os._exit(0)
            process.obey(channel.receive()[0])
    except EOFError:
        pass
    except BaseException as error:  # a user's module may raise SystemExit
        with suppress(EOFError):
            channel.send({"error": message_of(error)})
    # Not sys.exit: that would wait for worker threads, which may wait for a server.
    os._exit(0)


class _ForwardHandler(logging.Handler):
    """Sends log records to the training process, where the user's handlers are."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(EOFError):  # the training process has ended
            self._channel.send({"log": [record.levelno, record.getMessage()]})


class Run:
    """The batches from one position on.

    Args:
        number: of the run; the training process counts them.
        threads: make the batches.
        prefetch: batches that may be ready or in progress, besides those that the training process has taken.

    Attributes:
        room: acquired for each batch that is begun, released when the training process takes one.
        stopped: the training process wants no more of these batches.
    """

    def __init__(self, number: int, threads: WorkerThreads[Step, Packed], prefetch: int) -> None:
        self.number = number
        self.threads = threads
        self.room = threading.Semaphore(prefetch)
        self.stopped = False


class WorkerProcess:
    """Makes batches as the training process asks for them.

    Args:
        channel: to the training process.
        settings: `data`, a DataConfig as JSON; `rank`, `world_size`; `num_threads` of this process; `num_processes`, of
            which each makes every num_processes-th batch; `process`, the number of this one.
    """

    def __init__(self, channel: Channel, settings: dict[str, Any]) -> None:
        data = DataConfig.model_validate(settings["data"])
        self._channel = channel
        self._memory = ExportedBuffers()
        # Pixels, and the much smaller rest of a batch, in pools of their own: the rest must not take a pixel buffer.
        self._pixels, self._rest = BufferPool(self._memory.allocate), BufferPool(self._memory.allocate)
        self._forks = 0  # of the training process
        corpus = open_corpus(data)
        plan = build_plan(data, corpus.index, corpus.tokenizer, joined=corpus.joined, captions=corpus.captions)
        self._maker = BatchMaker.from_config(data, corpus, plan, buffers=self._pixels)
        self._steps = RankSteps(plan, self._maker, Ranks(settings["rank"], settings["world_size"]))
        self._num_processes, self._num_threads = settings["num_processes"], settings["num_threads"]
        self._thread_name = f"mmdata-process_{settings['process']}-worker"
        self._prefetch = -(-data.loading.prefetch_batches // self._num_processes)
        self._in_use: dict[int, Tensor] = {}  # by number of the buffer: the training process reads it, so it is kept
        self._run: Run | None = None
        self._sender = threading.Thread()
        # Through JSON, as the training process compares it with its own: tuples become lists.
        channel.send({"ready": json.loads(json.dumps(identity_of(plan, self._maker)))})

    def obey(self, message: dict[str, Any]) -> None:
        """Do what a message of the training process asks for."""
        # The forks first: a buffer that a forked child may read must not come back to its pool when it is released.
        if message["forks"] != self._forks:
            self._forks = message["forks"]
            self._pixels.abandon_lent()
            self._rest.abandon_lent()
        for number in message["released"]:
            del self._in_use[number]
        if message["do"] == "begin":
            self._begin(message)
        # A message of an earlier run may still arrive after its end.
        elif self._run and message["run"] == self._run.number:
            if message["do"] == "stop":
                self._stop()
            else:
                self._steps.current_epoch = message["epoch"]
                self._run.room.release()

    def _begin(self, message: dict[str, Any]) -> None:
        self._stop()
        steps = self._steps.begin(message["epoch"], message["start"])
        own = every(steps, message["first"], self._num_processes)
        threads = WorkerThreads(own, self._begin_step, self._num_threads, name=self._thread_name)
        self._run = Run(message["run"], threads, self._prefetch)
        self._sender = threading.Thread(target=self._send_all, args=(self._run,), daemon=True)
        self._sender.start()

    def _stop(self) -> None:
        if self._run:
            self._run.stopped = True
            # These two wake the sender, which waits either for a batch or for room.
            self._run.threads.close()
            self._run.room.release()
            self._sender.join()
            self._run = None

    def _send_all(self, run: Run) -> None:
        """Send the batches of a run in the order of the plan, each as soon as it and those before it are ready."""
        try:
            while not run.stopped:
                # Queue batches as long as there is room, then send one. With no batch in progress there is nothing to
                # send, so wait for room.
                if run.room.acquire(blocking=len(run.threads) == 0):
                    run.threads.ask()
                else:
                    self._send(run, run.threads.take())
        except StopIteration:
            pass  # the next epoch has no steps
        except EOFError:
            os._exit(0)  # the training process has ended
        except BaseException as error:  # a user's transform may raise SystemExit, and the training process waits
            if not run.stopped:
                self._channel.send({"run": run.number, "error": message_of(error)})

    def _begin_step(self, step: Step, stop: threading.Event) -> Work[Packed]:
        return self._maker.begin(step, stop).then(lambda made: to_shared(made, self._memory, self._rest))

    def _send(self, run: Run, packed: Packed) -> None:
        # Kept before the message goes: the training process may release a buffer as soon as it has the message.
        for buffer in packed.buffers:
            number = self._memory.number(buffer)
            assert number is not None
            self._in_use[number] = buffer
        announced, files = self._memory.announce(packed.buffers)
        self._channel.send({"run": run.number, "made": packed.message, **announced}, files)


def every(steps: Generator[Step, None, None], first: int, step: int) -> Generator[Step, None, None]:
    """Every step-th step, beginning with step number `first`."""
    with closing(steps):  # `islice` does not close what it is given
        yield from islice(steps, first, None, step)
