"""Shows how work on many rows goes: bars on a terminal, a line a minute in a log. What is worked on is not touched."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # rich is imported where something is shown
    from rich.progress import Progress as RichProgress

T = TypeVar("T")

WINDOW_S = 30.0
"""Seconds over which a rate is measured."""
MARK_S = 1.0
"""Seconds between two marks of how far a pass is."""
LINE_S = 60.0
"""Seconds between two lines in a log; what is shorter prints none."""
DRAW_S = 0.1
"""Seconds between two states of a bar."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Track:
    """What a conversion tells of its progress. This one shows nothing."""

    def __call__(
        self, things: Iterable[T], what: str, total: int, *, noun: str = "rows", is_exact: bool = True
    ) -> Iterable[T]:
        """Pass things through, and show how many have passed.

        Args:
            things: of the pass.
            what: name of the pass.
            total: upper bound of their number.
            noun: what they are.
            is_exact: whether `total` is their number.
        """
        return things

    def skip(self, rows: int) -> None:
        """Count rows of the pass in progress that an earlier run has done: they say nothing about the rate."""

    def leave_out(self, rows: int, of: int) -> None:
        """Count rows of the pass in progress that cannot be used, among so many that were judged."""

    def say(self, what: str) -> None:
        """Name what is going on now, where nothing is counted."""


SILENT = Track()
"""Shows nothing."""


class Pass:
    """How far one pass is, and how fast. Times are given, in seconds of any clock that does not go back.

    Args:
        what: its name.
        total: upper bound of the number of things; 0 if nothing is counted.
        noun: what they are.
        is_exact: whether `total` is their number.
        now: when it began.

    Attributes:
        made: things that passed.
        skipped: things that an earlier run has done.
    """

    def __init__(self, what: str, total: int, noun: str = "rows", *, is_exact: bool = True, now: float) -> None:
        self.what, self.total, self.is_exact = what, total, is_exact
        self.made = self.skipped = 0
        self._noun = noun
        self._left_out, self._judged = 0, 0
        self._began = now
        self._marks = deque([(now, 0)])  # when so many had been made
        self._ended: float | None = None

    @property
    def done(self) -> int:
        """Things that need no more work."""
        return self.made + self.skipped

    def leave_out(self, rows: int, of: int) -> None:
        """See `Track.leave_out`."""
        self._left_out, self._judged = self._left_out + rows, self._judged + of

    def end(self, now: float) -> None:
        """Nothing more will come."""
        self._ended, self.total, self.is_exact = now, self.done, True

    def mark(self, now: float) -> None:
        """Remember how far it is, for the rate; called every few seconds at least."""
        if now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, self.made))
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()

    def rate(self, now: float) -> float | None:
        """Things made a second, over the last WINDOW_S; None where too little time has passed to tell."""
        begin, made = (self._began, 0) if self._ended is not None else self._marks[0]
        elapsed = (now if self._ended is None else self._ended) - begin
        return (self.made - made) / elapsed if elapsed >= MARK_S else None

    def text(self, now: float) -> str:
        """How far it is, for people.

        Example:
            "120,000 of at most 1,000,000 rows, 812 rows/s, 0.4 % left out, at most 18 min left"
        """
        if not self.total and not self.done:
            return duration((self._ended or now) - self._began)
        of = "" if self._ended is not None else f" of {'' if self.is_exact else 'at most '}{self.total:,}"
        parts = [f"{self.done:,}{of} {self._noun}"]
        rate = self.rate(now)
        if rate:
            parts.append(f"{rate:,.0f} {self._noun}/s" if rate >= 10 else f"{rate:.2g} {self._noun}/s")
        if self._judged:
            parts.append(f"{100 * self._left_out / self._judged:.1f} % left out")
        if self._ended is None and rate is not None and self.done < self.total:
            parts.append(self._left(rate, now))
        return ", ".join(parts)

    def _left(self, rate: float, now: float) -> str:
        if not rate:
            return f"none for {duration(now - self._marks[0][0])}"
        return f"{'' if self.is_exact else 'at most '}{duration((self.total - self.done) / rate)} left"


