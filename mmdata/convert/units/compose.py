"""Makes shards of the tars of units. A tar whose samples are all written becomes a shard as it is; others are copied.

Consecutive tars that are not full share a shard while they fit. Samples are copied byte for byte, in their order; only
those whose class number was guessed wrongly are written again.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.files import end_file, naming
from mmdata.images import ImageInfo
from mmdata.images.probe import FORMATS
from mmdata.index.columns import ShardColumns
from mmdata.index.encode import CountTokens, encode, rearranged
from mmdata.index.manifest import ShardEntry
from mmdata.storage.folder import INNER
from mmdata.tars.tar import BLOCK, END, read_members, split_name
from mmdata.tars.write import Sample, TarWriter, members_of

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


def relabel(fragment: Fragment, labels: NDArray[np.int64], tar: Path) -> Fragment:
    """Write the samples of a fragment again, with other class numbers.

    Args:
        fragment: its `rows` are written.
        labels: int64 (all samples,), -1 for none.
        tar: path of the new fragment.
    """
    shard = TarWriter(tar)
    try:
        starts, ends = fragment.bounds
        with fragment.tar.open("rb") as file:
            for row in fragment.rows.tolist():
                file.seek(int(starts[row]))
                data = file.read(int(ends[row] - starts[row]))
                sample = _sample(fragment.columns, row, data, None if labels[row] < 0 else int(labels[row]))
                shard.add(sample, members_of(sample))
        offsets, lengths = fragment.columns.lists("caption_tokens")
        counted = [lengths[offsets[row] : offsets[row + 1]] for row in fragment.rows.tolist()]
        tokens = np.concatenate([lengths[:0], *counted]).tolist()
        sha256 = finish_fragment(shard, partial(_counted, tokens) if len(lengths) else None)
    except BaseException:
        shard.discard()
        raise
    return Fragment(tar, sha256, shard.bytes, len(shard.rows), np.arange(len(shard.rows)))


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


def _counted(tokens: list[int], captions: list[str]) -> list[int]:
    """Lengths of captions that were counted before; a `CountTokens`."""
    assert len(tokens) == len(captions)
    return tokens


def _sample(columns: ShardColumns, row: int, data: bytes, label: int | None) -> Sample:
    """A sample as it was given to `TarWriter`, with another label."""
    (key,) = columns.keys_of(slice(row, row + 1))
    members: dict[str, bytes] = {}
    for member in read_members(io.BytesIO(data + END), name=key):
        name = split_name(member.name)
        assert name is not None
        members[name[1]] = data[member.offset : member.offset + member.size]
    content: dict[str, Any] = json.loads(members.get("json", b"{}"))
    content.pop("label", None)
    captions = content.pop("captions", None)
    if captions is None:
        captions = [members["txt"].decode()] if "txt" in members else []
    height, width, orientation = (int(columns.fixed(name)[row]) for name in ("height", "width", "orientation"))
    info = ImageInfo(FORMATS[columns.fixed("image_format")[row]], height, width, orientation)
    image = next(iter(members.values()))  # the image comes first
    return Sample(key, image, info, captions, label, content or None, int(columns.fixed("image_hash")[row]))
