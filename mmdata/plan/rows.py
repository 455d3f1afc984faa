"""What a plan knows of each row: which caption it has in an epoch, the caption's length, and the image's size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import ConfigError
from mmdata.hashing import EMPTY_HASH, fast_hash
from mmdata.index.columns import ASPECT_BINS, Histograms, aspect_ratio, offsets_of, unpack_cells
from mmdata.index.index import Index
from mmdata.plan.buckets import Bucket, BucketPolicy, Shapes
from mmdata.plan.captions import CaptionSources, ShardCaptions
from mmdata.tables.selection import CHUNK_ROWS, Selection, row_chunks, shard_runs
from mmdata.tables.table import NpyFile

Ints = NDArray[np.int64]

PASS_SHIFT = 40
"""An occurrence of a row is one int64: the row's number in the low 40 bits, the number of the pass over its dataset
above them; -1 is padding. One integer, so that queues of occurrences are split and joined as one array."""

MAX_PASS = 1 << (63 - PASS_SHIFT)
"""Passes are below this number."""

MAX_EPOCH = 2**20 - 1
"""The last epoch that can be asked for: 23 bits are for the pass, which is the epoch × the repeats of a mixture."""

PROBED_ROWS = 4096
"""`fingerprint_policy` asks a policy for the buckets of this many first rows."""

PROBED_TOKENS = 1024
"""`fingerprint_policy` asks a policy of cells for the buckets of lengths below this."""


def occurrences_of(rows: Ints, passes: Ints) -> Ints:
    """The occurrences of n rows in n passes; the inverse of `rows_of` and `passes_of`."""
    return rows + (passes << PASS_SHIFT)


def rows_of(occurrences: Ints) -> Ints:
    """The row of each occurrence; -1 for padding."""
    return np.where(occurrences < 0, -1, occurrences & ((1 << PASS_SHIFT) - 1))


def passes_of(occurrences: Ints) -> Ints:
    """The pass of each occurrence; -1 for padding, since the shift keeps the sign."""
    return occurrences >> PASS_SHIFT


class Hashes(NamedTuple):
    """Hashes of n rows, int64 (n,) each; rows with an equal image or an equal caption are duplicates."""

    image: Ints
    caption: Ints


HashesOf = Callable[[Ints, Ints], Hashes]
"""(rows, passes) -> their hashes; rows and passes are int64 (n,). The pass decides the caption."""


class Rows:
    """The rows of a corpus, as a plan sees them. A class of your own gives `starts`, `fingerprint` and `shapes`.

    Attributes:
        starts: first row of each shard, then the number of rows: int64 (num_shards + 1,).
        fingerprint: equal for equal rows with equal captions and lengths.
        selection: the rows that are planned; row numbers stay those of the corpus. None: all.
        boxes_fingerprint: equal for rows with equally many boxes; None: rows have none.
    """

    starts: Ints
    fingerprint: str
    selection: Selection | None = None
    boxes_fingerprint: str | None = None

    def shapes(self, rows: Ints, epoch: int) -> Shapes:
        """Shapes of n rows in an epoch."""
        raise NotImplementedError

    def bucket_counts(self, policy: BucketPolicy, epoch: int, shards: Ints) -> Ints:
        """Planned rows of each of n shards by the policy's K buckets: int64 (n, K).

        A plan asks for the shards of the windows that come next, and again in each epoch. A class that knows more than
        the shape of each row can be quicker; it must agree with `policy.assign`.
        """
        places, num_buckets = self.places, len(policy.buckets)
        ends = offsets_of(places[shards + 1] - places[shards])
        counts = np.zeros((len(shards), num_buckets), np.int64)
        for first, last in shard_runs(ends, CHUNK_ROWS):
            numbers = np.concatenate([np.empty(0, np.int64), *map(self.of_shard, shards[first:last].tolist())])
            bucket_of = assign_buckets(policy, self.shapes(numbers, epoch), numbers)
            number = np.repeat(np.arange(last - first), np.diff(ends[first : last + 1]))
            pairs = np.bincount(number * num_buckets + bucket_of, minlength=(last - first) * num_buckets)
            counts[first:last] = pairs.reshape(-1, num_buckets)
        return counts

    @property
    def places(self) -> Ints:
        """How many rows are planned before each shard, then of all: int64 (num_shards + 1,)."""
        return self.starts if self.selection is None else self.selection.starts

    def of_shard(self, shard: int) -> Ints:
        """The rows of a shard that are planned."""
        if self.selection is not None:
            return self.selection.of_shard(shard)
        return np.arange(*self.starts[shard : shard + 2].tolist())

    def planned(self) -> Iterator[Ints]:
        """The rows that are planned, in the order of the corpus, some at a time."""
        return row_chunks(self.selection, int(self.starts[-1]))

    def first(self, count: int) -> Ints:
        """The first `count` rows that are planned; fewer if there are no more."""
        if self.selection is None:
            return np.arange(min(count, int(self.starts[-1])))
        found = np.empty(0, np.int64)
        for some in self.selection.chunks(count):
            if len(found) >= count:
                break
            found = np.concatenate([found, some])
        return found[:count]

    def shapes_of(self, occurrences: Ints) -> Shapes:
        """Shapes of n occurrences, whatever their passes; the pass decides the caption, and so the length."""
        numbers, passes = rows_of(occurrences), passes_of(occurrences)
        if len(occurrences) and (passes == passes[0]).all():
            return self.shapes(numbers, int(passes[0]))
        columns = np.empty((len(Shapes._fields), len(occurrences)), np.int64)
        for number in np.unique(passes).tolist():
            of_pass = passes == number
            columns[:, of_pass] = self.shapes(numbers[of_pass], number)
        return Shapes(*columns)

    def buckets_of(self, occurrences: Ints, policy: BucketPolicy) -> NDArray[np.integer[Any]]:
        """The bucket of each of n occurrences, int (n,)."""
        return assign_buckets(policy, self.shapes_of(occurrences), rows_of(occurrences))


class IndexRows(Rows):
    """The rows of an index.

    Args:
        index: of the shards.
        captions: of the rows; None: those of the shards in turn, each one token long.
        selection: of the index's rows; None plans all of them.
        equals: int64 (len(index),), equal for rows that count as equal; 0 where the hash of the caption tells.
        boxes: int32 (len(index),), how many boxes each row has (`box_counts`); None: batches have none.
    """

    def __init__(
        self,
        index: Index,
        captions: CaptionSources | None = None,
        *,
        selection: Selection | None = None,
        equals: Ints | None = None,
        boxes: NDArray[np.int32] | None = None,
    ) -> None:
        self._index = index
        self._captions = captions or CaptionSources.in_turn(ShardCaptions(index))
        self._equals, self._boxes = equals, boxes
        self.selection = selection
        self.starts = index.starts
        # Policy, epoch, rows of each shard by bucket, and of which shards these are known.
        self._counted: tuple[BucketPolicy, int, Ints, NDArray[np.bool_]] | None = None
        self.fingerprint = f"{index.fingerprint[:16]}-{self._captions.fingerprint}-{self.starts[-1]}"
        self.boxes_fingerprint = None if boxes is None else f"{fast_hash(boxes.tobytes()) % 2**64:016x}"
        self.equals_fingerprint = None if equals is None else hashlib.sha256(equals.tobytes()).hexdigest()[:16]

    def shapes(self, rows: Ints, epoch: int) -> Shapes:
        """Shapes of n rows in an epoch; sizes as displayed, with the EXIF orientation applied."""
        return Shapes(self._captions.tokens(rows, epoch), *self.sizes(rows), self.boxes(rows))

    def boxes(self, rows: Ints) -> Ints:
        """How many boxes each of n rows has, int64 (n,)."""
        return np.zeros(len(rows), np.int64) if self._boxes is None else self._boxes[rows].astype(np.int64)

    def sizes(self, rows: Ints) -> tuple[Ints, Ints]:
        """Heights and widths of n images as displayed, in pixels: int64 (n,) each."""
        columns = self._index.take(rows, ["height", "width", "orientation"])
        turned = columns["orientation"] >= 5
        height = np.where(turned, columns["width"], columns["height"]).astype(np.int64)
        return height, np.where(turned, columns["height"], columns["width"]).astype(np.int64)

    def hashes(self, rows: Ints, passes: Ints) -> Hashes:
        """Hashes of the images of n rows, and of the captions that the rows have in their passes.

        Where batches have no texts, the captions' hashes are those of the images.
        """
        images = self._index.take(rows, ["image_hash"])["image_hash"]
        return Hashes(images, self.equal_captions(rows, self._captions.hashes(rows, passes)))

    def equal_captions(self, rows: Ints, hashes: Ints) -> Ints:
        """What stands for the hashes of the captions of n rows, int64 (n,); a row of -1 keeps its own.

        A caption that was dropped is equal to others that were, whatever its row has.
        """
        if self._equals is None:
            return hashes
        found = np.where(rows < 0, 0, self._equals[rows])
        return np.where((found == 0) | (hashes == EMPTY_HASH), hashes, found)

    def all_hashes(self) -> Ints:
        """Of image and caption of all rows of the index, int64 (len(index), 2); the captions are those of pass 0."""
        chunks = (np.stack(self.hashes(rows, np.zeros_like(rows)), 1) for rows in row_chunks(None, len(self._index)))
        return np.concatenate([np.empty((0, 2), np.int64), *chunks])

    def bucket_counts(self, policy: BucketPolicy, epoch: int, shards: Ints) -> Ints:
        """Rows of each of n shards by bucket, int64 (n, K)."""
        # With one caption a row the counts are the same in every epoch.
        epoch = 0 if self._captions.one_each else epoch
        counted = self._counted  # threads ask for several epochs at once
        if counted is None or counted[:2] != (policy, epoch):
            # The manifest's histograms tell, if every row has one caption and the policy looks at nothing finer than
            # their cells. Otherwise the shape of every row has to be read from the index.
            lengths = self._captions.in_histograms if self._captions.one_each else None
            known = lengths is not None and self.selection is None
            known = known and getattr(policy, "uses_cells", False)
            if known:
                counts = count_cells(self._index.cells(), policy, lengths=lengths == "tokens")
            else:
                counts = np.zeros((len(self.starts) - 1, len(policy.buckets)), np.int64)
            counted = self._counted = policy, epoch, counts, np.full(len(counts), known)
        _, _, counts, is_known = counted
        if len(missing := shards[~is_known[shards]]):
            counts[missing] = super().bucket_counts(policy, epoch, missing)
            is_known[missing] = True
        return counts[shards]


def count_cells(histograms: Iterable[Histograms], policy: BucketPolicy, *, lengths: bool) -> Ints:
    """`Rows.bucket_counts` from the histograms of an index whose rows have one caption each.

    Args:
        histograms: of the shards, in their order; see `Manifest.cells`.
        policy: a policy with `uses_cells`.
        lengths: False counts all captions as one token long.
    """
    num_buckets = len(policy.buckets)
    parts = [np.empty((0, num_buckets), np.int64)]
    for offsets, cells, captions in histograms:
        shard = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
        # The policy is asked once for each cell that occurs, not for each shard's: cells are few, shards are not.
        occurring = np.flatnonzero(np.bincount(cells))
        bucket_of_cell = np.zeros(int(occurring[-1]) + 1 if len(occurring) else 0, np.int32)
        bucket_of_cell[occurring] = assign_buckets(policy, _shapes_of_cells(occurring, lengths=lengths), occurring)
        pair = shard * np.int32(num_buckets) + bucket_of_cell[cells]  # (shard, bucket) as one number, to count it
        counts = np.bincount(pair, captions, minlength=(len(offsets) - 1) * num_buckets)
        parts.append(counts.reshape(-1, num_buckets).astype(np.int64))  # exact: float64 counts to 2^53
    return np.concatenate(parts)


def _shapes_of_cells(cells: Ints, *, lengths: bool) -> Shapes:
    """One shape for each cell, with the cell's length and aspect bin, and without boxes."""
    tokens, bins = unpack_cells(cells)
    length = tokens.astype(np.int64) if lengths else np.ones(len(cells), np.int64)
    height = np.full(len(cells), 4096, np.int64)
    return Shapes(length, height, np.round(height * aspect_ratio(bins)).astype(np.int64), np.zeros_like(height))


