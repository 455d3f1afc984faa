"""Several manifests as one: the shards, and so the rows, of one folder after those of the other. Nothing is copied.

No shard is in it twice: what is meant to be seen more often has a weight or a repeat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as pa

from mmdata.errors import ConfigError
from mmdata.shards.histogram import Histogram
from mmdata.shards.manifest import Int32s, Ints, Manifest
from mmdata.shards.pages import ListedShard, ShardEntry
from mmdata.shards.ragged import offsets_of

_REMEDY = "use weight or repeat instead of listing a dataset twice"


class UnionManifest:
    """The shards of several folders, numbered one folder after the other; read like a `Manifest`.

    Args:
        parts: the folders' manifests.

    Attributes:
        parts: as given.
        rows, bytes, num_shards, captions, has_labels: as those of `Manifest`, of all folders together.
        tokenizer: the one that counted the captions of every folder; None when there is no such.
        root: hash of the folders' root hashes, in their order.

    Raises:
        ConfigError: a folder stands there twice, or two folders hold the same shard.
        DataError: a page is missing or damaged.

    Example:
        Of folders with 3 and 2 shards, shards 0, 1 and 2 are the first folder's and 3 and 4 the second's:
        UnionManifest(parts).part(4) == (parts[1], 1)
    """

    def __init__(self, parts: Sequence[Manifest]) -> None:
        _check_folders_differ(parts)
        _check_shards_differ(parts)
        self.parts = list(parts)
        self.rows = sum(part.rows for part in parts)
        self.bytes = sum(part.bytes for part in parts)
        self.num_shards = sum(part.num_shards for part in parts)
        self.captions = sum(part.captions for part in parts)
        self.has_labels = any(part.has_labels for part in parts)
        tokenizers = {part.tokenizer for part in parts if part.rows}
        self.tokenizer = tokenizers.pop() if len(tokenizers) == 1 else None
        self.root = hashlib.sha256("\n".join(part.root for part in parts).encode()).hexdigest()
        self._firsts = offsets_of(np.array([part.num_shards for part in parts], np.int64))

    @cached_property
    def shard_rows(self) -> Ints:
        """Rows of each shard, int64 (num_shards,); reads all pages."""
        return np.concatenate([part.shard_rows for part in self.parts])

    def part(self, shard: int) -> tuple[Manifest, int]:
        """The manifest that lists a shard, and the shard's number there.

        Raises:
            IndexError: `shard` is not one of 0 … num_shards−1.
        """
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} asked of a manifest of {self.num_shards}")
        number = int(np.searchsorted(self._firsts, shard, side="right")) - 1
        return self.parts[number], shard - int(self._firsts[number])

    def listed(self, shard: int) -> ListedShard:
        """One shard, its histogram apart; see `Manifest.listed`."""
        part, local = self.part(shard)
        return part.listed(local)

    def entry(self, shard: int) -> ShardEntry:
        """The entry of one shard; see `Manifest.entry`."""
        part, local = self.part(shard)
        return part.entry(local)

    def __iter__(self) -> Iterator[ShardEntry]:
        return chain.from_iterable(self.parts)

    def histogram(self, shards: Ints) -> Histogram:
        """Captions of some shards by length and aspect ratio; see `Manifest.histogram`."""
        shards = np.asarray(shards, np.int64)
        if shards.size and not 0 <= shards.min() <= shards.max() < self.num_shards:
            raise IndexError(f"shards {shards.min()} to {shards.max()} asked of a manifest of {self.num_shards}")
        found: list[Histogram] = []
        for part, first in zip(self.parts, self._firsts, strict=False):
            places = np.flatnonzero((first <= shards) & (shards < first + part.num_shards))
            of_part = part.histogram(shards[places] - first)
            found.append(of_part._replace(shard=places[of_part.shard]))
        joined = Histogram._make(np.concatenate(columns) for columns in zip(*found, strict=True))
        order = np.argsort(joined.shard, kind="stable")
        return Histogram._make(column[order] for column in joined)

    def cells(self) -> Iterator[tuple[Int32s, Int32s, Int32s]]:
        """The histograms of all shards, as they lie on disk; see `Manifest.cells`."""
        return chain.from_iterable(part.cells() for part in self.parts)

    def token_histogram(self) -> Ints:
        """Captions by length: entry i counts those of i tokens."""
        found = [part.token_histogram() for part in self.parts]
        total = np.zeros(max(map(len, found)), np.int64)
        for counts in found:
            total[: len(counts)] += counts
        return total


def _check_folders_differ(parts: Sequence[Manifest]) -> None:
    seen: dict[str, Manifest] = {}
    for part in parts:
        first = seen.setdefault(part.folder.identity, part)
        if first is not part:
            raise ConfigError(f"shards '{part.folder}': the same folder as '{first.folder}'; {_REMEDY}")


def _check_shards_differ(parts: Sequence[Manifest]) -> None:
    """Compare the hashes of the tars. Shards without rows are all alike, and may be."""
    shards = [np.flatnonzero(part.shard_rows) for part in parts]
    hashes = [part.tar_hashes().take(pa.array(numbers)) for part, numbers in zip(parts, shards, strict=True)]
    owner = np.repeat(np.arange(len(parts)), [len(numbers) for numbers in shards])
    code = pa.concat_arrays(hashes).dictionary_encode().indices.to_numpy()  # equal hashes, equal numbers
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    first = first[inverse]  # where each one's hash stands for the first time
    twice = np.flatnonzero(owner[first] != owner)
    if len(twice):
        number = np.concatenate(shards)
        places = (int(twice[0]), int(first[twice[0]]))
        here, there = (parts[int(owner[place])] for place in places)
        name, other = (part.listed(int(number[place])).name for part, place in zip((here, there), places, strict=True))
        raise ConfigError(
            f"shards '{here.folder}': '{name}' is the same shard as '{other}' in '{there.folder}', the first of "
            f"{len(twice)} that two datasets share; leave them out of one, or {_REMEDY}"
        )
