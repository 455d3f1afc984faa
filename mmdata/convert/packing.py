"""How many shards a conversion makes, and which bytes it writes twice, if all units are like the average one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Packing(NamedTuple):
    """What becomes of the tars of the units.

    Attributes:
        shards: how many there are.
        copied_bytes: of shards that are put together of several tars; the others are the tars themselves.
    """

    shards: int
    copied_bytes: int


def pack(rows: int, parts: Sequence[tuple[float, float]], *, shard_rows: int, shard_bytes: int) -> Packing:
    """Pack the average units as `Part` does real ones.

    Args:
        rows: of the corpus.
        parts: for each folder, the share of the rows that are written there, and the mean bytes of their samples.
        shard_rows: rows of a unit, and most samples of a shard.
        shard_bytes: most bytes of a shard.

    Example:
        pack(30_000, [(0.4, 1e4)], shard_rows=10_000, shard_bytes=10**9) == (2, 80_000_000): of three tars of 4,000
        samples two share a shard
    """
    shards = copied = 0
    for share, mean in parts:
        open_tars, open_rows, open_bytes = 0, 0.0, 0.0
        for start in range(0, rows, shard_rows):
            for samples in _tars(min(shard_rows, rows - start) * share, mean, shard_bytes):
                size = samples * mean
                if open_tars and (open_rows + samples > shard_rows or open_bytes + size > shard_bytes):
                    shards, copied = shards + 1, copied + (round(open_bytes) if open_tars > 1 else 0)
                    open_tars, open_rows, open_bytes = 0, 0.0, 0.0
                open_tars, open_rows, open_bytes = open_tars + 1, open_rows + samples, open_bytes + size
        if open_tars:
            shards, copied = shards + 1, copied + (round(open_bytes) if open_tars > 1 else 0)
    return Packing(shards, copied)


def _tars(samples: float, mean: float, most: int) -> list[float]:
    """Samples of each tar of a unit."""
    in_a_tar = max(1.0, most // mean)
    full = int(samples // in_a_tar)
    rest = samples - full * in_a_tar
    return [in_a_tar] * full + ([rest] if rest > 0 else [])
