"""Which rows an epoch has, in which order and in which batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmdata.config.settings import NOT_BOOLEAN, Integer, Location, Positive, Settings


class GroupsConfig(Settings):
    """Rows that are placed together in a batch: `size` rows of one group, or a row and `candidates` others of its
    group."""

    source: Location = "label"
    """What makes rows a group. label: rows with the same label. Or a .npy file, of `mmdata neighbours` or your own:
    int64 (rows,) with the group of each row of the index, -1 for rows without a group. run: near neighbours among the
    features that the run itself computes, from `every_epochs` on; only in `mmdata train`, and needs
    `train.feature_cache`, `train.steps` and `size`."""
    size: Annotated[int, Field(strict=True, ge=2)] | None = None
    """Rows of one group that are placed together in a batch; each row comes once an epoch. Give this or
    `candidates`."""
    candidates: Positive | None = None
    """Rows of its group that follow each row in its batch, drawn anew in each epoch; each row comes once an epoch by
    itself. Give this or `size`."""
    share: Annotated[float, Field(gt=0.0, le=1.0), NOT_BOOLEAN] = 1.0
    """Share of the rows of each batch that are in groups of `size`; the others are single rows, as without groups.
    Which groups share a batch is drawn anew in each epoch. 0.5: half groups, half single rows; 1: as many as there
    are."""

    every_epochs: Positive = 1
    """For the source run: number of epochs between two searches for neighbours. Before the first one no row has a
    group."""

    @model_validator(mode="after")
    def _one_kind(self) -> GroupsConfig:
        if self.source == "run" and self.size is None:
            raise ValueError("source 'run' needs a size: how many near neighbours stand together")
        if self.source != "run" and self.every_epochs != 1:
            raise ValueError(f"every_epochs belongs to source 'run', and source is '{self.source}': leave it out")
        if self.candidates is not None and self.share < 1:
            raise ValueError("share needs groups of a size: candidates follow every row")
        if (self.size is None) == (self.candidates is None):
            raise ValueError(
                "give either size (rows of a group together) or candidates (a row and others of its group)"
            )
        return self


class BatchesConfig(Settings):
    """Which rows an epoch has, in which order and in which batches."""

    global_batch_size: Positive
    """Image-caption pairs (rows) of one step over all ranks; each rank gets an equal part. With `token_budget`, the
    largest number of rows."""
    token_budget: Positive | None = None
    """Text tokens and image patches of one step over all ranks, padding included: batches of short texts then have more
    rows than batches of long texts, a multiple of 8, or of a 32nd of `global_batch_size` where that is more. The number
    of ranks must divide it: for 3, 6 or 12 ranks make `global_batch_size` a multiple of 96. null: all batches have
    `global_batch_size` rows."""
    leftover: Literal["merge", "pad", "drop"] = "merge"
    """What happens to rows that fill no batch of their shape at the end of an epoch. merge: they go to a larger shape,
    and the last batches are filled up with masked rows. pad: the last batch of each shape is filled up. drop: they are
    left out of the epoch."""
    shuffle: bool = True
    """Whether rows come in a new random order in each epoch; false: in the order of the index within each batch
    shape."""
    order: Location | None = None
    """Exactly the rows that an epoch has, in this order: a .npy file of int64 row numbers of the index, in which a row
    may come several times. For a curriculum, or to replay rows. It needs `shuffle: false`; null: every row once."""
    seed: Integer = 0
    """Seed of everything random in the data: order, crops, augmentation. Equal seeds give equal batches on any number
    of ranks and workers."""
    shuffle_window_rows: Positive = 2**20
    """Rows that are shuffled together, rounded up to whole shards. Smaller windows need less memory and a smaller cache
    for shards behind URLs, and mix less."""
    groups: GroupsConfig | None = None
    """Puts rows of one label, or near neighbours, into the same batch, as hard negatives for each other; null: no
    groups."""
    num_lanes: Positive = 1
    """Parts of each batch that have shards of their own. With as many lanes as nodes, each node reads only its part of
    the shards; 1 mixes all shards."""
    row_weights: Location | None = None
    """How often a row comes in an epoch, on average: a column of numbers of the index or of a joined table, a file
    (.npy) of a number for each row of the index, or label_balanced: each class as often as any other, and the rows once
    on average. 2.3 is two or three times, 0.1 once in ten epochs; weights above 10 count as 10. null: every row
    once."""

    @property
    def row_multiple(self) -> int:
        """With `token_budget`, the number of rows of each batch is a multiple of this.

        Lanes and whole groups divide it, and ranks are to: it has a power of two that grows with the batch, as ranks
        do, and the odd factors of the batch, as far as they leave sizes to choose from.

        Example:
            768 = 2⁸ · 3 rows: 16 · 3 = 48, which 2, 3, 6, 12, 16 and 24 ranks divide. 1,000 = 2³ · 5³ rows: 16 · 5.
        """
        rows, groups = self.global_batch_size, self.groups
        unit = 1 if groups is None else (groups.size or 1) + (groups.candidates or 0)
        most = max(min(8, rows), rows // 32)
        needed, power = self.num_lanes * unit, 1 << (most.bit_length() - 1)
        while power > 1 and math.lcm(needed, power) > rows:
            power //= 2
        multiple, odd = math.lcm(needed, power), 1
        for factor in _odd_factors(rows):
            odd *= factor
            longer = math.lcm(multiple, odd)
            if longer > max(multiple, rows // 4):
                break
            multiple = longer
        return multiple

    @model_validator(mode="after")
    def _check_token_budget(self) -> BatchesConfig:
        if self.token_budget is None:
            return self
        if self.row_multiple > self.global_batch_size:
            groups = "" if self.groups is None else " and groups"
            raise ValueError(
                f"with token_budget, the rows of each batch are a multiple of {self.row_multiple} for num_lanes "
                f"{self.num_lanes}{groups}: set global_batch_size to {self.row_multiple} or more, got "
                f"{self.global_batch_size}"
            )
        return self


def _odd_factors(number: int) -> Iterator[int]:
    """The odd prime factors of a number, rising, each as often as it divides it."""
    number //= number & -number
    factor = 3
    while factor * factor <= number:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 2
    if number > 1:
        yield number
