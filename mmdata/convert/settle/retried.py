"""Some rows of a source as a source of their own. They keep their keys, and nothing that they give is given twice.

Rows of a source are numbered without gaps; `RetriedRows.numbers` says which rows of the whole corpus these are. What
people read (ledger, list of rows, messages) has the numbers of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.config.convert import Grouping
from mmdata.convert.settle.earlier import Earlier
from mmdata.convert.settle.merges import Merges
from mmdata.convert.sources.rows import InputRow, Merge, Source, images_of, numbered_key, row_key
from mmdata.errors import DataError


class RetriedRows:
    """The rows of a corpus that are tried again.

    Args:
        corpus: all rows.
        numbers: int64 (N,), those of the rows to try again, ascending.
        earlier: the conversion that left them out, and its retries.
        description: what these rows are; added to the description of the corpus.

    Attributes:
        corpus, numbers: as given.
        folders: paths of the earlier folders, in their order.
        before: more than the number of any row of the corpus.
        labels_are_names: as the labels in the earlier folders are; None if they do not tell.

    Raises:
        DataError: the earlier folders number the classes differently.
    """

    rows_are_exact = True

    def __init__(
        self, corpus: Source, numbers: NDArray[np.int64], earlier: Sequence[Earlier], description: dict[str, Any]
    ) -> None:
        self.corpus = corpus
        self.numbers = numbers
        self.folders = tuple(str(one.folder) for one in earlier)
        self.before: int = earlier[0].accounts["rows"]
        self.root = corpus.root
        self.rows_at_most = len(numbers)
        self.has_captions = corpus.has_captions
        self.group_by: Grouping = corpus.group_by
        self._images = images_of(corpus)
        self.holds_images = self._images is not None
        self.can_be_sent = self._images is not None and self._images.can_be_sent
        self.classes = _classes(earlier) or corpus.classes
        self.labels_are_names: bool | None = None
        if len(self.classes) > len(corpus.classes):
            self.labels_are_names = True
        elif not self.classes and any(one.has_labels for one in earlier):
            self.labels_are_names = False
        self._earlier = earlier
        self._description = description

    def rows(self) -> Iterator[InputRow]:
        """The rows. See `Source.rows`."""
        return self._of(self.corpus.rows(), 0)

    def rows_from(self, start: int) -> Iterator[InputRow]:
        """The rows from one on. See `ImageSource.rows_from`."""
        assert self._images is not None
        return self._of(self._images.rows_from(int(self.numbers[start])), start)

    def rows_with_labels(self) -> Iterator[InputRow]:
        """Those of the corpus: its classes have one number in all folders. See `Source.rows_with_labels`."""
        return self.corpus.rows_with_labels()

    def check_unchanged(self) -> None:
        """Raise DataError if a file has changed since it was opened."""
        if self._images is not None:
            self._images.check_unchanged()

    def describe(self) -> dict[str, Any]:
        """The corpus, and which of its rows. See `Source.describe`."""
        return {**self.corpus.describe(), "retry": self._description}

    def images(self) -> Iterator[tuple[bytes, NDArray[np.int64]]]:
        """What the earlier folders hold: digests of the original images, one after the other, and their rows."""
        for one in self._earlier:
            for batch in one.rows(["row", "digest"]):
                written = batch.filter(batch.column("digest").is_valid())
                digests: list[bytes] = written.column("digest").to_pylist()
                yield b"".join(digests), written.column("row").to_numpy()

    def number(self, row: int) -> int:
        """The number in the corpus of a row from `before` on; those below it are rows of the earlier folders."""
        return row if row < self.before else int(self.numbers[row - self.before])

    def with_all_keys(self, digests: Iterable[bytes]) -> Iterator[bytes]:
        """Keys for `Merges.find` of the rows of the corpus, given those of these rows (b"" for none)."""
        start = 0
        for number, digest in zip(self.numbers, digests, strict=True):
            yield from map(row_key, range(start, int(number)))
            yield digest or row_key(int(number))
            start = int(number) + 1

    def _of(self, rows: Iterable[InputRow], place: int) -> Iterator[InputRow]:
        for row in rows:
            if row.number == self.numbers[place]:
                yield replace(row, number=place, key=row.key or numbered_key(row.number))
                place += 1
                if place == len(self.numbers):
                    return
        raise DataError(f"row {self.numbers[place]} is no longer there: the source has changed; convert anew")


class RetriedMerges(Merges):
    """The merges of a whole corpus, for the rows of it that are tried again.

    Rows of one image failed together, so those that are merged are all tried again. What the others say of the image
    (boxes to blur) holds for these too.

    Args:
        folder: for temporary files.
        numbers: int64 (N,), of the rows in the corpus, ascending.
    """

    def __init__(self, folder: Path, numbers: NDArray[np.int64]) -> None:
        super().__init__(folder)
        self._of_corpus = numbers

    def between(self, start: int, stop: int) -> dict[int, Merge]:
        """The merges of some of the rows. See `Merges.between`."""
        numbers = self._of_corpus[start:stop].tolist()
        if not numbers:
            return {}
        found = super().between(numbers[0], numbers[-1] + 1)
        merges = ((start + place, found.get(number)) for place, number in enumerate(numbers))
        return {place: self._renumbered(merge) for place, merge in merges if merge is not None}

    def _renumbered(self, merge: Merge) -> Merge:
        if merge.into is None:
            return merge
        place = int(np.searchsorted(self._of_corpus, merge.into))
        if place < len(self._of_corpus) and self._of_corpus[place] == merge.into:
            return merge._replace(into=place)
        return merge._replace(into=None)  # a row that was not left out would take its captions: it stands alone


def _classes(earlier: Sequence[Earlier]) -> tuple[str, ...]:
    """Names of the classes of all folders, by number."""
    longest = max((one.classes for one in earlier), key=len)
    for one in earlier:
        if longest[: len(one.classes)] != one.classes:
            raise DataError(
                f"retry '{one.folder}': its classes are numbered otherwise than those of another folder that is given; "
                "each retry must be given the ones before it"
            )
    return tuple(longest)