def duration(seconds: float) -> str:
    """Seconds for people, rounded up: "40 s", "18 min", "2 h 05 min"."""
    whole = int(-(-seconds // 1))
    if whole < 90:
        return f"{whole} s"
    minutes = -(-whole // 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60:,} h {minutes % 60:02} min"


class ShownTrack(Track):
    """A track that keeps what it is told.

    Attributes:
        skipped: rows, over all passes, that an earlier run has done.
        current: the pass in progress; None before the first.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.current: Pass | None = None

    def __call__(
        self, things: Iterable[T], what: str, total: int, *, noun: str = "rows", is_exact: bool = True
    ) -> Iterator[T]:
        """See `Track`."""
        self._end_saying()
        one = self.current = Pass(what, total, noun, is_exact=is_exact, now=time.monotonic())
        self._begin(one)
        for thing in things:
            yield thing
            one.made += 1
            self._moved(one)
        one.end(time.monotonic())
        self._end(one)

    def skip(self, rows: int) -> None:
        """See `Track`."""
        self.skipped += rows
        if self.current is not None:
            self.current.skipped += rows

    def leave_out(self, rows: int, of: int) -> None:
        """See `Track`."""
        if self.current is not None:
            self.current.leave_out(rows, of)

    def say(self, what: str) -> None:
        """See `Track`."""
        self._end_saying()
        self.current = Pass(what, 0, now=time.monotonic())
        self._begin(self.current)

    def _end_saying(self) -> None:
        if self.current is not None and not self.current.total and not self.current.done:
            self.current.end(time.monotonic())
            self._end(self.current)

    def _begin(self, one: Pass) -> None:
        """A pass begins."""

    def _moved(self, one: Pass) -> None:
        """A thing has passed."""

    def _end(self, one: Pass) -> None:
        """A pass has ended."""


class _Bars(ShownTrack):
    """Bars of rich, one a pass."""

    def __init__(self, bars: RichProgress) -> None:
        super().__init__()
        self._bars = bars
        self._tasks: dict[Pass, Any] = {}
        self._drawn = 0.0

    def _begin(self, one: Pass) -> None:
        self._tasks[one] = self._bars.add_task(one.what, total=one.total or None, state=one)

    def _moved(self, one: Pass) -> None:
        if (now := time.monotonic()) - self._drawn > DRAW_S:
            self._drawn = now
            self._bars.update(self._tasks[one], completed=one.done)

    def _end(self, one: Pass) -> None:
        self._bars.update(self._tasks[one], completed=one.done or 1, total=one.done or 1)


@contextmanager
def progress_in_rows() -> Generator[ShownTrack]:
    """Shows progress on stderr until the end of the context: bars on a terminal, else a line every LINE_S."""
    from rich.console import Console

    console = Console(stderr=True)
    with _bars(console) if console.is_terminal else _lines() as track:
        yield track


@contextmanager
def _bars(console: Any) -> Generator[ShownTrack]:
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class State(ProgressColumn):
        """How far a pass is."""

        def render(self, task: Task) -> Text:
            one, now = task.fields["state"], time.monotonic()
            one.mark(now)
            return Text(one.text(now))

    with Progress(TextColumn("{task.description}"), BarColumn(bar_width=12), State(), console=console) as bars:
        yield _Bars(bars)


@contextmanager
def _lines() -> Generator[ShownTrack]:
    track, stop = ShownTrack(), threading.Event()

    def print_lines() -> None:
        printed = time.monotonic()
        while not stop.wait(min(MARK_S, LINE_S)):
            one, now = track.current, time.monotonic()
            if one is None:
                continue
            one.mark(now)
            if now - printed >= LINE_S:
                print(f"{one.what}: {one.text(now)}", file=sys.stderr, flush=True)
                printed = now

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
        self._progress, self._sizes = progress, [*sizes]
        self._offsets = [0] * len(sizes)
        self._done = 0
        self._total = sum(size or 0 for size in sizes)
        self._unknown = {number for number, size in enumerate(sizes) if size is None}
        self._lock = threading.Lock()

    def steps(self, number: int) -> Callable[[int], None]:
        """A callback for the offsets that are reached in a tar."""
        return partial(self._reach, number)

    def finish(self, number: int, size: int) -> None:
        """Count a whole tar of `size` bytes."""
        self._sizes[number] = size
        self._reach(number, size)

    def _reach(self, number: int, offset: int) -> None:
        with self._lock:
            if number in self._unknown and (size := self._sizes[number]) is not None:
                self._unknown.remove(number)
                self._total += size
            self._done += offset - self._offsets[number]
            self._offsets[number] = offset
            if self._progress:
                total = self._total * len(self._sizes) // max(len(self._sizes) - len(self._unknown), 1)
                self._progress(self._done, max(total, self._done))
