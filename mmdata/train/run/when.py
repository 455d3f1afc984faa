"""When in a run its negatives are measured, and what would begin only after its end."""

from __future__ import annotations

from collections.abc import Iterator

from mmdata.config import TrainConfig
from mmdata.errors import counted

GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, lie evenly between 0 and 1 whatever their number (Weyl)."""


def is_measured(step: int, every_steps: int) -> bool:
    """Whether the negatives of update number `step`, from 1, are measured: of one in `every_steps`; 0 for none.

    Each time it is another one of so many. If it were always the last of 100, and an epoch had 50 steps, each
    measurement would be of an epoch's last batch, which is of one text length and often not full.

    Example:
        Of every 4 steps: 3, 5, 12, 14, 17, 23.
    """
    if every_steps == 0:
        return False
    number, place = divmod(step - 1, every_steps)
    return place == int(every_steps * ((number + 1) * GOLDEN % 1))


def never_begins(config: TrainConfig, total_steps: int) -> Iterator[str]:
    """A line for each part of the training that would begin after the last update."""
    masks = config.teacher is not None and config.teacher.margin is not None
    parts = {"miner": config.miner, "queue": config.queue, "teacher": config.teacher if masks else None}
    for name, part in parts.items():
        if part is not None and part.after_steps >= total_steps:
            yield (
                f"train.{name}.after_steps is {part.after_steps:,}, and the run has {counted(total_steps, 'step')}: "
                f"the {name} does nothing in it; set train.{name}.after_steps lower, to 0 where the run begins with a "
                f"trained model, or leave train.{name} out"
            )
