"""What a plan mixes: which datasets, in which proportions, and which rows must or must not meet in a batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mmdata.plan.deduplicate import HashesOf
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
    """What fills a fixed part of every batch.

    Attributes:
        sources: mixed with each other in the proportions of their rows times `repeat`, exact over an epoch.
        weight: the stream's part of a batch is weight / sum of all weights, exact to the row.
    """

    sources: tuple[ShardSpan, ...]
    weight: int = 1


@dataclass(frozen=True)
class Mixture:
    """What meets in a batch.

    Attributes:
        streams: the first one's rows make the epoch. The others are cycled: each gives as many rows as the steps need,
            and the next epoch goes on where this one ended, so that over time all its rows are used equally often.
        groups: rows that stand together.
        unique: gives the hashes of rows; those with the same caption or image are then kept in different batches,
            wherever other batches of the same bucket in the same round of windows have room (`PlanSummary.duplicates`
            counts those left).

    Raises:
        ValueError: a weight or repeat is out of range, datasets overlap, or a cycled stream is not one dataset alone.

    Example:
        192 rows of a corpus of 100 shards and 64 of another one of 7 in every batch of 256:
        Mixture((Stream((Source(0, 100),), 192), Stream((Source(100, 107),), 64)))
    """

    streams: tuple[BatchShare, ...]
    groups: Groups | None = None
    unique: HashesOf | None = None

    def __post_init__(self) -> None:
        for stream in self.streams:
            if stream.weight < 1 or any(source.repeat <= 0 for source in stream.sources):
                raise ValueError(f"a weight must be 1 or more and a repeat above 0: got {stream}")
        for stream in self.streams[1:]:
            if len(stream.sources) != 1 or stream.sources[0].repeat != 1:
                raise ValueError(
                    f"a stream after the first is cycled, as one dataset with repeat 1: got {stream}; "
                    "give each dataset a stream of its own"
                )
        for before, source in pairwise(sorted(self.sources)):
            if source.first_shard < before.last_shard:
                raise ValueError(f"datasets overlap: {before} and {source}; no shard may be in two of them")

    @property
    def sources(self) -> list[ShardSpan]:
        """The datasets of all streams."""
        return [source for stream in self.streams for source in stream.sources]

    @property
    def total_weight(self) -> int:
        """Of all streams."""
        return sum(stream.weight for stream in self.streams)

    @property
    def unit_rows(self) -> int:
        """Rows that stand together; 1 without groups."""
        return self.groups.unit_rows if self.groups else 1

    @property
    def fingerprint(self) -> str:
        """Equal for equal mixtures; short."""
        groups = self.groups.fingerprint if self.groups else None
        described = repr(
            ([(tuple(map(tuple, s.sources)), s.weight) for s in self.streams], groups, self.unique is not None)
        )
        return hashlib.sha256(described.encode()).hexdigest()[:16]
