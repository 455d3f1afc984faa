"""Batches of two kinds of rows: each primary row once an epoch, the secondary ones in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from mmdata.samplers.planned import Ints, PlannedBatchSampler, digest, whole_numbers
from mmdata.seeding import Purpose, permutation


class TwoStreamBatchSampler(PlannedBatchSampler):
    """Batches of two kinds of rows: primary ones once an epoch, secondary ones cycled (labelled and not, new and old).

    A batch is its primary rows, then its secondary ones. The numbers of each are fixed; only the last batch of an epoch
    may have fewer primary rows. The secondary rows go on where the epoch before left off: over a training each comes as
    often as any other, give or take one.

    Args:
        primary_indices: rows of the dataset, (n,).
        secondary_indices: rows of the dataset, (m,); may overlap with the primary ones.
        batch_size: rows of a batch, per rank, both kinds together.
        secondary_batch_size: of those, the secondary ones.
        drop_last: leave out the last batch where it is not full.
        shuffle: primary rows come in a new order each epoch, secondary ones each cycle; else always as given.
        seed: of the order; the same on every rank.
        rank: 0 … world_size-1; None: that of `sampler`, or else the launcher's.
        world_size: processes that share each global batch; given with rank.
        sampler: a DistributedSampler, to take rank and world size from.

    Raises:
        ValueError: an argument is out of range, a stream is empty, or rank and world size contradict `sampler`.

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
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        sampler: Sampler[Any] | None = None,
    ) -> None:
        self._primary = whole_numbers("primary_indices", primary_indices)
        self._secondary = whole_numbers("secondary_indices", secondary_indices)
        if not 0 < secondary_batch_size < batch_size:
            raise ValueError(
                f"secondary_batch_size must be 1 … batch_size-1, to leave room for primary rows: got "
                f"{secondary_batch_size} of {batch_size}"
            )
        self.secondary_batch_size = secondary_batch_size
        self.shuffle, self.seed = shuffle, seed
        super().__init__(
            len(self._primary),
            batch_size - secondary_batch_size,
            batch_size=batch_size,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            sampler=sampler,
        )

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        primary = self._primary[self._order(len(self._primary), epoch, stream=0)]
        cycle, order = -1, self._secondary
        for step in range(start, len(self)):
            rows = self._share(primary[step * self._global_rows : (step + 1) * self._global_rows])
            first = ((epoch * len(self) + step) * self.world_size + self.rank) * self.secondary_batch_size
            for position in range(first, first + self.secondary_batch_size):
                if position // len(self._secondary) != cycle:
                    cycle = position // len(self._secondary)
                    order = self._secondary[self._order(len(self._secondary), cycle, stream=1)]
                rows.append(int(order[position % len(self._secondary)]))
            yield rows

    def _order(self, count: int, cycle: int, *, stream: int) -> Ints:
        if not self.shuffle:
            return np.arange(count)
        return permutation(count, seed=self.seed, epoch=cycle, purpose=Purpose.ROW_ORDER, position=stream)

    def _identity(self) -> dict[str, str | int | bool]:
        return {
            "primary_indices": digest(self._primary),
            "secondary_indices": digest(self._secondary),
            "global_batch_size": self.batch_size * self.world_size,
            "global_secondary_batch_size": self.secondary_batch_size * self.world_size,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }
