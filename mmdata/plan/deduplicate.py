"""Batches without duplicates: rows with the same caption or image change places with rows of other batches.

Rows change places only between batches of one bucket in one round of windows, so that any step can still be made
without those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

TRIES = 64
"""Places that are tried for a duplicate."""


class Hashes(NamedTuple):
    """What makes rows duplicates: int64 (n,) each."""

    image: Ints
    caption: Ints


HashesOf = Callable[[Ints, Ints], Hashes]
"""(rows, passes) -> what tells duplicates among them; int64 (n,) each."""


def count_duplicates(hashes: Hashes) -> int:
    """Rows of a batch that have their image or caption in common with a row before them."""
    return int((_repeated(hashes.image[None])[0] | _repeated(hashes.caption[None])[0]).sum())


def exchange(parts: list[list[Ints]], batches: list[int], hashes: Hashes, draws: NDArray[np.uint64]) -> None:
    """Exchange duplicates between some batches, within each feed.

    Args:
        parts: [feed][batch], what each feed adds to each batch: int64; changed.
        batches: which of them, all of the same sizes; two or more.
        hashes: of their rows, batch after batch, in each feed after feed.
        draws: as in `separate`.
    """
    table = np.stack([np.concatenate([part[i] for part in parts]) for i in batches])  # (M, B)
    sizes = [len(part[batches[0]]) for part in parts]
    feed = np.broadcast_to(np.repeat(np.arange(len(parts)), sizes), table.shape)
    table = table.reshape(-1)[separate(hashes, feed, draws)]
    for i, row in zip(batches, table, strict=True):
        for part, piece in zip(parts, np.split(row, np.cumsum(sizes)[:-1]), strict=True):
            part[i] = piece


def separate(hashes: Hashes, places: Ints, draws: NDArray[np.uint64]) -> Ints:
    """Which row stands where, so that no two duplicates are in one batch.

    Args:
        hashes: of the rows, (M·B,) each: B rows of each of M batches, one batch after the other.
        places: int64 (M, B): rows change places only with rows whose place has the same number here.
        draws: random numbers that the order of the tries is made from, at least one.

    Returns:
        int64 (M, B), positions among the M·B rows. Duplicates for which no place is found in `TRIES` stay.
    """
    batches, width = places.shape
    order = np.arange(batches * width).reshape(batches, width)
    keys = [np.unique(column, return_inverse=True)[1] for column in hashes]  # (M·B,), dense
    met = np.logical_or.reduce([_repeated(key[order]) for key in keys])
    held: dict[int, list[Counter[int]]] = {}
    # how many batches hold each key
    held_by = [np.bincount(np.concatenate([np.unique(key[batch]) for batch in order])) for key in keys]

    def inside(batch: int) -> list[Counter[int]]:
        if batch not in held:
            held[batch] = [Counter(key[order[batch]].tolist()) for key in keys]
        return held[batch]

    def fits(row: int, batch: int, instead_of: int) -> bool:
        return all(
            found[key[row]] - (key[row] == key[instead_of]) == 0 for found, key in zip(inside(batch), keys, strict=True)
        )

    tries = iter(np.resize(draws, max(1, int(met.sum())) * TRIES).tolist())
    for batch, place in zip(*(axis.tolist() for axis in np.nonzero(met)), strict=True):
        row = int(order[batch, place])
        if all(found[key[row]] == 1 for found, key in zip(inside(batch), keys, strict=True)):
            continue  # its like has gone to another batch already
        if any(holders[key[row]] == batches for holders, key in zip(held_by, keys, strict=True)):
            continue  # every batch holds its like
        for _ in range(TRIES):
            draw = next(tries)
            other, there = draw % batches, draw // batches % width
            instead = int(order[other, there])
            if other == batch or places[batch, place] != places[other, there]:
                continue
            if fits(row, other, instead) and fits(instead, batch, row):
                order[batch, place], order[other, there] = instead, row
                _move(row, inside(batch), inside(other), keys, held_by)
                _move(instead, inside(other), inside(batch), keys, held_by)
                break
    return order


def _move(
    row: int, source: list[Counter[int]], target: list[Counter[int]], keys: list[Ints], held_by: list[Ints]
) -> None:
    """Count a row's keys out of one batch and into another."""
    for there, here, key, holders in zip(source, target, keys, held_by, strict=True):
        there[key[row]] -= 1
        here[key[row]] += 1
        holders[key[row]] += int(here[key[row]] == 1) - int(there[key[row]] == 0)


def _repeated(keys: Ints) -> NDArray[np.bool_]:
    """Where a key stands that stood in the same row before; bool, (M, B) as `keys`."""
    order = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=1)
    repeated = np.zeros(keys.shape, np.bool_)
    np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return repeated
