"""When in a run its negatives are measured, and what would begin only after its end."""

from __future__ import annotations

from collections.abc import Iterator

from mmdata.config import TrainConfig
from mmdata.errors import counted

GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, lie evenly between 0 and 1 whatever their number (Weyl)."""
MEASURED_EVERY = 100
"""Of so many updates one is measured. It costs a pass over the similarities, far less than 1 % of 100 updates."""


def is_measured(step: int, every_steps: int = MEASURED_EVERY) -> bool:
    """Whether the negatives of update number `step`, from 1, are measured: of one in `every_steps`.

    Each time it is another one of so many. If it were always the last of 100, and an epoch had 50 steps, each
    measurement would be of an epoch's last batch, which is of one text length and often not full.

    Example:
        Of every 4 steps: 3, 5, 12, 14, 17, 23.
    """
    number, place = divmod(step - 1, every_steps)
    return place == int(every_steps * ((number + 1) * GOLDEN % 1))


def never_begins(config: TrainConfig, total_steps: int) -> Iterator[str]:
    """A line for each part of the training that would begin after the last update."""
    if config.mining_after_steps < total_steps:
        return
    masks = config.teacher is not None and config.teacher.margin is not None
    for name, is_given in {"miner": config.miner, "queue": config.queue, "teacher": masks}.items():
        if is_given:
            yield (
                f"train.mining_after_steps is {config.mining_after_steps:,}, and the run has "
                f"{counted(total_steps, 'step')}: the {name} does nothing in it; set train.mining_after_steps lower, "
                f"to 0 where the run begins with a trained model, or leave train.{name} out"
            )
