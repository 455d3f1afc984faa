"""Shows how work on many rows goes: bars on a terminal, a line a minute in a log. What is worked on is not touched."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

T = TypeVar("T")

MEASURED_S = 1.0
"""Seconds after which a rate is told."""
LINE_S = 60.0
"""Seconds between two lines in a log; what is shorter prints none."""
DRAW_S = 0.1
"""Seconds between two states of a bar."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(eq=False)
class Pass:
    """How far one pass is, and how fast. Times are in seconds of any clock that does not go back.

    Attributes:
        what: its name.
        total: number of things; 0 if nothing is counted.
        began: when it began.
        noun: what the things are.
        ended: when it ended; None while more may come.
        made: things that passed.
        skipped: things that an earlier run has done.
        left_out: things that cannot be used, among those that were `judged`.
    """

    what: str
    total: int
    began: float
    noun: str = "rows"
    ended: float | None = None
    made: int = 0
    skipped: int = 0
    left_out: int = 0
    judged: int = 0

    @property
    def done(self) -> int:
        """Things that need no more work."""
        return self.made + self.skipped

    @property
    def now(self) -> str:
        """How far it is now, for people."""
        return self.text(time.monotonic())

    def text(self, now: float) -> str:
        """How far it is, for people.

        Example:
            "120,000 of 1,000,000 rows, 812 rows/s, 0.4 % left out, 18 min left"
        """
        seconds = (now if self.ended is None else self.ended) - self.began
        if not self.total and not self.done:
            return duration(seconds)
        of = f" of {self.total:,}" if self.ended is None else ""
        parts = [f"{self.done:,}{of} {self.noun}"]
        rate = self.made / seconds if seconds >= MEASURED_S else 0.0
        if rate:
            parts.append(f"{rate:,.0f} {self.noun}/s" if rate >= 10 else f"{rate:.2g} {self.noun}/s")
        if self.judged:
            parts.append(f"{100 * self.left_out / self.judged:.1f} % left out")
        if rate and self.ended is None and self.done < self.total:
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds for people, rounded up: "40 s", "18 min", "2 h 05 min"."""
    whole = int(-(-seconds // 1))
    if whole < 90:
        return f"{whole} s"
    minutes = -(-whole // 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60:,} h {minutes % 60:02} min"


class Track:
    """What a conversion tells of its progress.

    Args:
        show: is given a pass when it begins, every DRAW_S while it goes on, and when it has ended.

    Attributes:
        skipped: rows, over all passes, that an earlier run has done.
        current: the newest pass.
    """

    def __init__(self, show: Callable[[Pass], object] = lambda one: None) -> None:
        self.skipped = 0
        self.current = Pass("", 0, began=0.0, ended=0.0)
        self._show = show

    def __call__(self, things: Iterable[T], what: str, total: int, *, noun: str = "rows") -> Iterator[T]:
        """Pass things through, and show how many have passed.

        Args:
            things: of the pass.
            what: name of the pass.
            total: their number.
            noun: what they are.
        """
        one = Pass(what, total, time.monotonic(), noun)
        self._begin(one)
        drawn = one.began
        for thing in things:
            yield thing
            one.made += 1
            if (now := time.monotonic()) - drawn > DRAW_S:
                drawn = now
                self._show(one)
        self._end(one)

    def skip(self, rows: int) -> None:
        """Count rows of the pass in progress that an earlier run has done: they say nothing about the rate."""
        self.skipped += rows
        self.current.skipped += rows

    def leave_out(self, rows: int, of: int) -> None:
        """Count rows of the pass in progress that cannot be used, among so many that were judged."""
        self.current.left_out += rows
        self.current.judged += of

    def say(self, what: str) -> None:
        """Name what is going on now, where nothing is counted."""
        self._begin(Pass(what, 0, time.monotonic()))

    def _begin(self, one: Pass) -> None:
        if self.current.ended is None and not self.current.total:  # what `say` has named
            self._end(self.current)
        self.current = one
        self._show(one)

    def _end(self, one: Pass) -> None:
        one.ended = time.monotonic()
        self._show(one)


SILENT = Track()
"""Shows nothing."""


@contextmanager
def progress_in_bytes(title: str) -> Generator[Progress, None, None]:
    """A progress bar on a terminal's stderr. The value is called with (bytes done, bytes in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def progress_in_rows() -> Generator[Track]:
    """Shows progress on stderr until the end of the context: bars on a terminal, else a line every LINE_S."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines() as track:
            yield track
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[state].now}")
    tasks: dict[Pass, TaskID] = {}
    with Progress(*columns, console=console) as bars:

        def show(one: Pass) -> None:
            if one not in tasks:
                tasks[one] = bars.add_task(one.what, total=one.total or None, state=one)
            elif one.ended is None:
                bars.update(tasks[one], completed=one.done)
            else:  # a full bar, also where nothing was counted
                bars.update(tasks[one], total=one.done or 1, completed=one.done or 1)

        yield Track(show)


@contextmanager
def _lines() -> Generator[Track]:
    track, stop = Track(), threading.Event()

    def print_lines() -> None:
        while not stop.wait(LINE_S):
            if track.current.ended is None:
                print(f"{track.current.what}: {track.current.now}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=print_lines, name="progress", daemon=True)
    thread.start()
    try:
        yield track
    finally:
        stop.set()
        thread.join()


class Bar:
    """Reports progress over tars that are read in any order.

    Args:
        progress: called with (bytes done, bytes in all); may be None.
        sizes: of the tars, in bytes; those not known yet are taken to be as large as the others on average.
    """

    def __init__(self, progress: Progress | None, sizes: Sequence[int | None]) -> None:
        self._progress = progress
        self._sizes = {number: size for number, size in enumerate(sizes) if size is not None}
        self._total = sum(self._sizes.values())
        self._offsets = [0] * len(sizes)
        self._done = 0
        self._lock = threading.Lock()

    def steps(self, number: int) -> Callable[[int], None]:
        """A callback for the offsets that are reached in a tar."""
        return partial(self._reach, number)

    def finish(self, number: int, size: int) -> None:
        """Count a whole tar of `size` bytes."""
        with self._lock:
            self._total += size - self._sizes.get(number, 0)
            self._sizes[number] = size
        self._reach(number, size)

    def _reach(self, number: int, offset: int) -> None:
        with self._lock:
            self._done += offset - self._offsets[number]
            self._offsets[number] = offset
            if self._progress:
                total = self._total * len(self._offsets) // max(len(self._sizes), 1)
                self._progress(self._done, max(total, self._done))
