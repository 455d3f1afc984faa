"""Where a rank stands: in which epoch, and in which of its passes over the shards. Epochs and passes end apart."""

from __future__ import annotations

import logging
from typing import NamedTuple

from mmdata.errors import ConfigError
from mmdata.plan.position import Position

logger = logging.getLogger("mmdata")


class Place(NamedTuple):
    """Between two batches of a rank.

    Attributes:
        number: of the pass, from 0.
        batches: of this pass that have been.
    """

    number: int
    batches: int = 0


class RankPosition:
    """The position of a rank in epochs, as any loader's, and its place in the passes.

    Args:
        steps_per_epoch: each epoch has so many batches and begins where the one before it ended; None: an epoch is
            the pass of its number.

    Attributes:
        place: after the batches that have been yielded.

    Example:
        Passes of 7 batches and 5 steps an epoch: epoch 1 begins at Place(0, 5) and ends at Place(1, 3).
    """

    def __init__(self, steps_per_epoch: int | None) -> None:
        self.place = Place(0)
        self._position = Position()
        self._steps = steps_per_epoch
        self._starts = {0: self.place}  # of the epochs whose start is known

    @property
    def epoch(self) -> int:
        """The current one."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """Batches of the epoch that have been yielded."""
        return self._position.step

    @property
    def restores(self) -> int:
        """Times that a state has been loaded."""
        return self._position.restores

    @property
    def left(self) -> int | None:
        """Batches that the epoch still has; None: as many as the pass."""
        return None if self._steps is None else self._steps - self.step

    @property
    def start(self) -> Place | None:
        """Of the current epoch; None: unknown, or the pass of its number."""
        return None if self._steps is None else self._starts.get(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """As `Position.set_epoch`."""
        self._note_end()
        if self._position.set_epoch(epoch, self._steps):
            self._go_to_start()

    def restore(self, epoch: int, step: int, place: Place, *, start: Place | None) -> None:
        """Go where a state was taken; `start` of that epoch, where it is known."""
        self._position.restore(epoch, step)
        self.place = place
        start = place if step == 0 else start
        self._starts = {0: Place(0)} | ({} if start is None else {epoch: start})

    def begin(self) -> int:
        """As `Position.begin`."""
        self._note_end()
        iteration = self._position.begin(self._steps)
        if self.step == 0:  # else a state was loaded, and `place` is its
            self._go_to_start()
            if self._steps is not None and self.epoch not in self._starts:
                logger.warning(
                    "stream: epoch %d begins with pass %d from its start, because this stream has not given the epoch "
                    "before it: some samples come twice, others later; `load_state_dict` goes on exactly",
                    self.epoch,
                    self.epoch,
                )
                self._starts_at(self.epoch, self.place)
        return iteration

    def is_of(self, iteration: int) -> bool:
        """Whether no one has overtaken an iteration."""
        return self._position.is_of(iteration)

    def check(self, iteration: int) -> None:
        """Raise a RuntimeError where an iteration was overtaken."""
        self._position.check(iteration, of="stream")

    def advance(self, iteration: int, place: Place) -> None:
        """A batch is yielded; `place` is after it."""
        if self._position.advance(iteration):
            self.place = place

    def end(self, iteration: int) -> None:
        """Go to the start of the next epoch after the last batch of an iteration, unless it was overtaken."""
        if self.is_of(iteration):
            self._note_end()
            self._position.end(iteration)
            self._go_to_start()

    def _note_end(self) -> None:
        """Where all batches of the current epoch have been yielded, the next one begins here."""
        if self.left == 0:
            self._starts_at(self.epoch + 1, self.place)

    def _starts_at(self, epoch: int, start: Place) -> None:
        """Epochs after it were given after another start, if this one is new."""
        if self._starts.get(epoch) != start:
            self._starts = {e: place for e, place in self._starts.items() if e < epoch} | {epoch: start}

    def _go_to_start(self) -> None:
        self.place = self._starts.get(self.epoch, Place(self.epoch))


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
