"""Ends a run that makes no progress or has lost a rank, with an error that names the rank, its step and what it did.

A rank that waits in a collective for a stalled rank cannot raise: a thread writes the error and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType

import torch.distributed as dist
from torch import nn
from typing_extensions import Self

from mmdata.batch import Batch
from mmdata.errors import TrainingError
from mmdata.train.ranks import collectives
from mmdata.train.run.heartbeat import Heartbeats, OwnPosition, RankPosition
from mmdata.train.run.update import Update

STALLED = 75
"""Exit code of a process that the watchdog ended: EX_TEMPFAIL, since starting it again may help."""

STALL_TIMEOUT_S = collectives.TIMEOUT.total_seconds()
"""Longest time that a rank may be at one position: a collective of the other ranks gives up as late."""
GRACE_S = 10.0
"""Time in which a process may end by an error of its own once another rank is gone; then the watchdog ends it."""
WRITE_S = 300.0
"""Longest wait for a checkpoint that is being written, before the watchdog ends its process. torchrun ends it earlier:
30 seconds after the first rank has ended."""
STILL_UPDATES = 3
"""Updates in a row without loss and gradient after which the log says so."""


class Watchdog:
    """Watches a run while entered.

    A rank whose process ends, or that leaves with an error, ends the others within a minute: most by an error in the
    collective that they wait in, the rest `GRACE_S` after they know.

    Args:
        timeout_s: longest time at one position of a rank that lives.
        step: gives the number of updates made; called by each `at`.
        group: the ranks, gloo; None: this process alone.

    Attributes:
        is_writing: whether this process is writing a checkpoint, which is waited for before the process is ended.

    Example:
        with Watchdog(600, lambda: step, group) as watchdog:
            for batch in watchdog.waited_for(batches):
                watchdog.at("computing")
                step += 1
    """

    def __init__(self, timeout_s: float, step: Callable[[], int], group: dist.ProcessGroup | None) -> None:
        self._timeout_s, self._step, self._group = timeout_s, step, group
        self._interval_s = min(1.0, timeout_s / 10)
        self._patience_s = 5 * self._interval_s  # without a heartbeat of a rank, after which it counts as silent
        self._moved = time.monotonic()
        self._still_since: int | None = None  # first of the latest steps, whose loss and gradient are 0
        self._still_updates = 0
        self._said_still = False
        self.is_writing: Callable[[], bool] = lambda: False
        self._own = OwnPosition()
        self._heartbeats: Heartbeats | None = None
        self._stop = threading.Event()

    def at(self, doing: str) -> None:
        """Set what this rank does from now on."""
        self._own.move(self._step(), doing)

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

    def learned(self, update: Update, *, moves: bool) -> None:
        """Take note of an update; `moves` is False where loss and gradient are exactly 0.

        Raises:
            TrainingError: `moves` has been False for the timeout: no row is valid, or no negative passes.
        """
        self._still_updates = 0 if moves else self._still_updates + 1
        if moves:
            self._still_since = None
        elif self._still_since is None:
            self._still_since = update.step
        if moves:
            self._moved = time.monotonic()
        elif (still_s := time.monotonic() - self._moved) > self._timeout_s:
            raise TrainingError(
                f"step {update.step}: loss and gradient have been exactly 0 for {still_s:.0f} s (the limit is "
                f"{self._timeout_s:g} s): no row is valid (on rank {collectives.rank()} {int(update.valid.sum())} of "
                f"{len(update.valid)} are), or no negative passes train.miner, train.teacher and the masks; loosen them"
            )

    def why_still(self) -> str:
        """A line that says since when the run learns nothing, once in a run; "" if it learns or the line was given.

        The line comes only after `STILL_UPDATES` updates: the last batch of an epoch may have one row, and so no
        negatives.
        """
        if self._still_since is None or self._said_still or self._still_updates < STILL_UPDATES:
            return ""
        self._said_still = True
        return (
            f"loss and gradient are exactly 0 since step {self._still_since}: no row is valid, or no negative passes "
            f"train.miner, train.teacher and the masks; the run ends after {self._timeout_s:g} s of it"
        )

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Generator[None, None, None]:
        """In an evaluation every call of the model counts as progress, so that it may last as long as it needs."""
        self.at("evaluating")

        def alive(*_: object) -> None:
            self.at("evaluating")

        hook = model.register_forward_hook(alive)
        try:
            yield
        finally:
            hook.remove()

    def __enter__(self) -> Self:
        self.at("starting")
        self._moved = time.monotonic()
        if self._group is not None:
            self._heartbeats = Heartbeats(self._own, self._group, interval_s=self._interval_s)
        threading.Thread(target=self._watch, daemon=True, name="mmdata-watchdog").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._heartbeats is not None and isinstance(error, RuntimeError) and _is_of_a_collective(error):
                self._blame(self._heartbeats, error)
        finally:
            self._stop.set()
            if self._heartbeats is not None:
                self._own.ended = f"{kind.__name__}: {error}" if kind else ""
                self._heartbeats.close()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            message = self._lost() or self._judge(self._timeout_s)
            if message and not self._stop.is_set():
                if self._heartbeats is not None:
                    self._heartbeats.verdict = message
                    self._heartbeats.exchange_soon()
                    # Until the others have read it: the store may live in this process.
                    time.sleep(3 * self._interval_s)
                    while collectives.rank() == 0 and self._heartbeats.untold(max(self._patience_s, GRACE_S)):
                        time.sleep(self._interval_s)
                if self._written(message):
                    _end(message)

    def _written(self, message: str) -> bool:
        """Wait for a checkpoint that is being written; False if the run has ended by itself meanwhile."""
        if not self.is_writing():
            return True
        words = f"; the checkpoint that is being written is waited for, for {WRITE_S:g} s at most"
        _say(f"{message}{words}")
        deadline = time.monotonic() + WRITE_S
        while self.is_writing() and time.monotonic() < deadline and not self._stop.wait(self._interval_s / 10):
            pass
        # An error that the main thread had all the while has its own words, and its own way out.
        return not self._stop.wait(min(GRACE_S, max(0.0, deadline - time.monotonic())))

    def _lost(self) -> str:
        """Why the run ends if ranks have been gone for long enough, or ""."""
        gone = self._heartbeats.presence.gone() if self._heartbeats is not None else []
        if not gone or time.monotonic() - gone[0].noticed < GRACE_S:
            return ""
        own = f"rank {collectives.rank()}: {self._own.now()}"
        return f"{gone[0].words}; {own}. All ranks end; the same command resumes"

    def _judge(self, timeout_s: float) -> str:
        """Why the run ends, or "" where it goes on."""
        if self._heartbeats is not None and self._heartbeats.verdict:
            return self._heartbeats.verdict
        own, rank = self._own.now(), collectives.rank()
        others = self._heartbeats.known() if self._heartbeats is not None else {}
        positions = {rank: own} | {other: position for other, (position, _) in others.items()}
        stuck = [other for other, position in positions.items() if position.for_s > timeout_s]
        if not stuck and all(ago_s <= timeout_s for _, ago_s in others.values()):
            return ""
        limit = f"(the limit is {timeout_s:g} s)"
        silent = {other: position for other, (position, ago_s) in others.items() if ago_s > self._patience_s}
        if silent:
            ago_s = min(others[other][1] for other in silent)
            what = f"not been heard of for {ago_s:.0f} s {limit}: it is stopped, dead or cut off; last heard of at"
            return _message(
                silent, what, {each: position for each, position in positions.items() if each not in silent}
            )
        if others and rank != 0:
            return ""  # only rank 0 reads all positions: its verdict names the rank
        lowest = min(position.order() for position in positions.values())
        behind = {each: position for each, position in positions.items() if position.order() == lowest}
        rest = {each: position for each, position in positions.items() if each not in behind}
        longest_s = max(position.for_s for position in behind.values())
        return _message(behind, f"got no further for {longest_s:.0f} s {limit}:", rest)

    def _blame(self, heartbeats: Heartbeats, error: RuntimeError) -> None:
        """Raise an error that names the ranks whose end made a collective fail, if their heartbeats show it soon."""
        heartbeats.ask_all = True
        deadline = time.monotonic() + 2 * self._patience_s
        while time.monotonic() < deadline:
            if gone := heartbeats.presence.gone():
                words = "; ".join(one.words for one in gone if one.ended == gone[0].ended)
                raise TrainingError(
                    f"{words}; all ranks stop, this one at {self._own.now()}; the same command resumes"
                ) from error
            heartbeats.exchange_soon()
            time.sleep(self._interval_s / 2)
            known = heartbeats.known()
            ended = {rank: position for rank, (position, _) in known.items() if position.ended}
            if ended:
                words = "; ".join(
                    f"rank {rank} ended at {position}: {position.ended}" for rank, position in ended.items()
                )
                raise TrainingError(f"{words}; all ranks stop") from error
            silent = {rank: position for rank, (position, ago_s) in known.items() if ago_s > self._patience_s}
            if silent:
                words = "; ".join(
                    f"rank {rank} is gone (killed?), last heard of at {position}" for rank, position in silent.items()
                )
                raise TrainingError(
                    f"{words}; all ranks stop, this one at {self._own.now()}; the same command resumes"
                ) from error


def _message(at_fault: dict[int, RankPosition], what: str, rest: dict[int, RankPosition]) -> str:
    words = "; ".join(f"rank {rank} has {what} {position}" for rank, position in sorted(at_fault.items()))
    others = "".join(f"; rank {rank}: {position}" for rank, position in sorted(rest.items())[:8])
    return f"{words}{others}{'; …' if len(rest) > 8 else ''}. All ranks end; the same command resumes"


def _is_of_a_collective(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _end(message: str) -> None:
    """Print the stack of each thread and the message, and end the process without waiting for the main thread."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    _say(f"error: {message}")
    os._exit(STALLED)


def _say(words: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(words, file=sys.__stderr__, flush=True)
