"""Signals stop all ranks between the same two steps; a rank that gets no further ends, with the stacks of its threads.

torchrun ends the other ranks of a rank that has died: with SIGTERM, and 30 seconds later with SIGKILL. A rank that
waits in a collective of nccl runs no handler of Python meanwhile, so a thread says where it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, cast

import torch.distributed as dist
from typing_extensions import Self

from mmdata.batch import Batch
from mmdata.errors import TrainingError
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather

BEFORE_THE_END = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""Slurm sends one of them before a job's time is over (`sbatch --signal`)."""
SIGNALS = (
    *(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)),
    *BEFORE_THE_END,
)
STALL_TIMEOUT_S = collectives.TIMEOUT.total_seconds()
"""Longest time that a rank may be at one position: a collective of the other ranks gives up as late."""
LONG_S = collectives.LONG.total_seconds()
"""The same in an evaluation, in a search for neighbours, and while a checkpoint is written."""
REARM_S = 1.0
"""The timer of the stacks is set again at most this often: that starts a thread, which takes 0.1 ms."""
FAILED = "mmdata/failed"
"""Where a rank that ends with an error leaves it for the others, which then find its connection closed."""
NO_STORE = (RuntimeError, AttributeError)
"""The process with the store has ended, or this torch has no `get_group_store`: what a rank leaves there is a help, and
must not take the place of its error."""
_pipes: set[int] = set()
"""Where Python writes the numbers of signals while a watchdog of this process is entered."""


def _leave_pipe() -> None:
    """In a forked child, such as a worker of a loader: its signals are not those of the rank."""
    if _pipes:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_leave_pipe)


