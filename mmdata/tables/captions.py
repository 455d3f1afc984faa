"""Captions of what is joined: a text, or a list of texts, for each row of an index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.hashing import hash64
from mmdata.index.caption_lengths import CountsTokens
from mmdata.index.columns import offsets_of
from mmdata.index.side import SideFile
from mmdata.tables.values import kind_of
from mmdata.tars.captions import clean_captions

CHUNK = 2**14
"""Rows whose texts are cleaned, or counted, at a time."""

Ints = NDArray[np.int64]


class TableCaptions:
    """The captions that a column has for the rows of an index, cleaned as those of the shards are.

    Their hashes and lengths are made once by `mmdata join`.

    Args:
        side: gives the side file of some kind that belongs to the column; see `SideFiles.get`.
        make: gives the captions, see `cleaned`.

    `len` is the number of captions of all rows.

    Attributes:
        fingerprint: equal for equal captions of the rows.

    Raises:
        ConfigError: they are not joined, or the column holds neither texts nor lists of them.
        DataError: a text is no caption, such as one of 65,537 characters.
    """

    def __init__(self, side: Callable[[str, Callable[[], Any]], SideFile], make: Callable[[], Any]) -> None:
        self._side = side
        found = side("captions", make)
        lists = found.array("texts")
        self._texts: Any = lists.values
        self._offsets: Ints = lists.offsets.to_numpy()
        self._hashes: Ints = found.array("hashes").values.to_numpy()
        self._tokens: NDArray[np.int32] | None = None
        self.fingerprint = found.fingerprint[:16]

    def __len__(self) -> int:
        return len(self._hashes)

    def num_captions(self, rows: Ints) -> Ints:
        """How many captions each of n rows of the index has, int64 (n,)."""
        return self._offsets[rows + 1] - self._offsets[rows]

    def count(self, tokenizer: CountsTokens) -> None:
        """Know the tokens of all captions."""

        def make() -> Any:
            chunks = (self._texts.slice(begin, CHUNK).to_pylist() for begin in range(0, len(self), CHUNK))
            counts = [np.asarray(tokenizer.count(texts), np.int32) for texts in chunks]
            tokens = np.concatenate([np.empty(0, np.int32), *counts])
            return pa.table({"tokens": pa.LargeListArray.from_arrays(self._offsets, tokens)})

        self._tokens = self._side(f"tokens-{tokenizer.fingerprint[:16]}", make).array("tokens").values.to_numpy()

    def tokens(self, rows: Ints, chosen: Ints) -> Ints:
        """Tokens of one caption of each of n rows, int64 (n,); 1 before they are counted."""
        if self._tokens is None:
            return np.ones(len(rows), np.int64)
        return self._tokens[self._offsets[rows] + chosen].astype(np.int64)

    def hashes(self, rows: Ints, chosen: Ints) -> Ints:
        """Hashes of one caption of each of n rows, int64 (n,)."""
        return self._hashes[self._offsets[rows] + chosen]

    def text(self, row: int, chosen: int) -> str:
        """One caption of a row."""
        return self._texts[int(self._offsets[row]) + chosen].as_py()


def cleaned(values: Any, *, place: Callable[[int], str], of: str) -> Any:
    """The captions of n rows, a pyarrow.Table with their texts and hashes; null and empty texts are none.

    Args:
        values: texts, or lists of them, an Arrow array (n,).
        place: file and row of what belongs to a row, for messages.
        of: name of the setting, likewise.

    Raises:
        ConfigError: other values.
        DataError: a text is no caption.
    """
    kind: Any = values.type
    if kind_of(kind.value_type if kind_of(kind) == "list" else kind) != "text":
        raise ConfigError(f"{of}: values of type {kind}; captions are a text, or a list of texts, a row")
    counts, texts, hashes = np.zeros(len(values), np.int64), [pa.array([], pa.large_string())], [np.empty(0, np.int64)]
    for begin in range(0, len(values), CHUNK):
        found: list[str] = []
        for row, value in enumerate(values.slice(begin, CHUNK).to_pylist(), begin):
            try:
                own = clean_captions(value)[0]
            except BadSample as error:
                if error.reason not in (Reason.EMPTY_CAPTION, Reason.MISSING_CAPTION):
                    raise DataError(f"{of}: {place(row)}: {error}; shorten or remove it") from error
                own = []
            counts[row] = len(own)
            found += own
        texts.append(pa.array(found, pa.large_string()))
        hashes.append(np.array([hash64(text.encode()) for text in found], np.int64))
    offsets = offsets_of(counts)
    columns = {"texts": pa.concat_arrays(texts), "hashes": pa.array(np.concatenate(hashes))}
    return pa.table({name: pa.LargeListArray.from_arrays(offsets, column) for name, column in columns.items()})
