"""What every foreign loop needs: batches that do not change, and ranks that agree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch.distributed as dist

from mmdata.batch import CLIP_MEAN, CLIP_STD, Batch, normalized, valid_inputs
from mmdata.errors import ConfigError, DataError
from mmdata.launcher import launched
from mmdata.loader import Loader
from mmdata.streaming import Stream
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather

# A model's inputs are made in `mmdata.batch`; these names stay for programs that import them from this module.
__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "SameEpoch",
    "check_launched",
    "judged_together",
    "normalized",
    "valid_inputs",
]


class SameEpoch:
    """A loader that gives its first epoch each time: an evaluation must not vary with captions or order.

    Args:
        loader: whose epochs otherwise differ.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        self.loader.set_epoch(0)
        return judged_together(self.loader)


JUDGE_EVERY = 100
"""Batches after which the ranks tell each other how many rows could not be used; a GPU is waited for then."""


def judged_together(loader: Loader | Stream) -> Iterator[Batch]:
    """The batches of a loader, or of a stream with `steps_per_epoch`.

    Whether too many rows could not be used is judged over all ranks.

    It is judged at every hundredth batch and at the last one of an epoch. All ranks must iterate in step, as they do
    while training. A loader of one rank judges by itself.

    Args:
        loader: this rank's.

    Raises:
        DataError: too many rows could not be used, over all ranks; on every rank, at the same batch.
    """
    if loader.world_size == 1 or loader.world_size != collectives.world_size():
        yield from loader
        return

    # A stream on several ranks has a number of steps that is the same in each epoch.
    @cache
    def num_steps(epoch: int) -> int:
        return loader.plan.num_steps(epoch) if isinstance(loader, Loader) else len(loader)

    def judged(batch: Batch) -> Batch:
        state = loader.state_dict()
        if state["step"] % JUDGE_EVERY == 0 or state["step"] == num_steps(state["epoch"]):
            _judge(loader)
        return batch

    yield from map(judged, loader)  # no name holds a batch that the user has let go: its memory is used again


def _judge(loader: Loader | Stream) -> None:
    states = gather(loader.state_dict(), dist.group.WORLD)
    try:
        loader.check_rows(loader.merge_states(states))
    except DataError as error:
        raise DataError(f"over {len(states)} ranks, {error}") from None


def check_launched(world_size: int, *, trainer: str, remedy: str) -> None:
    """Raise where a trainer runs alone, or with other ranks, in one of several processes that a launcher has started.

    Each of them would train on the same rows and write into the same folder.

    Args:
        world_size: that the trainer has found.
        trainer: its name, for the message.
        remedy: a clause for the message.

    Raises:
        ConfigError: RANK and WORLD_SIZE in the environment say another number of processes.
    """
    found = launched()
    if found is not None and found[1] != world_size:
        raise ConfigError(
            f"this process was started as rank {found[0]} of {found[1]} (RANK and WORLD_SIZE in the environment), and "
            f"{trainer} has a world of {world_size}: every process would train on the same rows and write the same "
            f"files; {remedy}"
        )
