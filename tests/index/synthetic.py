"""Manifests of corpora that are not there: any number of shards in seconds, and rows that agree with them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmdata.index.columns import aspect_bin, count_cells, pack_cells
from mmdata.index.encode import encode
from mmdata.index.manifest import Manifest, ShardEntry
from mmdata.index.writer import ManifestWriter

NOTHING = encode([])
"""Columns of no row."""
TEMPLATES = 64
SIZES = np.array([(480, 640), (640, 480), (512, 512), (480, 720), (720, 480), (360, 640)])
"""Heights and widths of the images, in pixels: the usual ratios."""


@dataclass(frozen=True)
class SyntheticRows:
    """Rows of all shards; each shard holds those of one of a few templates.

    Attributes:
        template: int64 (num_shards,), which template each shard holds.
        tokens: int64 (TEMPLATES, rows_per_shard), lognormal (median 14, sigma 0.6) from 3 to 77; one caption a row.
        height, width: as tokens, in pixels.
    """

    template: NDArray[np.int64]
    tokens: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]


def synthetic_rows(num_shards: int, rows_per_shard: int, seed: int) -> SyntheticRows:
    """The rows that `write_synthetic_manifest` counts, given the same arguments."""
    generator = np.random.default_rng(seed)
    shape = (TEMPLATES, rows_per_shard)
    tokens = np.clip(np.round(14 * np.exp(0.6 * generator.standard_normal(shape))), 3, 77).astype(np.int64)
    height, width = np.moveaxis(SIZES[generator.choice(len(SIZES), shape, p=[0.4, 0.15, 0.15, 0.15, 0.05, 0.1])], -1, 0)
    return SyntheticRows(generator.integers(TEMPLATES, size=num_shards), tokens, height, width)


def write_synthetic_manifest(
    folder: str | os.PathLike[str], num_shards: int, rows_per_shard: int, seed: int
) -> Manifest:
    """A manifest, tokenizer "synthetic"; its tars do not exist, and the columns of its shards have no row.

    Args:
        folder: where to; made when missing.
        num_shards: how many shards.
        rows_per_shard: rows of each.
        seed: decides the rows.
    """
    rows = synthetic_rows(num_shards, rows_per_shard, seed)
    cells = pack_cells(rows.tokens, aspect_bin(rows.height, rows.width))
    counted = [count_cells(cells[template]) for template in range(TEMPLATES)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    writer = ManifestWriter(folder)
    for shard, template in enumerate(rows.template.tolist()):
        entry = ShardEntry.of(
            NOTHING,
            f"{shard:06d}.tar",
            size=rows_per_shard * 50_000,
            sha256=hashlib.sha256(b"tar %d %d" % (seed, shard)).hexdigest(),
        )
        numbers = dict.fromkeys(("rows", "images", "captions"), rows_per_shard)
        cells, counts = counted[template]
        writer.add(replace(entry, **numbers, cells=cells, counts=counts), NOTHING.data)
    return writer.close(tokenizer="synthetic")