def assign_buckets(policy: BucketPolicy, shapes: Shapes, rows: Ints) -> NDArray[np.integer[Any]]:
    """The bucket of each row, checked; in the smallest integer type that holds it, because that sorts fastest.

    Raises:
        ValueError: the policy gives a row a bucket that does not exist, or not one integer for each row.
    """
    buckets = len(policy.buckets)
    bucket_of = np.asarray(policy.assign(shapes))
    name = type(policy).__name__
    if bucket_of.shape != rows.shape or not np.issubdtype(bucket_of.dtype, np.integer):
        raise ValueError(
            f"bucket policy {name}: assign() gave {bucket_of.dtype} {bucket_of.shape} "
            f"for {len(rows)} rows, not one integer each"
        )
    outside = (bucket_of < 0) | (bucket_of >= buckets)
    if outside.any():
        first = int(outside.argmax())
        raise ValueError(
            f"bucket policy {name}: row {rows[first]} got bucket {bucket_of[first]}; "
            f"every row needs one of 0 … {buckets - 1}"
        )
    return bucket_of.astype(np.min_scalar_type(buckets))


def fingerprint_policy(policy: BucketPolicy, rows: Rows) -> str:
    """Equal for policies of the same class with the same buckets that give the first rows of a corpus the same buckets.

    So a user's own policy needs no version number: a change of its code that changes the buckets of the first
    `PROBED_ROWS` rows changes the fingerprint. For a policy with `uses_cells` no row is read: it is asked for all cells
    of up to its longest text, below `PROBED_TOKENS`.

    Example:
        "16-77 tokens, 224x224, 304-240 rows (7bfd68c4e1befac5)": the buckets in words, and a digest
    """
    named = f"{type(policy).__qualname__} {[tuple(bucket) for bucket in policy.buckets]}"
    if getattr(policy, "uses_cells", False):
        beyond = min(max(bucket.length for bucket in policy.buckets) + 2, PROBED_TOKENS)
        shapes = _shapes_of_cells(np.arange(beyond * ASPECT_BINS), lengths=True)
    else:
        shapes = rows.shapes(rows.first(PROBED_ROWS), 0)
    digest = hashlib.sha256(named.encode())
    digest.update(np.asarray(policy.assign(shapes), np.int64).tobytes())
    return f"{_in_words(policy.buckets)} ({digest.hexdigest()[:16]})"


