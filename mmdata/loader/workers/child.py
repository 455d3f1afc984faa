"""A worker process: worker threads that share no interpreter with the training loop, and batches in shared memory.

It makes what the threads of the loader's own process would make, of the same plan. `mmdata.loader.workers.parent`
starts it and speaks with it over a socket. It ends when that socket closes, however the training process ended.
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

LOOK_S = 1.0
"""Seconds after which a process looks whether it is an orphan. A socket says so at once, unless a forked child of the
other side holds it open."""


def main(descriptor: int) -> None:
    """Serve the loader at the other end of a socket until it is gone."""
    # Our threads are as many as were asked for; tokenizers would start another for each core, in each worker process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the other side to say what happens then
    parent = os.getppid()
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    logger = logging.getLogger("mmdata")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())  # what is to be said of settings, the other side has said
    try:
        settings, _ = channel.receive()
        side = WorkerProcess(channel, settings)
        logger.handlers = [_Forward(channel)]
        while True:
            while not channel.wait(LOOK_S):
                if os.getppid() != parent:
                    os._exit(0)
            side.take(channel.receive()[0])
    except EOFError:
        pass
    except BaseException as error:  # a user's module may end with SystemExit
        with suppress(EOFError):
            channel.send({"error": message_of(error)})
    os._exit(0)  # nobody waits for what the workers do


class _Forward(logging.Handler):
    """Sends log records to the other side, where the user's handlers are."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(EOFError):  # nobody is left to tell
            self._channel.send({"log": [record.levelno, record.getMessage()]})


class Run:
    """Batches from one position on.

    Args:
        number: of the run.
        threads: make them.
        room: batches that may be ready or being made, beside those that the other side has taken.

    Attributes:
        number, threads: as given.
        room: acquired for each batch that is begun, released when the other side takes one.
        stopped: the other side wants no more.
    """

    def __init__(self, number: int, threads: WorkerThreads[Step, Packed], room: int) -> None:
        self.number = number
        self.threads = threads
        self.room = threading.Semaphore(room)
        self.stopped = False


class WorkerProcess:
    """Makes batches as the other side asks for them.

    Args:
        channel: to the other side.
        settings: data (a DataConfig as JSON), rank, world_size; threads; places: of as many worker processes each makes
            every places-th batch; place: the number of this process among them.
    """

    def __init__(self, channel: Channel, settings: dict[str, Any]) -> None:
        data = DataConfig.model_validate(settings["data"])
        self._channel = channel
        self._memory = ExportedBuffers()
        self._pixels, self._rest = BufferPool(self._memory.allocate), BufferPool(self._memory.allocate)
        self._forks = 0  # of the other side
        corpus = open_corpus(data)
        plan = build_plan(data, corpus.index, corpus.tokenizer)
        self._maker = BatchMaker.from_config(data, corpus, buffers=self._pixels)
        self._steps = RankSteps(plan, self._maker, Ranks(settings["rank"], settings["world_size"]))
        self._places, self._num_threads = settings["places"], settings["threads"]
        self._thread_name = f"mmdata-process_{settings['place']}-worker"
        self._room = -(-data.loading.prefetch_batches // self._places)
        self._lent: dict[int, Any] = {}  # tensors in the buffers that the other side looks at, by number
        self._run: Run | None = None
        self._thread = threading.Thread()
        channel.send({"ready": json.loads(json.dumps(identity_of(plan, self._maker)))})

    def take(self, message: dict[str, Any]) -> None:
        """Do what a message asks for."""
        if message["forks"] != self._forks:
            self._forks = message["forks"]
            self._pixels.forget_lent()  # a forked child looks at it for as long as it likes, and tells nobody
            self._rest.forget_lent()
        for number in message["dropped"]:
            del self._lent[number]
        if message["do"] == "begin":
            self._stop()
            steps = self._steps.begin(message["epoch"], message["start"])
            own = every(steps, message["place"], self._places)
            threads = WorkerThreads(own, self._begin, self._num_threads, name=self._thread_name)
            self._run = Run(message["run"], threads, self._room)
            self._thread = threading.Thread(target=self._send_all, args=(self._run,), daemon=True)
            self._thread.start()
        elif self._run and message["run"] == self._run.number:
            if message["do"] == "stop":
                self._stop()
            else:
                self._steps.current_epoch = message["epoch"]
                self._run.room.release()

    def _stop(self) -> None:
        if self._run:
            self._run.stopped = True
            self._run.threads.close()
            self._run.room.release()
            self._thread.join()
            self._run = None

    def _send_all(self, run: Run) -> None:
        """Send the batches of a run in the order of the plan, each as soon as it and those before it are ready."""
        try:
            while not run.stopped:
                if run.room.acquire(blocking=len(run.threads) == 0):
                    run.threads.ask()
                else:
                    self._send(run, run.threads.take())
        except StopIteration:
            pass  # the next epoch has no steps
        except EOFError:
            os._exit(0)  # the other side is gone
        except BaseException as error:  # a user's transform may end with SystemExit; the other side waits for this
            if not run.stopped:
                self._channel.send({"run": run.number, "error": message_of(error)})

    def _begin(self, step: Step, stop: threading.Event) -> Work[Packed]:
        return self._maker.begin(step, stop).then(lambda made: to_shared(made, self._memory, self._rest))

    def _send(self, run: Run, packed: Packed) -> None:
        untold = [found for buffer in packed.buffers if (found := self._memory.untold(buffer)) is not None]
        for buffer in packed.buffers:
            number = self._memory.number(buffer)
            assert number is not None
            self._lent[number] = buffer
        removed = [self._memory.removed.popleft() for _ in range(len(self._memory.removed))]
        message = {"run": run.number, "made": packed.message, "buffers": [new[:2] for new in untold]}
        self._channel.send({**message, "removed": removed}, [new[2] for new in untold])


def every(steps: Generator[Step, None, None], first: int, step: int) -> Generator[Step, None, None]:
    """Every step-th step from the first-th on."""
    with closing(steps):
        yield from islice(steps, first, None, step)
