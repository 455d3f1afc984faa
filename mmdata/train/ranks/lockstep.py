"""What ranks do together before and between steps, over CPU tensors. An error on one rank ends all ranks.

A rank that raised alone would leave the others waiting for it in the model's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mmdata.batch import Batch
from mmdata.errors import DataError, TrainingError
from mmdata.train.batches import Batches, LoaderExtras
from mmdata.train.ranks import collectives


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, in rank order. A collective: all must call."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_first(do: Callable[[], object], group: dist.ProcessGroup | None) -> None:
    """Rank 0 calls `do`, the others wait for it; all ranks raise what it raises. A collective."""
    failed: list[Exception | None] = [None]
    if collectives.rank() == 0:
        try:
            do()
        except Exception as error:
            failed = [error]
    if group is not None:
        dist.broadcast_object_list(failed, src=0, group=group)
    if failed[0] is not None:
        raise failed[0]


def in_lockstep(batches: Iterator[Batch], group: dist.ProcessGroup | None) -> Iterator[Batch]:
    """The same batches; all ranks iterate in step.

    Raises:
        TrainingError: another rank got an error, or no more batches; the message names the rank. The rank that got
            an error raises that error.
    """
    while True:
        batch, error = None, None
        try:
            batch = next(batches, None)
        except Exception as caught:
            error = caught
        if group is not None:
            _stop_if_they_differ(batch, error, group)
        if error is not None:
            raise error
        if batch is None:
            return
        yield batch


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


def _stop_if_they_differ(batch: Batch | None, error: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise a TrainingError where another rank has an error, or only some have a batch."""
    kind = 2 if error is not None else int(batch is None)
    ranks = torch.zeros(3, dtype=torch.int64)  # number of ranks that have a batch, have none left, got an error
    ranks[kind] = 1
    dist.all_reduce(ranks, group=group)
    if int(ranks[kind]) == dist.get_world_size(group):
        return
    said = ["", "its epoch has ended", f"{type(error).__name__}: {error}"][kind]
    everything = gather((kind, said), group)
    if error is None:
        worst, words = max(everything)  # an error before an early end
        raise TrainingError(f"rank {everything.index((worst, words))} got no batch, and all ranks stop: {words}")
