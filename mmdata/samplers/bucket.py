"""Batches of rows of about the same length, so that little is padded; the shapes are known before a row is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from mmdata.plan.choose import choose_lengths
from mmdata.plan.schedule import Leftover, check_leftover
from mmdata.samplers.planned import Ints, PlannedBatchSampler, digest, whole_numbers
from mmdata.seeding import Purpose

LENGTH_STEPS = 1024
"""Lengths are rounded up to this many steps to choose bounds, because the choice costs the square of their number."""


class BucketBatchSampler(PlannedBatchSampler):
    """Batches of rows of about the same length.

    A row belongs to the smallest bound that holds its length; each global batch has one bound, the same on every rank
    (`step_bounds`). By default rows that do not fill a batch of their bound move to the next bound, and only the last
    batch of an epoch may have fewer rows. With another `leftover` no batch mixes rows of two bounds, so `lengths` may
    be any numbers by which rows are to be kept apart.

    Args:
        lengths: of each row of the dataset, (rows,), whole numbers: tokens, characters, audio samples, …
        batch_size: rows of a batch, per rank.
        bounds: rising lengths, the last no less than the longest row; or the largest number of bounds to choose so that
            least is padded.
        leftover: what becomes of rows that fill no batch of their bound. merge: they move to the next bound. pad: the
            batch is filled up with rows of the same bound, which come a second time (`repeated`). drop: they are left
            out of the epoch (`dropped`).
        drop_last: leave out the last batch if it is not full; of `leftover` merge.
        shuffle: rows and batches come in a new order each epoch; otherwise always as given, short ones first.
        seed: of the order; the same on every rank.
        rank: 0 … world_size-1; None takes that of `sampler`, or the launcher's.
        world_size: number of processes that share each global batch; given with rank.
        sampler: a DistributedSampler, to take rank and world size from.

    Raises:
        ValueError: an argument is out of range, a row is longer than the last bound, or rank and world size contradict
            `sampler`.

    Example:
        sampler = BucketBatchSampler([len(ids) for ids in texts], batch_size=64)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)

        By language, in batches of one language each:
        BucketBatchSampler(languages, batch_size=64, bounds=range(num_languages), leftover="pad")
    """

    def __init__(
        self,
        lengths: ArrayLike,
        batch_size: int,
        *,
        bounds: int | Sequence[int] = 8,
        leftover: Leftover = "merge",
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        sampler: Sampler[Any] | None = None,
    ) -> None:
        self._lengths = whole_numbers("lengths", lengths)
        if self._lengths.min() < 0:
            row = int(self._lengths.argmin())
            raise ValueError(f"lengths must be 0 or more: row {row} has {self._lengths[row]}")
        covered = getattr(sampler, "dataset", getattr(sampler, "data_source", None))
        if covered is not None and len(covered) != len(self._lengths):
            raise ValueError(
                f"lengths has {len(self._lengths)} entries and the dataset {len(covered)} rows; give one length a row"
            )
        chosen = _choose_bounds(self._lengths, bounds) if isinstance(bounds, int) else list(bounds)
        if not chosen or chosen != sorted(set(chosen)):
            raise ValueError(f"bounds must rise, or be how many to choose: got {bounds}")
        self.bounds = tuple(int(bound) for bound in chosen)
        if (longest := int(self._lengths.max())) > self.bounds[-1]:
            row, count = int(self._lengths.argmax()), int((self._lengths > self.bounds[-1]).sum())
            raise ValueError(
                f"{count} of {len(self._lengths)} rows are longer than the last of bounds ({self.bounds[-1]}); row "
                f"{row} has {longest}: add a bound of {longest}, or truncate these rows and give "
                f"np.minimum(lengths, {self.bounds[-1]})"
            )
        self.leftover: Leftover = check_leftover(leftover)
        if leftover != "merge" and drop_last:
            raise ValueError(
                f"drop_last is about leftover 'merge', and leftover is '{leftover}': leave one of them out"
            )
        super().__init__(
            len(self._lengths),
            batch_size,
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            sampler=sampler,
        )
        bounds_digest = digest(np.asarray(self.bounds, np.int64))
        self._identity |= {"lengths": digest(self._lengths), "bounds": bounds_digest, "leftover": leftover}

    def __len__(self) -> int:
        """Batches of an epoch, exact, the same on every rank."""
        if self.leftover == "merge":
            return super().__len__()
        counts = np.bincount(self._buckets(np.arange(len(self._lengths))))
        full = counts // self._global_rows
        return int(full.sum() if self.leftover == "drop" else (full + (counts % self._global_rows > 0)).sum())

    @property
    def repeated(self) -> int:
        """Rows that come a second time in an epoch, over all ranks."""
        return super().repeated if self.leftover == "merge" else max(0, self._places_without_rows)

    @property
    def dropped(self) -> int:
        """Rows that are left out of an epoch, over all ranks."""
        return super().dropped if self.leftover == "merge" else max(0, -self._places_without_rows)

    @property
    def _places_without_rows(self) -> int:
        return len(self) * self._global_rows - len(self._lengths)

    def step_bounds(self, epoch: int) -> list[int]:
        """The bound of each step of an epoch: the length to pad to, if every rank must have the same shape."""
        return [self.bounds[bucket] for bucket, _ in self._global_batches(epoch)]

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        for _, rows in self._global_batches(epoch)[start:]:
            yield self._share(rows)

    def _global_batches(self, epoch: int) -> list[tuple[int, Ints]]:
        """(bucket, rows) of each step; a batch that is not full is the last."""
        rows = self._permutation(len(self._lengths), epoch, Purpose.ROW_ORDER, 0)
        bucket_of = self._buckets(rows)
        batches: list[tuple[int, Ints]] = []
        rest = rows[:0]
        for bucket in range(len(self.bounds)):
            queue = np.concatenate([rest, rows[bucket_of == bucket]])
            if self.leftover == "pad":
                queue = np.resize(queue, -(-len(queue) // self._global_rows) * self._global_rows)
            full = len(queue) // self._global_rows * self._global_rows
            batches += [(bucket, batch) for batch in queue[:full].reshape(-1, self._global_rows)]
            rest = queue[full:] if self.leftover == "merge" else queue[:0]
        batches = [batches[i] for i in self._permutation(len(batches), epoch, Purpose.BATCH_ORDER, 0)]
        if len(rest) and not self.drop_last:
            batches.append((int(self._buckets(rest).max()), rest))
        return batches

    def _buckets(self, rows: Ints) -> Ints:
        """The smallest bound that holds each row: positions in `bounds`, (n,)."""
        return np.searchsorted(self.bounds, self._lengths[rows])


def _choose_bounds(lengths: Ints, count: int) -> list[int]:
    """At most `count` bounds that leave the least padding, for lengths rounded up to LENGTH_STEPS steps."""
    if count < 1:
        return []
    longest = int(lengths.max())
    width = max(1, -(-longest // LENGTH_STEPS))
    return [min(step * width, longest) for step in choose_lengths(np.bincount(-(-lengths // width)), count)]
