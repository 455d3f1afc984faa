"""The error for a miner whose weights are not finite or below 0, raised without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmdata.train.miners import AnyMiner, name_of_miner
from mmdata.train.prefetch import HostCopy

_unread: list[tuple[list[str], HostCopy]] = []
"""Miners of the newest loss on a GPU, and their counts on the way to the host; read in the next loss."""


def raise_if_flawed(miners: Sequence[AnyMiner], counts: Tensor) -> None:
    """Raise if a miner gave invalid weights; on a GPU, in the call for the next loss.

    Call it once a loss, with all of its miners: a second call would wait for the counts of the first.

    Args:
        miners: one for each direction of the loss.
        counts: (number of miners,), invalid weights over all ranks.

    Raises:
        ValueError: names the miner that gave some now or, on a GPU, for the previous loss.
    """
    to_read = [*_unread, ([name_of_miner(miner) for miner in miners], HostCopy(counts))]
    _unread[:] = [] if counts.device.type == "cpu" else [to_read.pop()]
    for names, copy in to_read:
        for name, number in zip(names, copy.read()[0].tolist(), strict=True):
            if number > 0:
                raise ValueError(
                    f"miner {name} gave {int(number)} negatives a weight that is NaN, infinite or below 0: a weight is "
                    "a finite number from 0 on, and 0 drops a negative; the loss of that batch is NaN"
                )
