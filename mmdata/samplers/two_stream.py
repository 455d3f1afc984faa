"""Batches of two kinds of rows: each primary row once an epoch, the secondary rows again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from mmdata.samplers.planned import PlannedBatchSampler, digest, whole_numbers
from mmdata.seeding import Purpose


class TwoStreamBatchSampler(PlannedBatchSampler):
    """Batches of two kinds of rows, such as unlabelled and labelled, or new and old.

    A batch is its primary rows, then its secondary rows, in fixed numbers; only the last batch of an epoch may have
    fewer primary rows. Each primary row comes once an epoch. The secondary rows are repeated: an epoch goes on where
    the epoch before ended, so over a run each comes as often as any other, give or take one.

    Args:
        primary_indices: rows of the dataset, (n,).
        secondary_indices: rows of the dataset, (m,); none of the primary ones, unless `allow_overlap`.
        batch_size: rows of a batch, per rank, both kinds together.
        secondary_batch_size: secondary rows of a batch, per rank.
        allow_overlap: a row may be primary and secondary; a batch may then hold it twice.
        drop_last: leave out the last batch if it is not full.
        shuffle: primary rows come in a new order each epoch, secondary rows each pass; otherwise always as given.
        seed: of the order; the same on every rank.
        rank: 0 … world_size-1; None takes that of `sampler`, or the launcher's.
        world_size: number of processes that share each global batch; given with rank.
        sampler: a DistributedSampler, to take rank and world size from.

    Raises:
        ValueError: an argument is out of range, a list of rows is empty, the lists overlap, or rank and world size
            contradict `sampler`.

    Example:
        sampler = TwoStreamBatchSampler(unlabelled, labelled, batch_size=64, secondary_batch_size=16)
    """

    def __init__(
        self,
        primary_indices: ArrayLike,
        secondary_indices: ArrayLike,
        batch_size: int,
        secondary_batch_size: int,
        *,
        allow_overlap: bool = False,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        sampler: Sampler[Any] | None = None,
    ) -> None:
        self._primary = whole_numbers("primary_indices", primary_indices)
        self._secondary = whole_numbers("secondary_indices", secondary_indices)
        both = np.intersect1d(self._primary, self._secondary)
        if len(both) and not allow_overlap:
            raise ValueError(
                f"{len(both)} rows are in primary_indices and in secondary_indices, row {both[0]} for one: leave them "
                "out of one list, or set allow_overlap=True"
            )
        if not 0 < secondary_batch_size < batch_size:
            raise ValueError(
                f"secondary_batch_size must be 1 … batch_size-1, to leave room for primary rows: got "
                f"{secondary_batch_size} of {batch_size}"
            )
        self.secondary_batch_size = secondary_batch_size
        super().__init__(
            len(self._primary),
            batch_size - secondary_batch_size,
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            sampler=sampler,
        )
        self._identity |= {
            "primary_indices": digest(self._primary),
            "secondary_indices": digest(self._secondary),
            "global_secondary_batch_size": secondary_batch_size * self.world_size,
        }

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        primary = self._primary[self._permutation(len(self._primary), epoch, Purpose.ROW_ORDER, 0)]
        count, secondary = len(self._secondary), self._secondary
        number = -1  # of the pass over the secondary rows that `secondary` is in the order of
        for step in range(start, len(self)):
            rows = self._share(primary[step * self._global_rows : (step + 1) * self._global_rows])
            # Secondary rows are counted from epoch 0 on, rank by rank in each step, so a resume needs no other state.
            first = ((epoch * len(self) + step) * self.world_size + self.rank) * self.secondary_batch_size
            for position in range(first, first + self.secondary_batch_size):
                if position // count != number:
                    number = position // count
                    secondary = self._secondary[self._permutation(count, number, Purpose.ROW_ORDER, 1)]
                rows.append(int(secondary[position % count]))
            yield rows
