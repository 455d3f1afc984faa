"""What the rows of an index are like, for `mmdata init`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import BadSample, DataError
from mmdata.index import Index, ShardStore
from mmdata.plan import IndexRows
from mmdata.tars.captions import captions_of

LOOKED_CAPTIONS = 256
"""Rows whose captions are read."""
LOOKED_ROWS = 2**20
"""Rows whose sizes, captions and labels are counted: more would tell the same."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Facts:
    """What the rows of a corpus are like.

    Attributes:
        rows: of the corpus.
        looked: rows that the other facts come from.
        heights, widths: int64 (n,), pixels as displayed, of those rows.
        captions: of those rows.
        texts: some of those captions.
        labels: how many of those rows have a label.
        longest: tokens of the longest caption; 0 if nobody has counted them.
        repeated: captions that an earlier row has too.
    """

    rows: int
    looked: int
    heights: Ints
    widths: Ints
    captions: int
    texts: list[str]
    labels: int
    longest: int = 0
    repeated: int = 0

    @property
    def words(self) -> float:
        """Mean words of a caption."""
        return float(np.mean([len(text.split()) for text in self.texts])) if self.texts else 0.0

    @property
    def short_side(self) -> int:
        """Median of the shorter sides of the images, in pixels."""
        return int(np.median(np.minimum(self.heights, self.widths)))

    @property
    def captions_in_all(self) -> int:
        """Captions of all rows, by those of the rows looked at."""
        return self.captions * self.rows // max(self.looked, 1)

    def lines(self) -> Iterator[str]:
        """The facts, for people."""
        if self.looked < self.rows:
            yield f"looked at the first {self.looked:,} rows"
        if self.looked:
            short, long = np.minimum(self.heights, self.widths), np.maximum(self.heights, self.widths)
            yield (
                f"images: {int(short.min()):,} to {int(long.max()):,} pixels a side; "
                f"the median is {int(np.median(self.heights)):,} × {int(np.median(self.widths)):,} (height × width)"
            )
        if self.captions:
            mean = self.captions / max(self.looked, 1)
            longest = f"; the longest has {self.longest:,} tokens" if self.longest else ""
            yield f"captions: {mean:.3g} a row, {self.words:.1f} words on average{longest}"
        else:
            yield "captions: none"
        if self.labels:
            yield f"labels: {self.labels:,} of {self.looked:,} rows have one"


def facts_of_index(index: Index) -> Facts:
    """What the rows of an index are like; captions of some rows are read, and no image."""
    if not len(index):
        raise DataError(f"shards '{index.sources[0].folder}': no rows in the index; see its quarantine.jsonl")
    rows = np.arange(min(len(index), LOOKED_ROWS))
    heights, widths = IndexRows(index).sizes(rows)
    hashes = index.take_lists(rows, "caption_hash")[1]
    histogram = index.token_histogram()
    return Facts(
        rows=len(index),
        looked=len(rows),
        heights=heights,
        widths=widths,
        captions=len(hashes),
        texts=list(_captions(index, _looked_rows(index, rows))),
        labels=int((index.take(rows, ["label"])["label"] >= 0).sum()),
        longest=int(np.flatnonzero(histogram)[-1]) if index.captions and index.tokenizer else 0,
        repeated=len(hashes) - len(np.unique(hashes)),
    )


def _looked_rows(index: Index, rows: Ints) -> Ints:
    """The rows whose captions are read. Behind a URL they are the first, as each shard that is read is fetched."""
    return rows[:LOOKED_CAPTIONS] if index.caches else rows[:: -(-len(rows) // LOOKED_CAPTIONS)]


def _captions(index: Index, rows: Ints) -> Iterator[str]:
    """The captions of some rows, as they are in the tars."""
    if not index.captions:
        return
    store = ShardStore(index)
    columns = index.take(rows, ["caption_offset", "caption_bytes", "caption_format"])
    shards, _ = index.locate(rows)
    for i, shard in enumerate(shards.tolist()):
        data = store.read(shard, int(columns["caption_offset"][i]), int(columns["caption_bytes"][i]))
        try:
            yield from captions_of(data, int(columns["caption_format"][i]))
        except BadSample:
            continue
