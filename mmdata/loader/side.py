"""The side process: worker threads that share no interpreter with the training loop, and batches in shared memory.

It makes what the threads of the loader's own process would make, of the same plan. It is started by
`mmdata.loader.beside`, speaks with it over a socket, and ends when that socket closes, however the other side ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import traceback
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Any

from mmdata.data_config import DataConfig
from mmdata.loader.assemble import Task, worker_threads
from mmdata.loader.loader import Loader
from mmdata.loader.planning import build_plan
from mmdata.loader.shared import Channel, LentMemory, Packed, pack
from mmdata.loader.slots import SlotRing
from mmdata.loader.worker import Worker

LOOK_S = 1.0
"""Seconds after which a process looks whether it is an orphan. A socket says so at once, unless a forked child of the
other side holds it open."""


def main(descriptor: int) -> None:
    """Serve the loader at the other end of a socket until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the other side to say what happens then
    parent = os.getppid()
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    logger = logging.getLogger("mmdata")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())  # what is to be said of settings, the other side has said
    try:
        settings, _ = channel.receive()
        side = Side(channel, settings)
        logger.handlers = [_Forward(channel)]
        while True:
            while not channel.wait(LOOK_S):
                if os.getppid() != parent:
                    os._exit(0)
            side.take(channel.receive()[0])
    except EOFError:
        pass
    except Exception as error:
        with suppress(EOFError):
            channel.send({"error": described(error)})
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
    """One iteration over the loader.

    Args:
        number: of the iteration.
        room: batches that may be ready or being made.

    Attributes:
        number: as given.
        room: acquired for each batch that is begun, released when the other side takes one.
        stopped: the other side wants no more.
    """

    def __init__(self, number: int, room: int) -> None:
        self.number = number
        self.room = threading.Semaphore(room)
        self.stopped = False


class Side:
    """Makes batches as the other side asks for them.

    Args:
        channel: to the other side.
        settings: data (a DataConfig as JSON), rank, world_size; threads; place among the `places` side processes,
            each of which makes every places-th batch.
    """

    def __init__(self, channel: Channel, settings: dict[str, Any]) -> None:
        data = DataConfig.model_validate(settings["data"])
        self._channel = channel
        self._memory = LentMemory()
        self._rest = SlotRing(self._memory.allocate)
        self._worker = Worker.from_config(data, slots=SlotRing(self._memory.allocate))
        plan = build_plan(data, self._worker.index, self._worker.tokenizer)
        self._loader = Loader(plan, self._worker, rank=settings["rank"], world_size=settings["world_size"])
        self._place, self._places = settings["place"], settings["places"]
        self._room = settings["threads"] * data.prefetch
        self._pool = worker_threads(settings["threads"])
        self._lent: dict[int, Any] = {}  # tensors in the buffers that the other side looks at, by number
        self._run = Run(-1, 0)
        self._thread = threading.Thread()
        channel.send({"ready": json.loads(json.dumps(self._loader.identity))})

    def take(self, message: dict[str, Any]) -> None:
        """Do what a message asks for."""
        for number in message["dropped"]:
            del self._lent[number]
        if message["do"] == "begin":
            self._stop()
            self._run = Run(message["run"], self._room)
            self._thread = threading.Thread(
                target=self._make_all, args=(self._run, message["epoch"], message["start"]), daemon=True
            )
            self._thread.start()
        elif message["run"] == self._run.number:
            if message["do"] == "stop":
                self._stop()
            else:
                self._run.room.release()

    def _stop(self) -> None:
        self._run.stopped = True
        self._run.room.release()
        self._worker.store.stop_fetching()
        if self._thread.ident is not None:
            self._thread.join()

    def _make_all(self, run: Run, epoch: int, start: int) -> None:
        """Send the batches of a run in the order of the plan, each as soon as it and those before it are ready."""
        ahead: deque[Future[Packed]] = deque()
        try:
            for task in islice(self._loader.tasks(epoch, start), self._place, None, self._places):
                while not run.room.acquire(blocking=not ahead):
                    self._send(run, ahead.popleft())
                if run.stopped:
                    return
                ahead.append(self._pool.submit(self._make, task))
            while ahead and not run.stopped:
                self._send(run, ahead.popleft())
            self._channel.send({"run": run.number, "end": True})
        except EOFError:
            os._exit(0)  # the other side is gone
        except Exception as error:
            if not run.stopped:
                self._channel.send({"run": run.number, "error": described(error)})
        finally:
            for future in ahead:
                future.cancel()

    def _make(self, task: Task) -> Packed:
        return pack(self._worker.make(task), self._memory, self._rest)

    def _send(self, run: Run, future: Future[Packed]) -> None:
        packed = future.result()
        untold = [found for buffer in packed.buffers if (found := self._memory.untold(buffer)) is not None]
        for buffer in packed.buffers:
            number = self._memory.number(buffer)
            assert number is not None
            self._lent[number] = buffer
        removed = [self._memory.removed.popleft() for _ in range(len(self._memory.removed))]
        message = {"run": run.number, "made": packed.message, "buffers": [new[:2] for new in untold]}
        self._channel.send({**message, "removed": removed}, [new[2] for new in untold])


def described(error: Exception) -> dict[str, str]:
    """An error as JSON: its type, its text, and where it came from."""
    return {"type": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}
