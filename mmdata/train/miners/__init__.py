"""Miners: which of the batch's negatives enter the loss, and with what weight.

- A miner is any function (scores, positives, negatives) -> kept or weights: see `Miner` in `protocol`. Whatever it
  returns, the losses drop every pair that is not an admissible negative.
- `hardness`: by scores alone (top-k, semi-hard). `sampling`: at random (Gumbel, distance-weighted).
- `informed`: with more than scores (labels, groups, a teacher), and chains of miners.
- `configured`: the miner that settings name.
"""

from mmdata.train.miners.hardness import All, DropHardest, Ratio, SemiHard, TopK
from mmdata.train.miners.informed import Chain, FalseNegativeMargin, SameGroup, SameLabel, TeacherMask
from mmdata.train.miners.protocol import AnyMiner, BlockMiner, Miner, Side, for_block
from mmdata.train.miners.sampling import DistanceWeighted, GumbelTopK

__all__ = [
    "All",
    "AnyMiner",
    "BlockMiner",
    "Chain",
    "DistanceWeighted",
    "DropHardest",
    "FalseNegativeMargin",
    "GumbelTopK",
    "Miner",
    "Ratio",
    "SameGroup",
    "SameLabel",
    "SemiHard",
    "Side",
    "TeacherMask",
    "TopK",
    "for_block",
]
