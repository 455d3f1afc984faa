"""A clock on every stage of loading, and the account of rows and padding. Every moment of a worker is some stage's."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import NamedTuple

STAGES = ("read", "decode", "transform", "tokenize", "collate")
"""What workers do: members of shards to bytes; images to pixels; crop and resize; captions to ids; all else a batch
needs: its memory, masks, labels and keys."""

WATCH_EVERY = 8
"""Rows of which one has its processor time taken too: that clock is a system call, and costs ten times the other."""

NOTICEABLE = 0.2  # of the workers' time, waiting for a core: below it nobody need do anything about it


def _zeros() -> dict[str, float]:
    return dict.fromkeys(STAGES, 0.0)


class Bottleneck(NamedTuple):
    """What a loader spends most time on.

    Attributes:
        stage: one of `STAGES`, or "transfer": the copy to the device.
        words: a clause that says so.
    """

    stage: str
    words: str


@dataclass
class Stats:
    """Sums over the batches of a loader.

    Attributes:
        wall_s: seconds by stage, of all workers together.
        cpu_s: processor seconds in them, estimated from one row in `WATCH_EVERY`. The rest is waiting: for a disk or a
            network, or for a core or the interpreter's lock while another thread has it.
        workers: of each worker, by the name of its thread, seconds by stage and "rows". The threads of worker process p
            have names of their own, `mmdata-process_p-worker_0` and so on.
        wait_s: the caller waited for a batch.
        transfer_s: the caller was busy with the copy to the device (`DevicePrefetcher`).
        read_bytes: of images.
        rows: valid rows.
        masked: rows that could not be used, and those that fill up the last batch.
        tokens: in valid rows, padding excluded.
        token_places: the same rows with their padding.
    """

    wall_s: dict[str, float] = field(default_factory=_zeros)
    cpu_s: dict[str, float] = field(default_factory=_zeros)
    workers: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    wait_s: float = 0.0
    transfer_s: float = 0.0
    read_bytes: int = 0
    rows: int = 0
    masked: int = 0
    tokens: int = 0
    token_places: int = 0

    def add(self, other: Stats) -> None:
        """Add the sums of another."""
        self._add(other, 1)

    def since(self, earlier: Stats) -> Stats:
        """The sums of what came after an earlier `copy`."""
        later = self.copy()
        later._add(earlier, -1)
        return later

    def copy(self) -> Stats:
        """The sums as they are now."""
        copied = Stats()
        copied._add(self, 1)
        return copied

    def _add(self, other: Stats, sign: int) -> None:
        for name in ("wait_s", "transfer_s", "read_bytes", "rows", "masked", "tokens", "token_places"):
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))
        _add_each(self.wall_s, other.wall_s, sign)
        _add_each(self.cpu_s, other.cpu_s, sign)
        for worker, sums in other.workers.items():
            _add_each(self.workers.setdefault(worker, {}), sums, sign)

    @property
    def padding_share(self) -> float:
        """Share of the token places that hold padding."""
        return 1 - self.tokens / self.token_places if self.token_places else 0.0

    @property
    def own_s(self) -> dict[str, float]:
        """Seconds by stage that are the stage's own doing: without waiting for a core or the interpreter's lock.

        Any stage waits for these, and one that holds the lock makes the others look slow. What a stage alone waits for
        is its own: so much as it waited longer than all other stages together.

        Example:
            A slow disk: read waits 9 s, the others 0.5 s: 8.5 s of it are reading's own. A tokenizer that holds the
            lock: read waits 0.6 s, decode and transform 0.7 s: no stage has them for its own.
        """
        waited = {stage: max(0.0, wall - self.cpu_s[stage]) for stage, wall in self.wall_s.items()}
        total = sum(waited.values())
        return {
            stage: min(wall, self.cpu_s[stage]) + max(0.0, 2 * waited[stage] - total)
            for stage, wall in self.wall_s.items()
        }

    @property
    def core_wait_s(self) -> float:
        """Seconds that workers had work, and waited for a core or the interpreter's lock."""
        return sum(self.wall_s.values()) - sum(self.own_s.values())

    def bottleneck(self) -> Bottleneck | None:
        """The stage that most time goes to; None where nothing was measured."""
        total, own = sum(self.wall_s.values()), self.own_s
        if total <= 0:
            return None
        if self.transfer_s > self.wait_s > 0:
            return Bottleneck("transfer", "the copy to the device takes longer than making the batches")
        stage = max(own, key=own.__getitem__)
        words = f"{stage} takes {own[stage] / total:.0%} of the workers' time"
        if self.core_wait_s > NOTICEABLE * total:
            words += f", and for {self.core_wait_s / total:.0%} of it they wait for a core or the interpreter's lock"
        return Bottleneck(stage, words)


class StageClock:
    """Times a part of a batch in the thread that makes it. `lap` gives all since the last lap to a stage.

    Seconds are those of the wall: reading from a slow disk costs them and no others.

    Args:
        stats: of the part.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._watched_s, self._watched_cpu_s = _zeros(), _zeros()
        self._watching = True
        self._cpu, self._wall = thread_time(), perf_counter()

    def watch(self, watching: bool) -> None:
        """Take the processor's time too in the laps that follow, or no more."""
        if watching and not self._watching:
            self._cpu = thread_time()
        self._watching = watching

    def lap(self, stage: str) -> None:
        """A stage has ended."""
        wall = perf_counter()
        lap_s, self._wall = wall - self._wall, wall
        self._stats.wall_s[stage] += lap_s
        if self._watching:
            cpu = thread_time()
            self._watched_s[stage] += lap_s
            self._watched_cpu_s[stage] += cpu - self._cpu
            self._cpu = cpu

    def stop(self) -> None:
        """The part is made: write down whose work it was, and the processor's time."""
        stats = self._stats
        for stage, wall_s in stats.wall_s.items():
            watched_s = self._watched_s[stage]
            stats.cpu_s[stage] = wall_s * min(1.0, self._watched_cpu_s[stage] / watched_s) if watched_s else 0.0
        stats.workers = {threading.current_thread().name: {**stats.wall_s, "rows": stats.rows}}


def _add_each(sums: dict[str, float], others: Mapping[str, float], sign: int) -> None:
    for name, value in others.items():
        sums[name] = sums.get(name, 0) + sign * value
