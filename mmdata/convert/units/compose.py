"""Makes shards of the tars of units. A tar whose samples are all written becomes a shard as it is; others are copied.

Consecutive tars that are not full share a shard while they fit. Samples are copied byte for byte, in their order.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.files import end_file, naming
from mmdata.index.columns import ShardColumns
from mmdata.index.encode import CountTokens, encode, rearranged
from mmdata.index.manifest import ShardEntry
from mmdata.storage.folder import INNER
from mmdata.tars.tar import BLOCK, END
from mmdata.tars.write import TarWriter

COPIED_BYTES = 2**23
"""Bytes that are copied at once."""


@dataclass(frozen=True)
class Fragment:
    """A tar of a unit, with its index beside it.

    Attributes:
        tar: its path.
        sha256, size: of the tar.
        samples: how many it has.
        rows: int64 (n,), its samples that are written, ascending.
    """

    tar: Path
    sha256: str
    size: int
    samples: int
    rows: NDArray[np.int64]

    @property
    def index(self) -> Path:
        """Path of the index."""
        return index_of(self.tar)

    @cached_property
    def columns(self) -> ShardColumns:
        """The index, of all samples."""
        return ShardColumns.parse(self.index.read_bytes(), self.samples, str(self.index))

    @property
    def is_whole(self) -> bool:
        """Whether all samples are written."""
        return len(self.rows) == self.samples

    @cached_property
    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64 (all samples,) twice: where each sample begins and ends in the tar."""
        starts = self.columns.fixed("image_offset") - BLOCK  # the image comes first
        return starts, np.append(starts[1:], self.size - len(END))

    @property
    def bytes(self) -> int:
        """Bytes of the samples that are written."""
        starts, ends = self.bounds
        return int((ends - starts)[self.rows].sum())


class Composed(NamedTuple):
    """A shard, as `ManifestWriter.add` takes it: its entry, and its columns in the index."""

    entry: ShardEntry
    columns: bytes | memoryview

    @classmethod
    def of(cls, columns: ShardColumns, tar: str, *, size: int, sha256: str) -> Composed:
        """A tar with these columns, name, size and SHA-256."""
        return cls(ShardEntry.of(columns, tar, size=size, sha256=sha256), columns.data)


def compose(fragments: Sequence[Fragment], tar: Path) -> Composed:
    """Make a shard; the tar is on disk when this returns, its name may not be."""
    if len(fragments) == 1 and fragments[0].is_whole:
        _link(fragments[0].tar, tar)
        return take_whole(fragments[0], tar.name)
    shard = TarWriter(tar)
    parts: list[tuple[ShardColumns, NDArray[np.int64], NDArray[np.int64]]] = []
    try:
        for fragment in fragments:
            starts, ends = (bounds[fragment.rows] for bounds in fragment.bounds)
            sizes = ends - starts
            now = shard.bytes + np.cumsum(sizes) - sizes
            parts.append((fragment.columns, fragment.rows, now - starts))
            _copy(fragment.tar, starts, ends, shard)
        sha256 = shard.finish()
        return Composed.of(rearranged(parts), tar.name, size=shard.bytes, sha256=sha256)
    except BaseException:
        shard.discard()
        raise


def take_whole(fragment: Fragment, name: str) -> Composed:
    """A shard of this name that is a whole fragment, wherever its tar is."""
    return Composed.of(fragment.columns, name, size=fragment.size, sha256=fragment.sha256)


def finish_fragment(shard: TarWriter, count_tokens: CountTokens | None) -> str:
    """End the tar of a fragment, and write its index beside it; both are on disk when this returns. Its SHA-256."""
    columns = encode(shard.rows, count_tokens)
    sha256, path = shard.finish(), index_of(shard.path)
    with naming(path), path.open("xb") as file:
        file.write(columns.data)
        end_file(file)
    return sha256


def index_of(tar: Path) -> Path:
    """Path of the index of a fragment."""
    return tar.parent / INNER / tar.with_suffix(".columns").name


def _link(old: Path, new: Path) -> None:
    """A second name for a file; a copy where the file system has none."""
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:
        with naming(new), old.open("rb") as source, new.open("xb") as target:
            shutil.copyfileobj(source, target, COPIED_BYTES)
            end_file(target)


def _copy(tar: Path, starts: NDArray[np.int64], ends: NDArray[np.int64], shard: TarWriter) -> None:
    """Copy samples; neighbours are read together."""
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    with tar.open("rb") as file:
        for begin, end in zip(starts[np.r_[0, breaks]].tolist(), ends[np.r_[breaks - 1, -1]].tolist(), strict=True):
            file.seek(begin)
            while begin < end:
                data = file.read(min(COPIED_BYTES, end - begin))
                assert data, f"'{tar}' became shorter"
                shard.copy(data)
                begin += len(data)
