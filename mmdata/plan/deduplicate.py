"""Batches without duplicates: rows with the same caption or image are exchanged with rows of other batches.

Rows are exchanged only between batches of one bucket in one round of windows, so a step still needs none of the steps
before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

TRIES = 64
"""Rows that are tried as partners for a duplicate, before it stays where it is."""


class Hashes(NamedTuple):
    """Hashes of n rows, int64 (n,) each; rows with an equal image or an equal caption are duplicates."""

    image: Ints
    caption: Ints


HashesOf = Callable[[Ints, Ints], Hashes]
"""(rows, passes) -> their hashes; rows and passes are int64 (n,). The pass decides the caption."""


def count_duplicates(hashes: Hashes) -> int:
    """Rows of a batch with the image or the caption of an earlier row."""
    return int((_repeated(hashes.image[None])[0] | _repeated(hashes.caption[None])[0]).sum())


def exchange(parts: list[list[Ints]], batches: list[int], hashes: Hashes, draws: NDArray[np.uint64]) -> None:
    """Exchange duplicates between some batches, within each lane share.

    Args:
        parts: [lane share][batch], what each lane share adds to each batch: int64; changed.
        batches: numbers of M batches of equal sizes; two or more.
        hashes: of their rows: batch by batch, in a batch lane share by lane share.
        draws: as in `separate`.
    """
    table = np.stack([np.concatenate([part[i] for part in parts]) for i in batches])  # (M, B)
    sizes = [len(part[batches[0]]) for part in parts]
    # a share of the batch keeps its size: rows are exchanged with rows of their own lane share
    lane_share = np.broadcast_to(np.repeat(np.arange(len(parts)), sizes), table.shape)
    table = table.reshape(-1)[separate(hashes, lane_share, draws)]
    for i, batch in zip(batches, table, strict=True):
        for part, rows in zip(parts, np.split(batch, np.cumsum(sizes)[:-1]), strict=True):
            part[i] = rows


def separate(hashes: Hashes, kinds: Ints, draws: NDArray[np.uint64]) -> Ints:
    """Reorder rows so that no two duplicates are in one batch.

    Args:
        hashes: of the rows, (M·B,) each: B rows of each of M batches, batch by batch.
        kinds: int64 (M, B), the kind of each position: rows are exchanged only between positions of one kind.
        draws: random numbers that decide which exchanges are tried; at least one.

    Returns:
        int64 (M, B), positions among the M·B rows. Duplicates that fit into none of `TRIES` positions stay.
    """
    num_batches, width = kinds.shape
    order = np.arange(num_batches * width).reshape(num_batches, width)
    # dense keys: hashes of 64 bits as small integers, so that bincount can count them
    keys = [np.unique(column, return_inverse=True)[1] for column in hashes]  # (M·B,) each
    is_duplicate = np.logical_or.reduce([_repeated(key[order]) for key in keys])
    # in how many batches each key occurs
    holders = [np.bincount(np.concatenate([np.unique(key[batch]) for batch in order])) for key in keys]
    counters: dict[int, list[Counter[int]]] = {}

    def counts(batch: int) -> list[Counter[int]]:
        """How often a batch holds each key; counted when first asked for, because few batches take part."""
        if batch not in counters:
            counters[batch] = [Counter(key[order[batch]].tolist()) for key in keys]
        return counters[batch]

    def fits(row: int, batch: int, instead_of: int) -> bool:
        return all(
            count[key[row]] - (key[row] == key[instead_of]) == 0 for count, key in zip(counts(batch), keys, strict=True)
        )

    tries = iter(np.resize(draws, max(1, int(is_duplicate.sum())) * TRIES).tolist())
    for batch, column in zip(*(axis.tolist() for axis in np.nonzero(is_duplicate)), strict=True):
        row = int(order[batch, column])
        if all(count[key[row]] == 1 for count, key in zip(counts(batch), keys, strict=True)):
            continue  # an earlier exchange has taken its duplicate away
        if any(holder[key[row]] == num_batches for holder, key in zip(holders, keys, strict=True)):
            continue  # every batch holds a duplicate of it
        for _ in range(TRIES):
            draw = next(tries)
            other, other_column = draw % num_batches, draw // num_batches % width
            partner = int(order[other, other_column])
            if other == batch or kinds[batch, column] != kinds[other, other_column]:
                continue
            if fits(row, other, partner) and fits(partner, batch, row):
                order[batch, column], order[other, other_column] = partner, row
                _move(row, counts(batch), counts(other), keys, holders)
                _move(partner, counts(other), counts(batch), keys, holders)
                break
    return order


def _move(
    row: int, source: list[Counter[int]], target: list[Counter[int]], keys: list[Ints], holders: list[Ints]
) -> None:
    """Count a row's keys out of the source batch and into the target batch."""
    for before, after, key, holder in zip(source, target, keys, holders, strict=True):
        before[key[row]] -= 1
        after[key[row]] += 1
        holder[key[row]] += int(after[key[row]] == 1) - int(before[key[row]] == 0)


def _repeated(keys: Ints) -> NDArray[np.bool_]:
    """Which keys occur earlier in their own batch; bool (M, B), as `keys`."""
    order = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=1)
    repeated = np.zeros(keys.shape, np.bool_)
    np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return repeated
