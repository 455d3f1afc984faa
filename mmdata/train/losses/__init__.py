"""Contrastive losses over the global batch.

- `functional`: the losses, functions of features: clip, multi-positive, siglip, triplet, distillation.
- `pairs`: which pairs of rows and columns are negatives, and negatives from outside the batch.
- `global_batch`: one rank's view of all ranks' rows.
- `tiles`: similarities without a miner, tile by tile; `rows`: with a miner, which needs whole rows.
- `telemetry`: how hard the negatives are that a miner chose.
- A masked row is neither positive nor negative; no matrix of all similarities is ever stored.
"""

from mmdata.train.losses.functional import (
    clip_loss,
    distill_loss,
    multi_positive_loss,
    siglip_loss,
    triplet_loss,
)
from mmdata.train.losses.pairs import ExtraNegatives

__all__ = [
    "ExtraNegatives",
    "clip_loss",
    "distill_loss",
    "multi_positive_loss",
    "siglip_loss",
    "triplet_loss",
]
