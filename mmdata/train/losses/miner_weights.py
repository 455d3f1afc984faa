"""Whether the weights that a miner gave are weights: finite numbers from 0 on. The device is not waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmdata.train.miners import AnyMiner, Chain
from mmdata.train.miners.protocol import are_flawed
from mmdata.train.prefetch import HostCopy


@dataclass(frozen=True)
class MinerFlaws:
    """How many weights of one miner are NaN, infinite or negative.

    Attributes:
        miner: that gave them.
        count: scalar; added up in place, block by block.
    """

    miner: AnyMiner
    count: Tensor

    def look_at(self, weights: Tensor, scores: Tensor, negatives: Tensor) -> None:
        """Count the flaws among the weights of admissible negatives.

        Args:
            weights: (b, N), as the miner returned them.
            scores: (b, N); where some are not finite the features are at fault and not the miner.
            negatives: bool (b, N); other entries are ignored.
        """
        self.count.add_((negatives & are_flawed(weights)).sum() * scores.detach().isfinite().all())


_unread: list[tuple[list[str], HostCopy]] = []
"""Names of the miners of the newest loss on a GPU, and their counts on the way from there; read in the next loss."""


def raise_if_flawed(miners: Sequence[AnyMiner], counts: Tensor) -> None:
    """Raise where a miner gave weights that are none; on a GPU, when this is called for the next loss.

    Call it once a loss, with all of its miners: a second call would wait for the counts of the first.

    Args:
        miners: that gave them; one for each direction of the loss.
        counts: (number of miners,), how many over all ranks.

    Raises:
        ValueError: names the miner, which gave some now or, on a GPU, for the loss before.
    """
    to_read = [*_unread, ([_name(miner) for miner in miners], HostCopy(counts))]
    _unread[:] = [to_read.pop()] if counts.device.type == "cuda" else []
    for names, copy in to_read:
        for name, number in zip(names, copy.read()[0].tolist(), strict=True):
            if number > 0:
                raise ValueError(
                    f"miner {name} gave {int(number)} negatives a weight that is NaN, infinite or below 0: a weight is "
                    "a finite number from 0 on, and 0 drops a negative; the loss of that batch is NaN"
                )


def _name(miner: AnyMiner) -> str:
    """Not its repr: that prints a teacher's features, for which the device would be waited for at each loss."""
    if isinstance(miner, Chain):
        return f"Chain({', '.join(_name(part) for part in miner.miners)})"
    return str(getattr(miner, "__qualname__", type(miner).__qualname__))
