"""A clock on every stage of loading, and counts of rows and padding. All time of a worker belongs to some stage."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any, NamedTuple, cast

STAGES = ("read", "decode", "transform", "tokenize", "collate")
"""Stages of a worker: read members of shards; decode images; crop and resize; tokenize captions; collate the rest of a
batch (memory, masks, labels, keys)."""

WATCH_EVERY = 8
"""Processor time is measured for one row in this many: its clock is a system call, which costs ten times the other."""

NOTICEABLE = 0.2
"""Share of the workers' time spent waiting for a core from which a message mentions it."""


def _zeros() -> dict[str, float]:
    return dict.fromkeys(STAGES, 0.0)


class Bottleneck(NamedTuple):
    """The stage on which a loader spends most time.

    Attributes:
        stage: one of `STAGES`, or "transfer": the copy to the device.
        words: a clause for a message.
    """

    stage: str
    words: str


@dataclass
class Stats:
    """Sums over the batches of a loader.

    Attributes:
        wall_s: seconds by stage, summed over all workers.
        cpu_s: processor seconds by stage, estimated from one row in `WATCH_EVERY`. The difference to `wall_s` is
            waiting: for a disk or a network, for a core, or for the interpreter's lock.
        workers: thread name to seconds by stage and "rows", those whose pixels it has written. Threads of worker
            process p are called `mmdata-process_p-worker_0` and so on.
        wait_s: seconds for which the caller waited for a batch.
        transfer_s: seconds for which the caller copied batches to the device (`DevicePrefetcher`).
        read_bytes: bytes of images.
        rows: valid rows.
        masked: rows that could not be used, and rows that are padding.
        tokens: tokens of valid rows, without padding.
        token_places: tokens of valid rows, with padding.
        cut: texts of a `text_transform` that were longer than their batch, and not than `max_length`; phrases of
            boxes that were longer than `box_text_length`.
        boxes: numbers of boxes of `data.targets`: "shown" in batches; of these "clipped", since they reached beyond
            their image; and "left_out" (no area inside their image, or another class), "cropped" (by the crop), and
            "over", of more boxes than their batch has room for. Empty where there are none.
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
    cut: int = 0
    boxes: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: Stats) -> None:
        """Add the sums of another to these."""
        _add(vars(self), vars(other), 1)

    def since(self, earlier: Stats) -> Stats:
        """The sums since an earlier `copy`."""
        later = self.copy()
        _add(vars(later), vars(earlier), -1)
        return later

    def copy(self) -> Stats:
        """A copy of the sums."""
        return deepcopy(self)

    @property
    def padding_share(self) -> float:
        """Share of the token places that hold padding."""
        return 1 - self.tokens / self.token_places if self.token_places else 0.0

    @property
    def own_s(self) -> dict[str, float]:
        """Seconds by stage without the time in which it waited for a core or the interpreter's lock.

        Every stage waits for these, and a stage that holds the lock makes the others look slow. Waiting counts for a
        stage only as far as that stage waited longer than all others together: then it waits for a disk, say.

        Example:
            A slow disk: read waits 9 s, the others 0.5 s: 8.5 s count for read. A tokenizer that holds the lock: read
            waits 0.6 s, decode and transform 0.7 s: they count for no stage.
        """
        waited = {stage: max(0.0, wall - self.cpu_s[stage]) for stage, wall in self.wall_s.items()}
        total = sum(waited.values())
        return {
            stage: min(wall, self.cpu_s[stage]) + max(0.0, 2 * waited[stage] - total)
            for stage, wall in self.wall_s.items()
        }

    @property
    def core_wait_s(self) -> float:
        """Seconds for which workers that had work waited for a core or the interpreter's lock."""
        return sum(self.wall_s.values()) - sum(self.own_s.values())

    def bottleneck(self) -> Bottleneck | None:
        """The stage with most time; None before the first batch."""
        total, own = sum(self.wall_s.values()), self.own_s
        if total <= 0:
            return None
        if self.transfer_s > self.wait_s > 0:
            return Bottleneck("transfer", "the copy to the device takes longer than making the batches")
        stage = max(own, key=own.__getitem__)
        # Threads of workers have names; without workers the caller's thread makes the batches.
        alone = bool(self.workers) and not any("-worker" in name for name in self.workers)
        of = "the time that batches take to make (num_workers is 0)" if alone else "the workers' time"
        words = f"{stage} takes {own[stage] / total:.0%} of {of}"
        if self.core_wait_s > NOTICEABLE * total:
            words += f", and for {self.core_wait_s / total:.0%} of it they wait for a core or the interpreter's lock"
        return Bottleneck(stage, words)


class StageClock:
    """Times a part of a batch in the thread that makes it. `lap` adds the time since the last lap to a stage.

    It measures wall time, since a slow disk takes no processor time.

    Attributes:
        stats: gets the seconds.
        current: number of the sample in progress, for messages; None where it is none, or several.
    """

    def __init__(self) -> None:
        self.stats = Stats()
        self.current: int | None = None
        self._watched_s, self._watched_cpu_s = _zeros(), _zeros()
        self._watching = True
        self._cpu, self._wall = thread_time(), perf_counter()

    def watch(self, watching: bool) -> None:
        """Switch the measurement of processor time on or off for the laps that follow."""
        if watching and not self._watching:
            self._cpu = thread_time()
        self._watching = watching

    def lap(self, stage: str) -> None:
        """End a stage: it gets the time since the last lap."""
        wall = perf_counter()
        lap_s, self._wall = wall - self._wall, wall
        self.stats.wall_s[stage] += lap_s
        if self._watching:
            cpu = thread_time()
            self._watched_s[stage] += lap_s
            self._watched_cpu_s[stage] += cpu - self._cpu
            self._cpu = cpu

    def stop(self) -> None:
        """End the part: add its processor time, and its sums under the name of the thread that made it."""
        stats = self.stats
        for stage, wall_s in stats.wall_s.items():
            watched_s = self._watched_s[stage]
            # The rows not watched are taken to have the share of processor time of those that were.
            stats.cpu_s[stage] = wall_s * min(1.0, self._watched_cpu_s[stage] / watched_s) if watched_s else 0.0
        stats.workers = {threading.current_thread().name: {**stats.wall_s, "rows": stats.rows}}


def _add(sums: dict[str, Any], others: Mapping[str, Any], sign: int) -> None:
    """Add numbers by name, and numbers in dictionaries by name."""
    for name, value in others.items():
        if isinstance(value, dict):
            _add(sums.setdefault(name, {}), cast("dict[str, Any]", value), sign)
        else:
            sums[name] = sums.get(name, 0) + sign * value
