"""The plan of a stream: windows of tars, planned as a loader's windows are, while the next window is being indexed.

A pass reads each tar once. Its steps depend on tars, settings and the number of the pass alone, so all ranks plan the
same global batches; each rank indexes all tars for that, and decodes the images of its own rows.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter, deque
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from threading import Event
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.errors import DataError
from mmdata.loader.growing.tars import GrowingIndex, IndexedTar, TarIndexer
from mmdata.loader.workers.threads import Stop, ThreadedBatches, Work
from mmdata.plan import BucketPolicy, CaptionSources, IndexRows, Plan, Step
from mmdata.plan.boxes import check_boxes
from mmdata.plan.schedule import Schedule
from mmdata.plan.windows import RowRanges, Window
from mmdata.processes import map_concurrently

Ints = NDArray[np.int64]


class TarWindow(NamedTuple):
    """Tars whose rows are shuffled together.

    Attributes:
        tars: in the order of the pass.
        ranges: the rows of each.
        is_last: whether the pass ends with it.
    """

    tars: list[IndexedTar]
    ranges: RowRanges
    is_last: bool


def read_windows(tars: TarIndexer, number: int, stop: Event) -> Generator[TarWindow]:
    """Read the windows of a pass; the last may have no rows."""
    source = tars.source
    threads, numbers = source.num_threads, source.of_pass(number)
    get = partial(tars.get, stop=stop)
    found = map(get, numbers)
    if threads > 1:
        found = map_concurrently(get, numbers, threads=threads, end=stop.set, ahead=1)
    read, rows, wanted = list[IndexedTar](), list[int](), source.first_rows

    def window(*, is_last: bool) -> TarWindow:
        shards = np.array([tar.number for tar in read], np.int64)
        begins = shards * tars.stride
        passes = np.full(len(read), number, np.int64)
        return TarWindow(read, RowRanges(shards, begins, begins + np.array(rows, np.int64), passes), is_last)

    for tar in found:
        read.append(tar)
        rows.append(len(tar.places))
        if sum(rows) >= wanted or sum(tar.entry.bytes for tar in read) >= source.window_bytes:
            yield window(is_last=False)
            read, rows, wanted = [], [], min(2 * wanted, source.window_rows)
    yield window(is_last=True)


class WindowReader:
    """The windows of a pass as the steps of a pipeline, whose work is done when they are read.

    Attributes:
        stop: has the reading end, at the next sample.
    """

    current_epoch = 0

    def __init__(self, tars: TarIndexer, data: DataConfig) -> None:
        self._tars, self._data = tars, data
        self._ended = Stop()

    def steps(self, epoch: int, start: int) -> Generator[TarWindow, None, None]:
        """The windows of a pass."""
        return read_windows(self._tars, epoch, self._ended)

    def begin(self, step: TarWindow, stop: Event | None = None) -> Work:
        """The window itself."""
        return Work([lambda: None], lambda: step)

    def stop(self) -> None:
        """Read no further tar."""
        self._ended.set()


class Reading:
    """A pass that is being read: a thread reads the next window while one is in use.

    Args:
        tars: indexes them.
        data: settings.
        number: of the pass.

    Attributes:
        windows: that were taken.
        untold: their tars, until a step tells of the samples that were left out.
        waited_s: seconds spent waiting for windows, until a step tells.
        is_fresh: whether no steps were made of it, and it was not closed.
    """

    def __init__(self, tars: TarIndexer, data: DataConfig, number: int) -> None:
        self.number, self.process, self.is_fresh = number, os.getpid(), True
        self.windows: list[Window] = []
        self.untold: list[IndexedTar] = []
        self.waited_s = 0.0
        reader = WindowReader(tars, data)
        self._ahead: ThreadedBatches[TarWindow] = ThreadedBatches(
            reader, num_threads=1, prefetch=1, name="mmdata-index"
        )
        self._ahead.begin(number, 0)
        self._end = weakref.finalize(self, reader.stop)  # before the threads are waited for
        self._first: TarWindow | None = None

    @property
    def first(self) -> TarWindow:
        """The first window, which is also the first that is taken."""
        if self._first is None:
            self._first = self._next()
        return self._first

    def take(self) -> TarWindow:
        """Wait for the next window; raises what reading it raises."""
        window = self._next() if self.windows else self.first
        self.windows.append(Window(window.ranges, len(self.windows)))
        self.untold += window.tars
        return window

    def tell(self, rank: int, world_size: int) -> dict[str, Any]:
        """A rank's share of the samples that were left out since the last call, and the seconds waited: JSON."""
        left_out = [line for tar in self.untold for line in tar.left_out]
        told = {"left_out": left_out[rank::world_size], "waited_s": self.waited_s}
        self.untold, self.waited_s = [], 0.0
        return told

    def _next(self) -> TarWindow:
        started = perf_counter()
        window = self._ahead.take(self.number, len(self.windows))
        self.waited_s += perf_counter() - started
        return window

    def close(self) -> None:
        """End the reading. Closing again does nothing."""
        self.is_fresh = False
        self._end()
        self._ahead.stop()


class StreamRows(IndexRows):
    """The rows of a stream, whose numbers have gaps; `first_rows` are those of its first window."""

    def __init__(self, index: GrowingIndex, captions: CaptionSources, first_rows: Ints) -> None:
        super().__init__(index, captions)
        self._first_rows, self._tars = first_rows, index.tars
        self.boxes_fingerprint = None if index.tars.boxes is None else str(index.tars.boxes[1])

    def first(self, count: int) -> Ints:
        """The first `count` rows of the first window."""
        return self._first_rows[:count]

    def boxes(self, rows: Ints) -> Ints:
        """How many boxes each of n rows has, int64 (n,)."""
        tars, places = np.divmod(rows, self._tars.stride)
        found = np.zeros(len(rows), np.int64)
        for tar in np.unique(tars).tolist():
            mine = tars == tar
            found[mine] = self._tars.get(tar).boxes[places[mine]]
        return found


