"""The position of a rank's stream, in epochs and in passes over the shards. A pass need not end where an epoch ends."""

from __future__ import annotations

import logging
from typing import NamedTuple

from mmdata.errors import ConfigError
from mmdata.plan.position import Position

logger = logging.getLogger("mmdata")


class PassPosition(NamedTuple):
    """A position between two batches of a rank's passes over its shards.

    Attributes:
        number: of the pass, from 0.
        batches: batches of this pass before the position.
    """

    number: int
    batches: int = 0


class StreamPosition:
    """The position of a rank's stream: in epochs (`Position`) and in passes (`PassPosition`).

    Args:
        steps_per_epoch: batches of each epoch; an epoch begins in the pass where the epoch before it ended. None: epoch
            e is pass e.

    Attributes:
        in_passes: the position in passes, after the last batch that was yielded.

    Example:
        Passes of 7 batches and 5 steps an epoch: epoch 1 begins at PassPosition(0, 5) and ends at PassPosition(1, 3).
    """

    def __init__(self, steps_per_epoch: int | None) -> None:
        self.in_passes = PassPosition(0)
        self._in_epochs = Position()
        self._steps = steps_per_epoch
        self._starts = {0: self.in_passes}  # known starts of epochs

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._in_epochs.epoch

    @property
    def step(self) -> int:
        """Batches of the current epoch that have been yielded."""
        return self._in_epochs.step

    @property
    def restores(self) -> int:
        """Number of states that have been loaded."""
        return self._in_epochs.restores

    @property
    def steps_left(self) -> int | None:
        """Batches that the current epoch still has; None without steps_per_epoch."""
        return None if self._steps is None else self._steps - self.step

    @property
    def epoch_start(self) -> PassPosition | None:
        """Where the current epoch began; None if that is unknown, or without steps_per_epoch."""
        return None if self._steps is None else self._starts.get(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """See `Position.set_epoch`."""
        self._note_end()
        if self._in_epochs.set_epoch(epoch, self._steps):
            self._go_to_start()

    def restore(self, epoch: int, step: int, in_passes: PassPosition, *, epoch_start: PassPosition | None) -> None:
        """Go to the position of a state; `epoch_start` is where its epoch began, None if unknown."""
        self._in_epochs.restore(epoch, step)
        self.in_passes = in_passes
        start = in_passes if step == 0 else epoch_start
        self._starts = {0: PassPosition(0)} | ({} if start is None else {epoch: start})

    def begin(self) -> int:
        """See `Position.begin`."""
        self._note_end()
        iteration = self._in_epochs.begin(self._steps)
        if self.step == 0:  # a step above 0 comes from a state, which has also set `in_passes`
            self._go_to_start()
            if self._steps is not None and self.epoch not in self._starts:
                logger.warning(
                    "stream: epoch %d begins with pass %d from its start, because this stream has not given the epoch "
                    "before it: some samples come twice, others later; `load_state_dict` goes on exactly",
                    self.epoch,
                    self.epoch,
                )
                self._set_start(self.epoch, self.in_passes)
        return iteration

    def interrupt(self, mover: str) -> None:
        """See `Position.interrupt`."""
        self._in_epochs.interrupt(mover)

    def is_of(self, iteration: int) -> bool:
        """See `Position.is_of`."""
        return self._in_epochs.is_of(iteration)

    def check(self, iteration: int) -> None:
        """Raise a RuntimeError if an iteration was overtaken."""
        self._in_epochs.check(iteration, of="stream")

    def advance(self, iteration: int, in_passes: PassPosition) -> None:
        """Count a batch that an iteration yields, unless it was overtaken; `in_passes` is the position after it."""
        if self._in_epochs.advance(iteration):
            self.in_passes = in_passes

    def end(self, iteration: int) -> None:
        """After the last batch of an iteration go to the start of the next epoch, unless it was overtaken."""
        if self.is_of(iteration):
            self._note_end()
            self._in_epochs.end(iteration)
            self._go_to_start()

    def _note_end(self) -> None:
        """If all batches of the current epoch have been yielded, the next epoch begins at the current position."""
        if self.steps_left == 0:
            self._set_start(self.epoch + 1, self.in_passes)

    def _set_start(self, epoch: int, start: PassPosition) -> None:
        # The later starts followed from the old start of this epoch, so a new one makes them unknown.
        if self._starts.get(epoch) != start:
            self._starts = {e: known for e, known in self._starts.items() if e < epoch} | {epoch: start}

    def _go_to_start(self) -> None:
        self.in_passes = self._starts.get(self.epoch, PassPosition(self.epoch))


def check_steps(steps_per_epoch: int | None, world_size: int, global_batch_size: int) -> None:
    """Raise a ConfigError if steps_per_epoch is no positive int, or is None with several ranks."""
    if steps_per_epoch is None and world_size > 1:
        raise ConfigError(
            f"stream: world_size is {world_size}, and ranks whose shards hold different numbers of samples would wait "
            "for each other without end: give steps_per_epoch, the same on all ranks, about samples / "
            f"global_batch_size (for 1,000,000 samples {max(1, 1_000_000 // global_batch_size):,}); or run "
            "`mmdata index` and use mmdata.Loader, which knows it"
        )
    if steps_per_epoch is not None and (type(steps_per_epoch) is not int or steps_per_epoch < 1):
        raise ConfigError(f"stream: steps_per_epoch must be a whole number from 1 on: got {steps_per_epoch!r}")
