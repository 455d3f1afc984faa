"""Where a rank stands: in which epoch, and in which of its passes over the shards. Epochs and passes end apart."""

from __future__ import annotations

import logging
from typing import NamedTuple

from mmdata.errors import ConfigError

logger = logging.getLogger("mmdata")


class Place(NamedTuple):
    """Between two batches of a rank.

    Attributes:
        number: of the pass, from 0.
        batches: of this pass that have been.
    """

    number: int
    batches: int = 0


class Position:
    """The place of a rank, and what it means in epochs.

    Args:
        steps_per_epoch: each epoch has so many batches and begins where the one before it ended; None: an epoch is
            the pass of its number.

    Attributes:
        epoch: the current one.
        step: batches of it that have been yielded.
        place: after them.

    Example:
        Passes of 7 batches and 5 steps an epoch: epoch 1 begins at Place(0, 5) and ends at Place(1, 3).
    """

    def __init__(self, steps_per_epoch: int | None) -> None:
        self.epoch = self.step = 0
        self.place = Place(0)
        self._steps = steps_per_epoch
        self._starts = {0: self.place}  # of the epochs whose start is known
        self._resume = False  # the next iteration goes on at `step`, even where nothing is left

    @property
    def left(self) -> int | None:
        """Batches that the epoch still has; None: as many as the pass."""
        return None if self._steps is None else self._steps - self.step

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the current one is left where it is."""
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more: got {epoch}")
        if epoch == self.epoch and (self._resume or self.left != 0):
            return
        if self.left == 0:
            self._starts[self.epoch + 1] = self.place
        self._go_to(epoch)

    def next_epoch(self) -> None:
        """Go to the start of the next epoch, which is known: the current one has ended."""
        if self._steps is not None:
            self._starts[self.epoch + 1] = self.place
        self._go_to(self.epoch + 1)

    def begin(self) -> None:
        """At the beginning of an iteration: go on where `restore` went, or at the start of the epoch."""
        if self._resume:
            self._resume = False
            return
        if self.left == 0:  # a loop that counts to len never asks for the end of the epoch
            self.next_epoch()
        self._go_to(self.epoch)
        if self._steps is not None and self.epoch not in self._starts:
            logger.warning(
                "stream: epoch %d begins with pass %d from its start, because this stream has not given the epoch "
                "before it: some samples come twice, others later; `load_state_dict` goes on exactly",
                self.epoch,
                self.epoch,
            )

    def advance(self, place: Place) -> None:
        """A batch is yielded; `place` is after it."""
        self.step, self.place = self.step + 1, place

    def restore(self, epoch: int, step: int, place: Place) -> None:
        """Go where a run was stopped."""
        self.epoch, self.step, self.place = epoch, step, place
        self._starts = {0: Place(0)} | ({epoch: place} if step == 0 else {})
        self._resume = True

    def _go_to(self, epoch: int) -> None:
        self.epoch, self.step, self._resume = epoch, 0, False
        self.place = self._starts.get(epoch, Place(epoch))


def check_steps(steps_per_epoch: int | None, world_size: int, global_batch_size: int) -> None:
    """Raise a ConfigError for a number of steps that is none, or that is missing with several ranks."""
    if steps_per_epoch is None and world_size > 1:
        raise ConfigError(
            f"stream: world_size is {world_size}, and ranks whose shards hold different numbers of samples would wait "
            "for each other without end: give steps_per_epoch, the same on all ranks, about samples / "
            f"global_batch_size (for 1,000,000 samples {max(1, 1_000_000 // global_batch_size):,}); or run "
            "`mmdata index` and use mmdata.Loader, which knows it"
        )
    if steps_per_epoch is not None and (type(steps_per_epoch) is not int or steps_per_epoch < 1):
        raise ConfigError(f"stream: steps_per_epoch must be a whole number from 1 on: got {steps_per_epoch!r}")