class StreamPlan(Plan):
    """The passes of a stream as the epochs of a plan. How many steps a pass has is known with its last window.

    Args:
        data: settings.
        index: of the tars.
        captions: of the rows.
        policy: gives each row its bucket.
        reading: of pass 0.
    """

    def __init__(
        self, data: DataConfig, index: GrowingIndex, captions: CaptionSources, policy: BucketPolicy, reading: Reading
    ) -> None:
        super().__init__(
            StreamRows(index, captions, reading.first.ranges.occurrences()),
            policy,
            global_batch_size=data.global_batch_size,
            seed=data.seed,
            shuffle=data.shuffle,
            window_rows=data.shuffle_window_rows,
            leftover=data.leftover,
        )
        self._data, self._tars, self._reading = data, index.tars, reading
        self._rows_left = Counter[int]()  # of each tar in memory, until the batches with them are made
        self._in_use: deque[Step] = deque()  # the last steps, whose batches may be in the making
        self._told_boxes = index.tars.boxes is None  # then there is nothing to tell

    def in_words(self, epoch: int, world_size: int = 1) -> str:
        """Tars and batch size, for a repr."""
        return f"{self._tars.source.in_words}, batches of {self._batch_in_words(world_size)}"

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

    def steps_of_buckets(self, epoch: int) -> None:
        """Nobody knows before the pass is read."""

    def identity(self) -> dict[str, Any]:
        """What the plan depends on, as JSON; two plans with the same identity have the same steps."""
        data = self._data
        return {
            **super().identity(),
            "select": data.select,
            "val_share": [data.val.share, data.split],
            "members": data.members or None,
        }

    def steps(self, epoch: int, *, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Step]:
        """As `Plan.steps`; the mark of a step says whether it is the last, and what was left out since the step before.

        Windows before that of step `start` are read too: their tars are indexed, and no image is decoded.
        """
        if self._tars.source.is_lasting:
            steps = super().steps(epoch, start=start, rank=rank, world_size=world_size)
        else:
            steps = islice(self._counted(super().steps(epoch)), start, None)
        step, reading = next(steps, None), self._reading
        if step is None and start == 0:
            raise DataError(f"stream: no sample in pass {epoch}; an iterable must give its samples again in each pass")
        if start:
            reading.untold = []  # earlier steps told of these
        while step is not None:
            # The window of the next step is read before this one is given: it may be the last, and without rows.
            following = next(steps, None)
            # All ranks know of all, and each tells of its share.
            yield step._replace(mark={"is_last": following is None, **reading.tell(rank, world_size)})
            step = following

    def stop(self) -> None:
        """Read no further; the next steps begin with their pass anew."""
        self._reading.close()

    def _schedule(self, epoch: int) -> tuple[list[list[Window]], Schedule]:
        """The windows of a pass that are read, and the schedule, which reads further windows when it needs them."""
        reading = self._reading
        if not reading.is_fresh or reading.number != epoch or reading.process != os.getpid():
            reading.close()
            # Batches of passes before may be in the making; what else is left of them is not needed.
            self._in_use = deque(step for step in self._in_use if step.epoch < epoch)
            used = {tar for step in self._in_use for tar in (step.rows[step.rows >= 0] // self._tars.stride).tolist()}
            for tar in self._tars.source.in_memory() - used:
                self._drop(tar)
            reading = self._reading = Reading(self._tars, self._data, epoch)
        reading.is_fresh = False

        def arrivals(rounds: range) -> Ints:
            for round_ in rounds:
                window = reading.take()
                self._check_boxes(window)
                if not self._tars.source.is_lasting:
                    sizes = (window.ranges.ends - window.ranges.begins).tolist()
                    self._rows_left.update(dict(zip(window.ranges.shards.tolist(), sizes, strict=True)))
                if window.is_last and (reached := schedule()) is not None:
                    reached.num_rounds = round_ + 1
            return self._window_reader.arrivals([reading.windows], epoch, rounds)

        # No window without a tar but the last: so many rounds, or fewer.
        most, sizes = self._tars.source.num_tars + 1, np.array([self.batch_sizes], np.int64)
        made = Schedule(arrivals, most, self.policy.buckets, sizes, self.leftover)
        # A weak reference: in a cycle the threads that read ahead would wait for the garbage collector.
        schedule = weakref.ref(made)
        return [reading.windows], made

    def _check_boxes(self, window: TarWindow) -> None:
        """Warn of a window with more boxes than batches have room for, once: the first window has decided the room."""
        if window.tars and not self._told_boxes:
            self._told_boxes = check_boxes(np.concatenate([tar.boxes for tar in window.tars]), self.policy.buckets) > 0

    def _counted(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps; drops a tar once batches of all its rows were made: the memory of a pass has no other bound."""
        for step in steps:
            self._in_use.append(step)
            # The caller uses one step, this generator is one step ahead, and these are being made.
            if len(self._in_use) > self._data.loading.prefetch_batches + 2:
                rows = self._in_use.popleft().rows
                self._rows_left.subtract((rows[rows >= 0] // self._tars.stride).tolist())
                for tar in [tar for tar, count in self._rows_left.items() if count <= 0]:
                    self._drop(tar)
            yield step

    def _drop(self, tar: int) -> None:
        self._rows_left.pop(tar, None)
        self._tars.drop(tar)
