"""What ranks do together before and between steps, over CPU tensors. An error on one rank ends all ranks.

A rank that raised alone would leave the others waiting for it in the model's collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import ConfigError, DataError, TrainingError, counted
from mmdata.train.batches import Batches, LoaderExtras
from mmdata.train.ranks import collectives

T = TypeVar("T")


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, in rank order. A collective: all must call."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_same_batches(identity: dict[str, Any] | None, group: dist.ProcessGroup | None) -> None:
    """Check that the loaders of all ranks have the same batches. A collective.

    Raises:
        ConfigError: they do not; names the first rank that differs from rank 0, and in what.
    """
    first, *others = gather(identity or {}, group)
    for rank, other in enumerate(others, start=1):
        if differ := [name for name in first if other.get(name) != first[name]]:
            name = differ[0]
            raise ConfigError(
                f"rank {rank} has other batches than rank 0: {name} is {other.get(name)!r}, and {first[name]!r} on "
                "rank 0. The ranks see different files, or one was written while they started: start again with files "
                "that all of them share"
            )


def on_first(do: Callable[[], object], group: dist.ProcessGroup | None, *, takes: timedelta | None = None) -> None:
    """Rank 0 calls `do`, the others wait for it; all ranks raise what it raises. A collective.

    Args:
        do: what to do.
        group: the ranks, gloo; None: this process alone.
        takes: longest time to wait, if that is longer than the ranks wait in a collective.
    """

    def first() -> None:
        if collectives.rank() == 0:
            do()

    on_all(first, group, takes=takes)


def on_all(do: Callable[[], T], group: dist.ProcessGroup | None, *, takes: timedelta | None = None) -> list[T]:
    """What `do` returns on each rank, in rank order; all ranks raise what it raises on the first. A collective."""
    result: T | None = None
    failed: Exception | None = None
    if group is not None and takes is not None:
        group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=takes))
    try:
        result = do()
    except Exception as error:
        failed = error
    everything = gather((failed, result), group)
    if group is not None and takes is not None:
        dist.destroy_process_group(group)
    for error, _ in everything:
        if error is not None:
            raise error
    return [value for _, value in everything]


HAS_BATCH, HAS_ENDED, HAS_FAILED, SIGNAL, MOST_ROWS, FEWEST_ROWS = range(6)
"""What the ranks tell each other before a step: places in a vector of six. Each rank sets one of the first three to 1,
the next to the number of a signal, and the last two to the rows of its batch and to their negative."""


class Lockstep:
    """The ranks take their batches together. It costs one small collective a step, which no rank waits for.

    When a rank takes the batch after the one that it trains on, it begins to tell the others what came (a batch of so
    many rows, the end of its epoch, an error) and which signal it has got; the answer is read when that batch is due.

    Args:
        group: the ranks, gloo; None: this process alone.
        received: gives the number of the signal that this process has got, or 0.
        ahead: the caller calls `took` as soon as it takes a batch, one ahead. False: each batch is told when it is due,
            and all ranks wait for the slowest.

    Example:
        lockstep = Lockstep(group, lambda: stop.received)
        for batch in lockstep.batches(iter(DevicePrefetcher(loader, device, took=lockstep.took))):
            step(batch)
            if lockstep.signal():
                break
    """

    def __init__(
        self, group: dist.ProcessGroup | None, received: Callable[[], int] = lambda: 0, *, ahead: bool = True
    ) -> None:
        self._group, self._received, self._ahead = group, received, ahead
        self._asked: deque[_Asked] = deque()  # the batch that is due, and the one after it

    def took(self, came: Batch | Exception | None) -> None:
        """Begin to tell the other ranks of a batch, or of what came in its place. A collective.

        Args:
            came: a batch; StopIteration or None at the end of the epoch; or another exception.
        """
        if self._group is None:
            return
        if came is None or isinstance(came, StopIteration):
            kind, rows = HAS_ENDED, 0
        elif isinstance(came, Exception):
            kind, rows = HAS_FAILED, 0
        else:
            kind, rows = HAS_BATCH, len(came["rows"])
        values = torch.zeros(6, dtype=torch.int64)
        values[kind], values[SIGNAL], values[MOST_ROWS], values[FEWEST_ROWS] = 1, self._received(), rows, -rows
        work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._asked.append(_Asked(kind, rows, values, work))

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; all ranks iterate in step.

        What goes wrong on the device after `took`, in the copy of a batch, is not announced: as for an error in a step,
        torchrun ends the other ranks.

        Raises:
            TrainingError: another rank got an error, no more batches, or a batch of another number of rows; the message
                names the rank. The rank that got an error raises that error.
        """
        self._asked.clear()
        while True:
            batch, error = None, None
            try:
                batch = next(batches, None)
            except Exception as failed:
                error = failed
            if not self._ahead:
                self.took(error or batch)
            if self._group is not None and self._asked:  # empty if asking itself has failed, with `error`
                self._stop_if_they_differ(self._asked.popleft(), error)
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
            del batch  # its memory may be needed for the next one

    def signal(self) -> int:
        """The signal that any rank had got when it took the batch after the current one, or 0; equal on all ranks."""
        return self._received() if self._group is None else self._asked[0].answer()[SIGNAL]

    def _stop_if_they_differ(self, asked: _Asked, error: Exception | None) -> None:
        """Raise a TrainingError where another rank has an error, no batch, or one of another number of rows."""
        answer = asked.answer()
        if sum(answer[:SIGNAL]) == 1 and answer[MOST_ROWS] == -answer[FEWEST_ROWS]:
            return
        if self._ahead and asked.kind != HAS_BATCH:
            self.took(error)  # ranks with a batch have taken the next one: all call the same collectives
        words = ["", "its epoch has ended", f"{type(error).__name__}: {error}"][asked.kind]
        everything = gather((asked.kind, words, asked.rows), self._group)
        if error is None:
            raise _difference(everything)


class _Asked(NamedTuple):
    """A question under way to all ranks: what this rank has, in how many rows, and what becomes the answer."""

    kind: int
    rows: int
    values: Tensor
    work: dist.Work

    def answer(self) -> list[int]:
        """Of each place the largest number of any rank; waits for the slowest rank's question."""
        self.work.wait()
        return self.values.tolist()


def _difference(everything: list[tuple[int, str, int]]) -> TrainingError:
    """The error that names the rank without a batch, or two ranks with different numbers of rows."""
    worst, least = max(everything), min(everything)  # an error before an early end
    if worst[0] != HAS_BATCH:
        return TrainingError(f"rank {everything.index(worst)} got no batch, and all ranks stop: {worst[1]}")
    return TrainingError(
        f"rank {everything.index(worst)} has a batch of {counted(worst[2], 'row')}, and rank {everything.index(least)} "
        f"one of {counted(least[2], 'row')}: all ranks need equally many. Give each rank's loader the same batch size, "
        "and leave out a smaller last batch (drop_last=True), or fill it up with rows whose `valid` is False"
    )


def checked_state(batches: Batches, source: Batches, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """One state for all ranks, in which the rows that they have counted are added up. A collective.

    Args:
        batches: as the loop iterates over them.
        source: the loader behind them.
        group: the ranks; None: this process alone.

    Raises:
        TrainingError: over all ranks, more rows could not be used than the loader allows; on every rank.
    """
    states, extras = gather(batches.state_dict(), group), LoaderExtras.of(source)
    if group is None or extras.merge_states is None or extras.check_rows is None:
        return states[0]
    state = extras.merge_states(states)
    try:
        extras.check_rows(state)
    except DataError as error:
        raise TrainingError(f"over {len(states)} ranks, {error}") from error
    return state
