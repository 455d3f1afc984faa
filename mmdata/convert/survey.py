"""Reads the rows of a corpus for a preview: how many there are, which are of one image, and those of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from mmdata.config.convert import ConvertConfig
from mmdata.convert.row.examine import Examiner
from mmdata.convert.sampling import SampleOf
from mmdata.convert.settle.merges import BUCKET_ROWS, Merges
from mmdata.convert.sources.rows import ImageSource, InputRow, Merge, Source, grouping, image_key, images_of
from mmdata.errors import DataError
from mmdata.progress import Track


class Survey:
    """Reads a corpus for its number of rows, its merges, and a sample.

    Args:
        source: the rows.
        config: the settings about rows of one image are used.
        examiner: reads captions.
        track: shows progress.

    Attributes:
        finds_merges: whether rows of one image are looked for.
        knows_merges: whether that, or that there are none, is all there is to know of them.
    """

    def __init__(self, source: Source, config: ConvertConfig, examiner: Examiner, track: Track) -> None:
        self._source = source
        self._images = images_of(source)
        self._examiner = examiner
        self._track = track
        how = grouping(source, config)
        self.finds_merges = how == "image" and self._images is None
        self.knows_merges = self.finds_merges or how == "none"

    def count(self, merges: Merges) -> int:
        """The number of rows; their merges are found, if there may be any and no image need be read."""
        if self._source.rows_are_exact and not self.finds_merges:
            return self._source.rows_at_most
        counted = 0

        def keys() -> Iterator[bytes]:
            nonlocal counted
            for row in self._passing("count rows"):
                counted += 1
                yield image_key(row)

        if self.finds_merges:
            most = self._source.rows_at_most
            merges.find(keys(), lambda: self._passing("group captions"), self._examiner.say, rows_at_most=most)
        else:
            for _ in self._passing("count rows"):
                counted += 1
        return counted

    def merges_of(self, sample: SampleOf, merges: Merges) -> dict[int, Merge]:
        """The merges of the rows of a sample, and of the rows that take their captions."""
        numbers = set(sample.numbers())
        found = _between(merges, numbers, sample.rows)
        others = {merge.into for merge in found.values() if merge.into is not None} - numbers
        return {**{other: Merge() for other in others}, **found, **_between(merges, others, sample.rows)}

    def rows(self, sample: SampleOf, merges: dict[int, Merge]) -> Iterator[InputRow]:
        """The rows of a sample, merged, and the rows that take their captions."""
        left = set(sample.numbers()) | merges.keys()
        rows = self._passing("examine a sample") if self._images is None else self._in_ranges(self._images, sample)
        for row in rows:
            if row.number in left:
                left.remove(row.number)
                merge = merges.get(row.number)
                yield row if merge is None else merge(row)
        if left:
            raise DataError(f"row {min(left)} is no longer there: the source has changed; start again")

    def _in_ranges(self, images: ImageSource, sample: SampleOf) -> Iterator[InputRow]:
        rows = (row for start, end in sample.ranges for row in islice(images.rows_from(start), end - start))
        yield from self._track(rows, "examine a sample", sample.size)

    def _passing(self, what: str) -> Iterator[InputRow]:
        exact = self._source.rows_are_exact
        yield from self._track(self._source.rows(), what, self._source.rows_at_most, is_exact=exact)


def _between(merges: Merges, numbers: set[int], rows: int) -> dict[int, Merge]:
    """The merges of some rows; each temporary file is read once."""
    found: dict[int, Merge] = {}
    for start in range(0, rows, BUCKET_ROWS):
        stop = start + BUCKET_ROWS
        if any(start <= number < stop for number in numbers):
            found.update((row, merge) for row, merge in merges.between(start, stop).items() if row in numbers)
    return found
