"""What a plan mixes: which datasets, in which proportions, and which rows stand together in a batch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mmdata.plan.groups import Groups


class ShardSpan(NamedTuple):
    """A dataset: consecutive shards of the corpus.

    Attributes:
        first_shard: number of its first shard.
        last_shard: number of the shard after its last.
        repeat: passes over its rows in an epoch; 0.5 takes half of the rows, and the other half in the next epoch.
        weight: its share of every batch is weight / sum of all weights, exact to the row; None: the datasets are mixed
            in the proportions of their rows times `repeat`, exact over an epoch.
    """

    first_shard: int
    last_shard: int
    repeat: float = 1.0
    weight: int | None = None


@dataclass(frozen=True)
class Mixture:
    """What meets in a batch.

    Attributes:
        spans: the datasets. All have a weight, or none has. With weights the first one's rows make the epoch, and the
            others are repeated: each gives as many rows as the steps need, and the next epoch goes on where this one
            ended, so that over time all its rows occur equally often.
        groups: rows that stand together.

    Raises:
        ValueError: a weight or repeat is out of range, datasets overlap, or a weight meets a repeat.

    Example:
        192 rows of a corpus of 100 shards and 64 of another one of 7 in every batch of 256:
        Mixture((ShardSpan(0, 100, weight=192), ShardSpan(100, 107, weight=64)))
    """

    spans: tuple[ShardSpan, ...]
    groups: Groups | None = None

    def __post_init__(self) -> None:
        has_weights = self.spans[0].weight is not None
        for span in self.spans:
            if (span.weight is not None and span.weight < 1) or span.repeat <= 0:
                raise ValueError(f"a weight must be 1 or more and a repeat above 0: got {span}")
            if (span.weight is not None) != has_weights or (has_weights and span.repeat != 1):
                raise ValueError(f"give each dataset a weight, or each a repeat: got {self.spans}")
        for before, span in pairwise(sorted(self.spans, key=lambda span: span.first_shard)):
            if span.first_shard < before.last_shard:
                raise ValueError(f"datasets overlap: {before} and {span}; no shard may be in two of them")

    @property
    def shares(self) -> list[tuple[ShardSpan, ...]]:
        """The datasets that fill each fixed share of a batch together: one each with weights, else all of them."""
        return [self.spans] if self.spans[0].weight is None else [(span,) for span in self.spans]

    @property
    def weights(self) -> list[int]:
        """Of the shares, without common factors."""
        weights = [share[0].weight or 1 for share in self.shares]
        return [weight // math.gcd(*weights) for weight in weights]

    @property
    def unit_rows(self) -> int:
        """Rows that stand together; 1 without groups."""
        return self.groups.unit_rows if self.groups else 1

    @property
    def fingerprint(self) -> str:
        """Equal for equal mixtures; short."""
        groups = self.groups.fingerprint if self.groups else None
        return hashlib.sha256(repr(([tuple(span) for span in self.spans], groups)).encode()).hexdigest()[:16]
