"""Miners: which of the batch's negatives enter the loss, and with what weight.

- A miner is any function (scores, positives, negatives) -> kept or weights: see `Miner` in `protocol`. Whatever it
  returns, the losses drop every pair that is not an admissible negative.
- `known`: the miners of the library. examples/own_miners.py has two more.
- `configured`: the miner that settings name.
"""

from mmdata.train.miners.known import (
    All,
    Chain,
    DropHardest,
    FalseNegativeMargin,
    GumbelTopK,
    SameGroup,
    SemiHard,
    TeacherMask,
    TopK,
)
from mmdata.train.miners.protocol import AnyMiner, BlockMiner, Miner, Side, for_block

__all__ = [
    "All",
    "AnyMiner",
    "BlockMiner",
    "Chain",
    "DropHardest",
    "FalseNegativeMargin",
    "GumbelTopK",
    "Miner",
    "SameGroup",
    "SemiHard",
    "Side",
    "TeacherMask",
    "TopK",
    "for_block",
]
