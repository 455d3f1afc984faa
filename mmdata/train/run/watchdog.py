"""Ends a run that gets no further, with an error that names the rank, its step and what it was doing.

A rank that waits in a collective for one that stalls cannot raise: a thread writes the error and ends the process.
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
from mmdata.train.run.heartbeat import Heartbeats, OwnPosition, Place
from mmdata.train.run.update import Update

STALLED = 75
"""Exit code of a process that this ended: EX_TEMPFAIL, since to start it again may help."""


class Watchdog:
    """Watches a run while entered.

    Args:
        timeout_s: longest time at one place; None: nobody watches.
        step: updates made, asked at each `at`.
        group: the ranks, gloo; None: this process alone.

    Example:
        with Watchdog(600, lambda: step, group) as watchdog:
            for batch in watchdog.waited_for(batches):
                watchdog.at("computing")
                step += 1
    """

    def __init__(self, timeout_s: float | None, step: Callable[[], int], group: dist.ProcessGroup | None) -> None:
        self._timeout_s, self._step, self._group = timeout_s, step, group
        self._interval_s = min(1.0, (timeout_s or 0.0) / 10)
        self._patience_s = 5 * self._interval_s  # without news of a rank: then it is taken to be silent
        self._moved = time.monotonic()
        self._still_since: int | None = None  # the first step of those, up to now, whose loss and gradient are 0
        self._said_still = False
        self._here = OwnPosition()
        self._places: Heartbeats | None = None
        self._stop = threading.Event()

    def at(self, doing: str) -> None:
        """Say what comes now."""
        self._here.move(self._step(), doing)

    def waited_for(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; who has one waits for the ranks that have none yet."""
        while True:
            self.at("waiting for data")
            batch = next(batches, None)
            self.at("waiting for the other ranks")
            if batch is None:
                return
            yield batch

    def learned(self, update: Update, *, moves: bool) -> None:
        """Take note of an update; `moves` is False where loss and gradient are exactly 0.

        Raises:
            TrainingError: that has been so for the timeout: no row is valid, or no negative passes.
        """
        if moves:
            self._still_since = None
        elif self._still_since is None:
            self._still_since = update.step
        if moves or self._timeout_s is None:
            self._moved = time.monotonic()
        elif (still_s := time.monotonic() - self._moved) > self._timeout_s:
            valid = update.batch["valid"]
            raise TrainingError(
                f"step {update.step}: loss and gradient have been exactly 0 for {still_s:.0f} s (train.stall_timeout_s "
                f"is {self._timeout_s:g}): no row is valid (on rank {collectives.rank()} {int(valid.sum())} of "
                f"{len(valid)} are), or no negative passes train.miner, train.teacher and the masks; loosen them"
            )

    def why_still(self) -> str:
        """Why the run learns nothing since a step, once a run; "" where it learns, or that has been said."""
        if self._still_since is None or self._said_still:
            return ""
        self._said_still = True
        end = f"; the run ends after train.stall_timeout_s ({self._timeout_s:g} s) of it" if self._timeout_s else ""
        return (
            f"loss and gradient are exactly 0 since step {self._still_since}: no row is valid, or no negative passes "
            f"train.miner, train.teacher and the masks{end}"
        )

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Generator[None, None, None]:
        """An evaluation may last as long as it likes while the model is called."""
        self.at("evaluating")

        def alive(*_: object) -> None:
            self.at("evaluating")

        hook = model.register_forward_hook(alive)
        try:
            yield
        finally:
            hook.remove()

    def __enter__(self) -> Self:
        if self._timeout_s is not None:
            self.at("starting")
            self._moved = time.monotonic()
            if self._group is not None:
                self._places = Heartbeats(self._here, self._group, interval_s=self._interval_s)
            threading.Thread(target=self._watch, daemon=True, name="mmdata-watchdog").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._places is not None and isinstance(error, RuntimeError) and _is_of_a_collective(error):
                self._blame(self._places, error)
        finally:
            self._stop.set()
            if self._places is not None:
                self._here.ended = f"{kind.__name__}: {error}" if kind else ""
                self._places.close()

    def _watch(self) -> None:
        assert self._timeout_s is not None
        while not self._stop.wait(self._interval_s):
            message = self._judge(self._timeout_s)
            if message and not self._stop.is_set():
                if self._places is not None:
                    self._places.verdict = message
                    self._places.exchange_soon()
                    time.sleep(3 * self._interval_s)  # for the others to hear it: the store may live in this process
                _end(message)

    def _judge(self, timeout_s: float) -> str:
        """Why the run ends, or "" where it goes on."""
        if self._places is not None and self._places.verdict:
            return self._places.verdict
        own, rank = self._here.place(), collectives.rank()
        others = self._places.known() if self._places is not None else {}
        places = {rank: own} | {other: place for other, (place, _) in others.items()}
        stuck = [other for other, place in places.items() if place.for_s > timeout_s]
        if not stuck and all(ago_s <= timeout_s for _, ago_s in others.values()):
            return ""
        limit = f"(train.stall_timeout_s is {timeout_s:g})"
        silent = {other: place for other, (place, ago_s) in others.items() if ago_s > self._patience_s}
        if silent:
            ago_s = min(others[other][1] for other in silent)
            what = f"not been heard of for {ago_s:.0f} s {limit}: it is stopped, dead or cut off; last heard of at"
            return _message(silent, what, {each: place for each, place in places.items() if each not in silent})
        if others and rank != 0:
            return ""  # rank 0 hears of all, and says who it is
        lowest = min(place.order() for place in places.values())
        behind = {each: place for each, place in places.items() if place.order() == lowest}
        rest = {each: place for each, place in places.items() if each not in behind}
        longest_s = max(place.for_s for place in behind.values())
        return _message(behind, f"got no further for {longest_s:.0f} s {limit}:", rest)

    def _blame(self, places: Heartbeats, error: RuntimeError) -> None:
        """Raise an error that names the ranks whose end made a collective fail, where they are found soon."""
        places.ask_all = True
        deadline = time.monotonic() + 2 * self._patience_s
        while time.monotonic() < deadline:
            places.exchange_soon()
            time.sleep(self._interval_s / 2)
            known = places.known()
            ended = {rank: place for rank, (place, _) in known.items() if place.ended}
            if ended:
                words = "; ".join(f"rank {rank} ended at {place}: {place.ended}" for rank, place in ended.items())
                raise TrainingError(f"{words}; all ranks stop") from error
            silent = {rank: place for rank, (place, ago_s) in known.items() if ago_s > self._patience_s}
            if silent:
                words = "; ".join(
                    f"rank {rank} is gone (killed?), last heard of at {place}" for rank, place in silent.items()
                )
                raise TrainingError(
                    f"{words}; all ranks stop, this one at {self._here.place()}; the same command resumes"
                ) from error


def _message(at_fault: dict[int, Place], what: str, rest: dict[int, Place]) -> str:
    words = "; ".join(f"rank {rank} has {what} {place}" for rank, place in sorted(at_fault.items()))
    others = "".join(f"; rank {rank}: {place}" for rank, place in sorted(rest.items())[:8])
    return f"{words}{others}{'; …' if len(rest) > 8 else ''}. All ranks end; the same command resumes"


def _is_of_a_collective(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _end(message: str) -> None:
    """Say where each thread of this process is, and why it ends; end it, whatever the main thread waits for."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        print(f"error: {message}", file=sys.__stderr__, flush=True)
    os._exit(STALLED)