def _in_words(buckets: Sequence[Bucket]) -> str:
    """The text lengths, image shapes and, where there are any, boxes and rows of buckets, briefly: a state is small."""
    images = [str(bucket.patches) if bucket.patches else f"{bucket.height}x{bucket.width}" for bucket in buckets]
    further = {"boxes": _span([b.boxes for b in buckets]), "rows": _span([b.rows for b in buckets])}
    words = [f"{_span([b.length for b in buckets])} tokens", _span(images)]
    return ", ".join([*words, *(f"{span} {name}" for name, span in further.items() if span != "0")])


def _span(values: Sequence[int] | Sequence[str]) -> str:
    """The first of some values, and the last if it is another."""
    return str(values[0]) if values[0] == values[-1] else f"{values[0]}-{values[-1]}"


def npy_of_rows(name: str, index: Index, *, of: str, kinds: str, what: str) -> NpyFile:
    """A .npy file with a number for each row of an index.

    Args:
        name: of the file.
        index: of the rows.
        of: name of the setting, for messages.
        kinds: of numbers, as numpy calls them.
        what: a number is, in words.

    Raises:
        ConfigError: no such file, or an array of other values or of another length.
        DataError: the file is damaged.
    """
    file = NpyFile(name, of=of)
    if file.dtype.kind not in kinds:
        raise ConfigError(f"{of}: '{name}' is an array of {file.dtype}; {what}")
    if len(file) != len(index):
        raise ConfigError(
            f"{of}: '{name}' has {len(file):,} values, and the index has {len(index):,} rows: it was made for other "
            "shards"
        )
    return file
