"""What a foreign training loop needs: a fixed epoch for evaluations, and ranks that fail together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from mmdata.batch import Batch
from mmdata.errors import ConfigError, DataError
from mmdata.launcher import launched
from mmdata.loader import Loader
from mmdata.train.models.expected_inputs import PixelStats, inputs_of
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather


def pixel_stats(model: Any, processor: Any = None) -> PixelStats:
    """Mean and standard deviation of pixels that a model of transformers expects, for `normalized`.

    Args:
        model: of transformers; the image processor in its folder tells them, else its kind.
        processor: its processor or image processor, which comes first.

    Raises:
        ConfigError: the image processor in the folder cannot be read.
        ValueError: neither tells them.

    Example:
        stats = pixel_stats(model)  # once, before the loop
        inputs["pixel_values"] = normalized(inputs["pixel_values"], *stats)
    """
    stats = inputs_of(model, processor).pixel_stats
    if stats is None:
        raise ValueError(
            f"{type(model).__name__} does not say which mean and deviation of pixels it expects: give its image "
            "processor (LoaderTrainer: processing_class), or call normalized with both"
        )
    return stats


JUDGE_EVERY = 100
"""Batches between two exchanges of the ranks' counts of bad rows; each exchange waits for the GPU."""


class SameEpoch:
    """A loader that gives epoch 0 each time, so that an evaluation always has the same captions and order."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        self.loader.set_epoch(0)
        return judged_together(self.loader)


def judged_together(loader: Loader) -> Iterator[Batch]:
    """The batches of a loader; the share of bad rows is checked over all ranks, so that all ranks fail together.

    The check is a collective at every JUDGE_EVERY-th batch and at the last batch of an epoch: all ranks must iterate in
    step, as in training. A loader of one rank checks its own rows.

    Args:
        loader: this rank's loader, or its stream with `steps_per_epoch`.

    Raises:
        DataError: too many rows could not be used, over all ranks. It is raised on every rank at the same batch.
    """
    if loader.world_size == 1 or loader.world_size != collectives.world_size():
        yield from loader
        return

    num_steps = cache(loader.num_steps)

    def judged(batch: Batch) -> Batch:
        state = loader.state_dict()
        if state["step"] % JUDGE_EVERY == 0 or state["step"] == num_steps(state["epoch"]):
            _judge(loader)
        return batch

    # Not a loop: its variable would keep a batch's memory in use after the user dropped the batch.
    yield from map(judged, loader)


def _judge(loader: Loader) -> None:
    states = gather(loader.state_dict(), collectives.cpu_group())
    try:
        loader.check_rows(loader.merge_states(states))
    except DataError as error:
        raise DataError(f"over {len(states)} ranks, {error}") from None


def check_launched(world_size: int, *, trainer: str, remedy: str) -> None:
    """Raise if a launcher has started another number of processes than the trainer knows of.

    Each process would train on the same rows and write into the same folder.

    Args:
        world_size: the trainer's.
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
