"""Whether the weights that a miner gave are weights: finite numbers from 0 on. The device is not waited for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmdata.train.host_copy import HostCopy
from mmdata.train.miners import AnyMiner
from mmdata.train.miners.protocol import are_flawed


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


@dataclass(frozen=True)
class _Unread:
    miner: str
    count: HostCopy


_unread: list[_Unread] = []
"""Counts on their way from a GPU; looked at when the next loss is computed."""


def raise_if_flawed(miner: AnyMiner, count: Tensor) -> None:
    """Raise where a miner gave weights that are none; on a GPU, when this is called for the next loss.

    Args:
        miner: that gave them.
        count: scalar, how many over all ranks.

    Raises:
        ValueError: names the miner, which gave some now or, on a GPU, for the loss before.
    """
    now = _Unread(repr(miner), HostCopy(count))
    earlier, _unread[:] = [*_unread], []
    if count.device.type == "cuda":
        _unread.append(now)
    else:
        earlier.append(now)
    for each in earlier:
        if number := int(each.count.read()[0]):
            raise ValueError(
                f"miner {each.miner} gave {number} negatives a weight that is NaN, infinite or below 0: a weight is a "
                "finite number from 0 on, and 0 drops a negative; the loss of that batch is NaN"
            )
