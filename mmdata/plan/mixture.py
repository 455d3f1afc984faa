"""What a plan mixes: which datasets, in which proportions, and which rows must or must not meet in a batch."""

from __future__ import annotations

import hashlib
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
    """

    first_shard: int
    last_shard: int
    repeat: float = 1.0


class BatchShare(NamedTuple):
    """Datasets that fill a fixed share of every batch.

    Attributes:
        spans: mixed with each other in the proportions of their rows times `repeat`, exact over an epoch.
        weight: the share is weight / sum of all weights, exact to the row.
    """

    spans: tuple[ShardSpan, ...]
    weight: int = 1


@dataclass(frozen=True)
class Mixture:
    """What meets in a batch.

    Attributes:
        shares: the first one's rows make the epoch. The others are repeated: each gives as many rows as the steps need,
            and the next epoch goes on where this one ended, so that over time all its rows occur equally often.
        groups: rows that stand together.

    Raises:
        ValueError: a weight or repeat is out of range, datasets overlap, or a repeated share has several datasets.

    Example:
        192 rows of a corpus of 100 shards and 64 of another one of 7 in every batch of 256:
        Mixture((BatchShare((ShardSpan(0, 100),), 192), BatchShare((ShardSpan(100, 107),), 64)))
    """

    shares: tuple[BatchShare, ...]
    groups: Groups | None = None

    def __post_init__(self) -> None:
        for share in self.shares:
            if share.weight < 1 or any(span.repeat <= 0 for span in share.spans):
                raise ValueError(f"a weight must be 1 or more and a repeat above 0: got {share}")
        for share in self.shares[1:]:
            if len(share.spans) != 1 or share.spans[0].repeat != 1:
                raise ValueError(
                    f"a share after the first is repeated as needed, so it must be one dataset with repeat 1: got "
                    f"{share}; give each dataset a share of its own"
                )
        for before, span in pairwise(sorted(self.spans)):
            if span.first_shard < before.last_shard:
                raise ValueError(f"datasets overlap: {before} and {span}; no shard may be in two of them")

    @property
    def spans(self) -> list[ShardSpan]:
        """The datasets of all shares."""
        return [span for share in self.shares for span in share.spans]

    @property
    def total_weight(self) -> int:
        """Sum of the weights of all shares."""
        return sum(share.weight for share in self.shares)

    @property
    def unit_rows(self) -> int:
        """Rows that stand together; 1 without groups."""
        return self.groups.unit_rows if self.groups else 1

    @property
    def fingerprint(self) -> str:
        """Equal for equal mixtures; short."""
        groups = self.groups.fingerprint if self.groups else None
        shares = [(tuple(map(tuple, share.spans)), share.weight) for share in self.shares]
        return hashlib.sha256(repr((shares, groups)).encode()).hexdigest()[:16]
