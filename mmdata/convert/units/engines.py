"""Engines make the units of a conversion, in this process or in several. All make the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from mmdata.convert.fetch import FetchStage
from mmdata.convert.sources.rows import InputRow, has_url
from mmdata.convert.units.staging import MissingUnits, Receipt
from mmdata.convert.units.unit import Job, Unit, UnitWriter
from mmdata.errors import DataError, counted
from mmdata.processes import Step, events_of_processes, map_concurrently, usable_cores
from mmdata.system import IS_POSIX

A = TypeVar("A")
R = TypeVar("R")

CHUNK = 16
"""Rows that a thread takes at once."""


class Progress(NamedTuple):
    """Rows that were examined since the last time."""

    rows: int


Engine = Callable[[Job, Iterable[Unit]], Iterator[Receipt | Progress]]
"""Makes units: yields the receipt of each, in any order, and how many rows were examined meanwhile."""


def local(num_workers: int | None = None) -> Engine:
    """An engine of processes, one a worker; or of threads in this process, where processes are of no use.

    That is so if there is but one unit, from the first unit with images behind URLs on, because one process knows what
    it may ask of each server, and if a program gives rows that only it can read; and always on Windows.

    Args:
        num_workers: None takes one for each core.
    """
    workers = num_workers or usable_cores()

    def run(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        iterator = iter(units)
        first = list(islice(iterator, 2))
        later = chain(first, iterator)
        if IS_POSIX and workers > 1 and len(first) > 1 and (job.source is None or job.source.can_be_sent):
            with_urls: list[Unit] = []
            yield from processes(workers)(job, _without_urls(later, with_urls))
            later = chain(with_urls, later)
        yield from threads(workers)(job, later)

    return run


def threads(num_workers: int | None = None) -> Engine:
    """An engine of threads in this process: reading, hashing and decoding release the GIL.

    Args:
        num_workers: threads that examine rows; None takes one for each core.
    """
    workers = num_workers or usable_cores()

    def run(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        with FetchStage.from_config(job.config) as fetch:
            yield from make_units(job, units, fetch, workers)

    return run


def only_made(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
    """The engine of a conversion that only puts together what its parts have made.

    Raises:
        MissingUnits: there is a unit to make.
    """
    missing = [(unit.start, unit.stop - 1) for unit in units]
    if missing:
        first, last = missing[0]
        raise MissingUnits(
            f"{counted(len(missing), 'unit')} to make, as parts have not run or files have changed (first: rows "
            f"{first} to {last}); run all parts again, which make only these, and then --finish"
        )
    yield from ()


def processes(num_workers: int | None = None) -> Engine:
    """An engine of processes, each of which makes whole units.

    Args:
        num_workers: processes; None takes one for each core.
    """
    workers = num_workers or usable_cores()

    def run(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        given: dict[int, Unit] = {}
        examined: dict[int, int] = {}

        def note_each() -> Iterator[Unit]:
            for place, unit in enumerate(units):
                given[place], examined[place] = unit, 0
                yield unit

        def name(place: int) -> str:
            return f"rows {given[place].start} to {given[place].stop - 1}"

        for event in events_of_processes(partial(_make_unit, job), note_each(), name=name, workers=workers):
            if event.kind == "failed":
                raise event.content
            rows = event.content if event.kind == "step" else len(given[event.place])
            yield Progress(rows - examined[event.place])
            examined[event.place] = rows
            if event.kind == "done":
                del given[event.place], examined[event.place]
                yield event.content

    return run


def _make_unit(job: Job, unit: Unit, step: Step) -> Receipt:
    """Make a unit in a process of `processes`."""
    with FetchStage.from_config(job.config) as fetch:
        rows = 0
        for event in make_units(job, [unit], fetch, 1):
            if isinstance(event, Receipt):
                return event
            rows += event.rows
            step(rows)
    raise AssertionError("make_units gives a receipt, or raises")


def make_units(job: Job, units: Iterable[Unit], fetch: FetchStage, workers: int) -> Iterator[Receipt | Progress]:
    """Make units one after the other; the rows of the next one are fetched and examined while one ends.

    Raises:
        DataError: a unit has fewer rows than it should.
        OSError: the disk is full or broken.
    """
    begun: deque[Unit] = deque()  # their rows were asked for

    def rows() -> Iterator[InputRow]:
        for unit in units:
            begun.append(unit)
            yield from job.rows(unit)

    writer: UnitWriter | None = None
    try:
        for outcome in in_order(workers, job.examiner, fetch(rows())):
            if writer is None:
                writer = UnitWriter(job, begun.popleft())
            writer.add(outcome)
            yield Progress(1)
            if writer.is_full:
                receipt = writer.finish()
                writer = None
                yield receipt
        if writer is not None or begun:
            unit = writer.unit if writer is not None else begun[0]
            raise DataError(
                f"rows {unit.start} to {unit.stop - 1} are no longer all there: the source has changed; convert again"
            )
    finally:
        if writer is not None:
            writer.discard()


def in_order(workers: int, function: Callable[[A], R], rows: Iterable[A]) -> Iterator[R]:
    """Call a function for each row, in threads if there are several workers; results come in the order of the rows.

    A bounded number of rows and results waits.
    """
    if workers == 1:
        yield from map(function, rows)
        return
    call = partial(_call_for_all, function)
    for results in map_concurrently(call, chunks(rows, CHUNK), threads=workers, end=lambda: None, ahead=2):
        yield from results


def chunks(rows: Iterable[A], size: int) -> Iterator[list[A]]:
    """Lists of `size` consecutive rows; the last may be shorter."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _without_urls(units: Iterator[Unit], with_urls: list[Unit]) -> Iterator[Unit]:
    """Units up to the first one with an image behind a URL, which is put into the list."""
    for unit in units:
        if any(map(has_url, unit.rows or ())):
            with_urls.append(unit)
            return
        yield unit


def _call_for_all(function: Callable[[A], R], rows: list[A]) -> list[R]:
    return [function(row) for row in rows]
