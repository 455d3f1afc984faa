"""Captions in a column of a joined table: a text, or a list of texts, for each row that the table has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.hashing import hash64
from mmdata.shards.caption_lengths import CountsTokens
from mmdata.shards.captions import clean_captions
from mmdata.shards.columns.ragged import offsets_of, spans

CHUNK = 2**14
"""Texts that are cleaned, or counted, at a time."""

Ints = NDArray[np.int64]


class TableCaptions:
    """The captions that a column has for the rows of an index; null and empty texts are none.

    They are cleaned as those of the shards are, and held in memory. Only those of the index's rows are looked at.

    Args:
        column: an Arrow array (n,).
        table_rows: int64 (num_rows,), the row of the column for each row of the index, -1 where there is none.
        place: file and row of a row of the table, for messages.
        of: name of the setting, for messages.

    Attributes:
        fingerprint: equal for equal captions of the index's rows, in whatever order the table has them.

    Raises:
        ConfigError: the column holds neither texts nor lists of them.
        DataError: a text is no caption, such as one of 65,537 characters.
    """

    def __init__(self, column: Any, table_rows: Ints, *, place: Callable[[int], str], of: str) -> None:
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        of_value = kind.value_type if is_list else kind
        if not (pa.types.is_string(of_value) or pa.types.is_large_string(of_value)):
            raise ConfigError(f"{of}: values of type {kind}; captions are a text, or a list of texts, a row")
        used = np.unique(table_rows[table_rows >= 0])
        # Place of each row of the index among the used rows; the last place, without captions, is for all others.
        self._place = np.where(table_rows < 0, len(used), np.searchsorted(used, table_rows))
        counts = np.zeros(len(used) + 1, np.int64)
        chunks: list[Any] = []
        hashes: list[Ints] = [np.empty(0, np.int64)]
        for begin in range(0, len(used), CHUNK):
            rows = used[begin : begin + CHUNK]
            found = [_captions(value, of, place, row) for value, row in zip(_take(column, rows), rows, strict=True)]
            counts[begin : begin + len(rows)] = list(map(len, found))
            texts = [text for captions in found for text in captions]
            chunks.append(pa.array(texts, pa.large_string()))
            hashes.append(np.array([hash64(text.encode()) for text in texts], np.int64))
        self._texts: Any = pa.chunked_array(chunks, pa.large_string()).combine_chunks()
        self._hashes = np.concatenate(hashes)
        self._offsets = offsets_of(counts)
        self._tokens: NDArray[np.int32] | None = None
        self.fingerprint = self._fingerprint()

    def num_captions(self, rows: Ints) -> Ints:
        """How many captions each of n rows of the index has, int64 (n,)."""
        places = self._place[rows]
        return self._offsets[places + 1] - self._offsets[places]

    def count(self, tokenizer: CountsTokens) -> None:
        """Know the tokens of all captions."""
        counts = [
            np.asarray(tokenizer.count(self._texts.slice(begin, CHUNK).to_pylist()), np.int32)
            for begin in range(0, len(self._texts), CHUNK)
        ]
        self._tokens = np.concatenate([np.empty(0, np.int32), *counts])

    def tokens(self, rows: Ints, chosen: Ints) -> Ints:
        """Tokens of one caption of each of n rows, int64 (n,); 1 before they are counted."""
        if self._tokens is None:
            return np.ones(len(rows), np.int64)
        return self._tokens[self._offsets[self._place[rows]] + chosen].astype(np.int64)

    def hashes(self, rows: Ints, chosen: Ints) -> Ints:
        """Hashes of one caption of each of n rows, int64 (n,)."""
        return self._hashes[self._offsets[self._place[rows]] + chosen]

    def text(self, row: int, chosen: int) -> str:
        """One caption of a row."""
        return self._texts[int(self._offsets[self._place[row]]) + chosen].as_py()

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for begin in range(0, len(self._place), CHUNK):
            rows = np.arange(begin, min(begin + CHUNK, len(self._place)))
            counts = self.num_captions(rows)
            digest.update(counts.tobytes())
            digest.update(self._hashes[spans(self._offsets[self._place[rows]], counts)].tobytes())
        return digest.hexdigest()[:16]


def _take(column: Any, rows: Ints) -> list[Any]:
    return column.take(pa.array(rows)).to_pylist()


def _captions(value: object, of: str, place: Callable[[int], str], row: int) -> list[str]:
    """The captions of a row of the table, none where there is no text."""
    try:
        return clean_captions(value)[0]
    except BadSample as error:
        if error.reason in (Reason.EMPTY_CAPTION, Reason.MISSING_CAPTION):
            return []
        raise DataError(f"{of}: {place(int(row))}: {error}; shorten or remove it") from error