class Watchdog:
    """Watches a process of a run while entered: its position, and `SIGNALS`. SIGHUP says that the terminal is lost.

    Signals are recorded; a second SIGINT kills the process. Those that were ignored before (nohup) stay ignored. A
    handler that a scheduler's library had set for SIGUSR1 or SIGUSR2 (submitit) is called at the exit, when the
    checkpoint is written.

    Args:
        timeout_s: longest time at one position.
        step: gives the number of updates made.
        group: the ranks, gloo; None: this process alone.

    Attributes:
        received: number of the first signal that this process got, or of SIGUSR1 or SIGUSR2; 0: none.

    Example:
        with Watchdog(600, lambda: step, group) as watchdog:
            for batch in watchdog.waited_for(batches):
                watchdog.at("computing")
                step += 1
                if watchdog.agreed():  # on every rank
                    break
    """

    def __init__(self, timeout_s: float, step: Callable[[], int], group: dist.ProcessGroup | None) -> None:
        self._timeout_s, self._step, self._group = timeout_s, step, group
        self._doing, self._limit_s, self._until, self._armed = "starting", timeout_s, 0.0, 0.0
        self.received = 0
        self._handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def at(self, doing: str | None, limit_s: float | None = None) -> None:
        """Set what this rank does from now on (None: the same), and how long it may take; None: `timeout_s`."""
        limit_s, now = limit_s or self._timeout_s, time.monotonic()
        if limit_s != self._limit_s or now - self._armed >= REARM_S:
            self._armed = now
            faulthandler.dump_traceback_later(limit_s + 2 * REARM_S, exit=True, file=2)  # after the words of `_tell`
        self._doing, self._limit_s, self._until = doing or self._doing, limit_s, now + limit_s

    def waited_for(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, with the position set around each: waiting for data, then for the other ranks."""
        while True:
            self.at("waiting for data")
            batch = next(batches, None)
            self.at("waiting for the other ranks")
            if batch is None:
                return
            yield batch
            del batch  # its memory may be needed for the next one

    def meet(self) -> None:
        """Wait for all ranks; the error of rank 0 names those that do not come. A collective."""
        if self._group is not None:
            dist.monitored_barrier(self._group, wait_all_ranks=True)

    def agreed(self) -> int:
        """The signal that any rank got, or 0; the same on every rank. A collective."""
        return max(gather(self.received, self._group))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received or number in BEFORE_THE_END:
            self.received = number
        if number == signal.SIGINT:
            # The default action works even while Python cannot run a handler: in a long kernel or a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __enter__(self) -> Self:
        self._reads, self._writes = socket.socketpair()  # Windows selects among sockets only
        self._writes.setblocking(False)
        self._takes_signals = threading.current_thread() is threading.main_thread()
        if self._takes_signals:  # Python lets no other thread set handlers
            self._before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
            for number in SIGNALS:
                # A signal that nohup or the shell of a background job ignores stays ignored.
                is_in_c = number in BEFORE_THE_END and _is_of_c(number)
                if signal.getsignal(number) is not signal.SIG_IGN and not is_in_c:
                    self._handlers[number] = signal.signal(number, self._note)
            _pipes.add(self._writes.fileno())
        self._limit_s = 0.0
        self.at("starting")
        self._thread = threading.Thread(target=self._tell, daemon=True, name="mmdata-watchdog")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        failed = self._say_failure(error)  # while the handlers are there: torchrun ends the ranks of one that has gone
        for number, handler in self._handlers.items():
            # None: a library in C had set it, and Python cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._takes_signals:
            signal.set_wakeup_fd(self._before)
            _pipes.discard(self._writes.fileno())
        self._writes.send(b"\0")
        self._thread.join()
        self._reads.close()
        self._writes.close()
        if failed:
            raise TrainingError(failed) from error
        if error is None and self.received in BEFORE_THE_END and callable(self._handlers[self.received]):
            signal.raise_signal(self.received)

    def _say_failure(self, error: BaseException | None) -> str:
        """Say where this rank is if a collective failed, and return the words; leave another error for the others."""
        why = str(error).strip().partition("\n")[0].partition(". ")[0]
        is_gloo = isinstance(error, RuntimeError) and ("gloo" in why.lower() or "monitoredBarrier" in why)
        if is_gloo or isinstance(error, dist.DistError):
            words = (
                f"rank {collectives.rank()}: a collective failed at step {self._step()}, {self._doing} ({why}): "
                f"{_failed_rank()}; the same command resumes"
            )
            _say(words)  # torchrun may end this process before its error is printed
            return words
        if isinstance(error, Exception) and self._group is not None:
            with contextlib.suppress(*NO_STORE):
                _store().set(FAILED, f"rank {collectives.rank()} has failed ({type(error).__name__}: {error})")
        return ""

    def _tell(self) -> None:
        """Say where this rank is when a signal comes, and when the limit is over."""
        while True:
            # A position with a shorter limit may come meanwhile: none is shorter than the timeout.
            left_s = min(self._until - time.monotonic(), self._timeout_s)
            ready, _, _ = select.select([self._reads], [], [], max(0.0, left_s))
            number = self._reads.recv(1)[0] if ready else 0
            if ready and not number:
                return
            place = f"step {self._step()}, {self._doing}"
            if number in SIGNALS and self._group is not None:
                _say(f"rank {collectives.rank()}: {signal.Signals(number).name} at {place}")
            elif not ready and self._until <= time.monotonic():
                _say(
                    f"error: rank {collectives.rank()} has got no further for {self._limit_s:g} s: {place}. It ends; "
                    "the stacks of its threads follow; the same command resumes"
                )
                return


def _is_of_c(number: int) -> bool:
    """Whether a library in C has set the signal's handler (`faulthandler.register`): Python could not set it again."""
    ask = ctypes.pythonapi.PyOS_getsig
    ask.restype = ctypes.c_void_p
    return ask(number) not in (None, 1) and not callable(signal.getsignal(number))


def _failed_rank() -> str:
    """The rank whose end made a collective fail, and its error, if it could still leave it."""
    with contextlib.suppress(*NO_STORE):
        if _store().check([FAILED]):
            return _store().get(FAILED).decode()
    return "another rank has ended or hangs, see its output and torchrun's"


def _store() -> Any:
    """What all ranks can read; under torchrun it outlives them."""
    return cast(Any, dist.group.WORLD).get_group_store()


def _say(words: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(words, file=sys.__stderr__, flush=True)
