"""The plan of a stream: windows of tars, planned as a loader's windows are, while the next window is being indexed.

A pass reads each tar once. Its steps depend on tars, settings and the number of the pass alone, so all ranks plan the
same global batches; each rank indexes all tars for that, and decodes the images of its own rows.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.errors import DataError, counted
from mmdata.loader.stream_tars import GrowingIndex, IndexedTar, TarIndexer
from mmdata.loader.workers.interrupt_safe import Promise, SharedGenerator, Stop
from mmdata.loader.workers.threads import END_S
from mmdata.plan import BucketPolicy, CaptionSources, IndexRows, Plan, Step
from mmdata.plan.plan import PlannedShape, largest_first
from mmdata.plan.ranges import RowRanges, Window
from mmdata.plan.schedule import Schedule
from mmdata.processes import map_concurrently

Ints = NDArray[np.int64]

_of_parent = list[Any]()
"""In a forked child: what its parent reads."""


class TarWindow(NamedTuple):
    """Tars whose rows are shuffled together.

    Attributes:
        tars: in the order of the pass.
        rows: how many rows of each are used; all but for `data.max_rows`.
        is_last: whether the pass ends with it.
    """

    tars: list[IndexedTar]
    rows: list[int]
    is_last: bool


def read_windows(tars: TarIndexer, data: DataConfig, number: int, stop: threading.Event) -> Generator[TarWindow]:
    """Read the windows of a pass; the last may have no rows."""
    source, usable_left = tars.source, data.max_rows
    threads, numbers = source.num_threads, source.of_pass(number)
    get = partial(tars.get, stop=stop)
    found = map(get, numbers)
    if threads > 1:
        found = map_concurrently(get, numbers, threads=threads, end=stop.set, ahead=1)
    first, most_rows, most_bytes = source.window(data)
    window, wanted = TarWindow([], [], False), first
    for tar in found:
        window.tars.append(tar)
        # As for a loader, `select` chooses among the first `max_rows` rows.
        window.rows.append(len(tar.columns) if usable_left is None else tar.rows_among(usable_left))
        if usable_left is not None and (usable_left := usable_left - tar.num_usable) <= 0:
            break
        if sum(window.rows) >= wanted or sum(tar.bytes for tar in window.tars) >= most_bytes:
            yield window
            window, wanted = TarWindow([], [], False), min(2 * wanted, most_rows)
    yield window._replace(is_last=True)


class Ahead:
    """Gives windows, and has a thread read the next one while one is in use.

    Args:
        windows: reads them.
        stop: has the reading end.

    Attributes:
        waited_s: seconds spent waiting for windows.
        process: that reads; a forked child has none of its threads.
    """

    def __init__(self, windows: Generator[TarWindow], stop: Stop) -> None:
        self._windows, self._stop = SharedGenerator(windows), stop
        self._asked: Promise[TarWindow] | None = None
        self._thread = threading.Thread()
        self.waited_s = 0.0
        self.process = os.getpid()
        self._is_closed = False

    def next(self) -> TarWindow:
        """Wait for the next window; raises what reading it raises."""
        started = perf_counter()
        asked, self._asked = self._asked, None  # taken once, also where it raises
        window = (asked or self._ask()).take()
        self.waited_s += perf_counter() - started
        if not window.is_last:
            self._asked = self._ask()
        return window

    def _ask(self) -> Promise[TarWindow]:
        promise: Promise[TarWindow] = Promise()
        # A daemon: a program that ends does not wait for a server that does not answer.
        self._thread = threading.Thread(target=_read_next, args=(self._windows, promise), daemon=True)
        self._thread.name = "mmdata-index"
        self._thread.start()
        return promise

    def close(self) -> None:
        """End the reading, at the next sample; waits for it at most END_S. Closing again does nothing."""
        if self._is_closed:
            return
        if self.process != os.getpid():
            # Kept, because to close or collect it would wait for threads that a forked child does not have.
            _of_parent.append(self._windows)
        else:
            self._stop.set()
            self._windows.close()
            # One not started has no ident; and this one may be collecting what reads.
            if self._thread.ident not in (None, threading.get_ident()):
                self._thread.join(END_S)
        self._is_closed = True


def _read_next(windows: SharedGenerator[TarWindow], promise: Promise[TarWindow]) -> None:
    try:
        promise.keep(next(windows))
    except BaseException as error:
        promise.fail(error)
        del promise  # breaks the cycle promise → error → traceback → this frame → promise


class StreamRows(IndexRows):
    """The rows of a stream, whose numbers have gaps.

    Args:
        index: of the tars.
        window: the first of pass 0.
        captions: of the rows.
    """

    def __init__(self, index: GrowingIndex, window: TarWindow, captions: CaptionSources) -> None:
        super().__init__(index, captions)
        self._window = window

    def first(self, count: int) -> Ints:
        """The first `count` rows of the first window."""
        starts = self.starts
        parts = [np.arange(rows) + starts[tar.number] for tar, rows in zip(*self._window[:2], strict=True)]
        return np.concatenate(parts)[:count]


@dataclass
class Reading:
    """A pass that is being read.

    Attributes:
        number: of the pass.
        ahead: gives its windows.
        schedule: of its steps, as far as windows are read.
        tars: the windows that are read.
        windows: the same, as ranges of rows.
        done: (step, window) pairs: after the step no batch needs a row of the windows before this one.
    """

    number: int
    ahead: Ahead
    schedule: Schedule
    tars: list[TarWindow] = field(default_factory=list[TarWindow])
    windows: list[Window] = field(default_factory=list[Window])
    done: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])


class StreamPlan(Plan):
    """The passes of a stream as the epochs of a plan. How many steps a pass has is known with its last window.

    Args:
        data: settings.
        tars: indexes them.
        rows: of the tars.
        policy: gives each row its bucket.
        begun: the windows of pass 0, and what ends the reading of them.
    """

    def __init__(
        self,
        data: DataConfig,
        tars: TarIndexer,
        rows: StreamRows,
        policy: BucketPolicy,
        begun: tuple[Generator[TarWindow], Stop],
    ) -> None:
        super().__init__(
            rows,
            policy,
            global_batch_size=data.global_batch_size,
            seed=data.seed,
            shuffle=data.shuffle,
            window_rows=data.shuffle_window_rows,
            leftover=data.leftover,
        )
        self._data, self._tars = data, tars
        self._begun: tuple[Generator[TarWindow], Stop] | None = begun
        self._process = os.getpid()  # that has begun
        self._reading: Reading | None = None
        self._finalize: weakref.finalize[..., StreamPlan] | None = None

    def in_words(self, epoch: int, world_size: int = 1) -> str:
        """Tars and batch size, for a repr."""
        source = self._tars.source
        tars = counted(source.num_tars, "shard") if source.is_lasting else "samples of an iterable"
        return f"{tars}, batches of {self.global_batch_size // world_size:,} rows"

    @property
    def epochs_differ(self) -> bool:
        """False: only epochs of `steps_per_epoch` have a known number of steps."""
        return False

    def has_steps(self, epoch: int) -> bool:
        """True: the first window had rows."""
        return True

    def num_steps(self, epoch: int) -> int:
        """Nobody knows before the pass is read: raises a TypeError."""
        raise TypeError(
            "a stream has no length: without an index nobody has counted its samples; give steps_per_epoch, or an "
            "index: `mmdata index` makes one, and mmdata.Loader has an exact len()"
        )

    def shapes(self, epoch: int) -> list[PlannedShape]:
        """The shapes that batches may have, those with the most pixels first; 0 stands for unknown numbers of steps."""
        pairs = zip(self.policy.buckets, self.batch_sizes, strict=True)
        return largest_first([PlannedShape(bucket, rows, 0) for bucket, rows in pairs])

    def identity(self) -> dict[str, Any]:
        """What the plan depends on, as JSON; two plans with the same identity have the same steps."""
        data = self._data
        return {
            **super().identity(),
            "max_rows": data.max_rows,
            "select": data.select if isinstance(data.select, str | None) else data.select.model_dump(),
            "val_share": [data.val.share, data.split],
            "members": data.members and data.members.model_dump(),
            "skip_damaged": data.skip_damaged,
        }

    def steps(self, epoch: int, *, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Step]:
        """As `Plan.steps`; the mark of a step says whether it is the last, and what was left out since the step before.

        Windows before that of step `start` are read too: their tars are indexed, and no image is decoded.
        """
        steps = super().steps(epoch, start=start, rank=rank, world_size=world_size)
        step, reading = next(steps, None), self._reading
        assert reading is not None
        if step is None and start == 0:
            raise DataError(f"stream: no sample in pass {epoch}; an iterable must give its samples again in each pass")
        told = len(reading.tars) if start else 0
        while step is not None:
            # The window of the next step is read before this one is given: it may be the last, and without rows.
            following = next(steps, None)
            new = [tar for window in reading.tars[told:] for tar in window.tars]
            told = len(reading.tars)
            left_out = [line for tar in new for line in tar.left_out]
            losses = [(tar.name, *loss) for tar in new for loss in tar.losses]
            mark: dict[str, Any] = {
                "is_last": following is None,
                # All ranks know of all, and each tells of its share.
                "left_out": left_out[rank::world_size],
                "losses": losses[rank::world_size],
                "waited_s": reading.ahead.waited_s,
            }
            reading.ahead.waited_s = 0.0
            self._let_go(reading, step.number)
            yield step._replace(mark=mark)
            step = following

    def stop(self) -> None:
        """Read no further; the next steps begin with their pass anew."""
        if (reading := self._reading) is not None:
            self._reading = None
            reading.ahead.close()
            if self._finalize is not None:
                self._finalize.detach()

    def _schedule(self, epoch: int) -> tuple[list[list[Window]], Schedule]:
        """The windows of a pass that are read, and the schedule, which reads further windows when it needs them."""
        reading = self._reading
        if reading is None or reading.number != epoch or reading.ahead.process != os.getpid():
            self.stop()
            reading = self._reading = self._begin(epoch)
        return [reading.windows], reading.schedule

    def _begin(self, number: int) -> Reading:
        begun, self._begun = self._begun, None
        if begun is not None and self._process != os.getpid():
            _of_parent.append(begun)
            begun = None
        if number == 0 and begun is not None:
            windows, stop = begun
        else:
            stop = Stop()
            windows = read_windows(self._tars, self._data, number, stop)

        def arrivals(rounds: range) -> Ints:
            for round_ in rounds:
                window = reading.ahead.next()
                reading.tars.append(window)
                reading.windows.append(self._window(window, number, round_))
                if window.is_last:
                    schedule.num_rounds = round_ + 1
            return self._window_reader.arrivals([reading.windows], number, rounds)

        # No window without a tar but the last: so many rounds, or fewer.
        most = self._tars.source.num_tars + 1
        sizes = np.array([self.batch_sizes], np.int64)
        schedule = Schedule(arrivals, most, self.policy.buckets, sizes, self.leftover)
        reading = Reading(number, Ahead(windows, stop), schedule)
        # A program may end in mid-pass. Later, when it collects the iteration, the modules used here are gone.
        self._finalize = weakref.finalize(self, reading.ahead.close)
        return reading

    def _window(self, window: TarWindow, number: int, round_: int) -> Window:
        tars = np.array([tar.number for tar in window.tars], np.int64)
        begins = self.rows.starts[tars]
        ends = begins + np.array(window.rows, np.int64)
        return Window(RowRanges(tars, begins, ends, np.full(len(tars), number, np.int64)), round_)

    def _let_go(self, reading: Reading, step: int) -> None:
        """Have the source drop tars that no batch needs any more."""
        schedule, read = reading.schedule, len(reading.windows)
        oldest = schedule.carried_from(0, read)
        if not reading.done or reading.done[-1][1] != oldest:
            last = int(schedule.first_step[read])  # the rows of windows before `oldest` are in steps before this one
            reading.done.append((last + self._data.loading.prefetch_batches + 1, oldest))
        while reading.done and reading.done[0][0] <= step:
            for window in reading.tars[: reading.done.popleft()[1]]:
                for tar in window.tars:
                    self._tars.source.let_go(tar.number)
                window.tars.clear()
