"""Captions in a column of a joined table: a text, or a list of texts, for each row that the table has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.hashing import hash64
from mmdata.index.caption_lengths import CountsTokens
from mmdata.index.ragged import offsets_of, spans
from mmdata.tables.stored import Arrays, Keep, make_anew
from mmdata.tars.captions import clean_captions

CHUNK = 2**14
"""Rows whose texts are cleaned, or counted, at a time."""

Ints = NDArray[np.int64]


class TableCaptions:
    """The captions that a column has for the rows of an index; null and empty texts are none.

    They are cleaned as those of the shards are. Only those of the index's rows are looked at, and held in memory. Their
    numbers, hashes and lengths are made once, and kept.

    Args:
        column: an Arrow array (n,).
        table_rows: int64 (num_rows,), the row of the column for each row of the index, -1 where there is none.
        place: file and row of a row of the table, for messages.
        of: name of the setting, for messages.
        keep: keeps what is made of the captions.

    `len` is the number of captions of all rows of the table that the index has.

    Attributes:
        fingerprint: equal for equal captions of the index's rows, in whatever order the table has them.

    Raises:
        ConfigError: the column holds neither texts nor lists of them.
        DataError: a text is no caption, such as one of 65,537 characters.
    """

    def __init__(
        self, column: Any, table_rows: Ints, *, place: Callable[[int], str], of: str, keep: Keep = make_anew
    ) -> None:
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        of_value = kind.value_type if is_list else kind
        if not (pa.types.is_string(of_value) or pa.types.is_large_string(of_value)):
            raise ConfigError(f"{of}: values of type {kind}; captions are a text, or a list of texts, a row")
        self._of, self._place_of_row, self._keep = of, place, keep
        is_used = np.zeros(len(column), np.bool_)
        is_used[table_rows[table_rows >= 0]] = True
        self._used = np.flatnonzero(is_used)
        # Of more than 2 GB in all, too.
        large = pa.large_list(pa.large_string()) if is_list else pa.large_string()
        self._values: Any = column.cast(large).take(pa.array(self._used)).combine_chunks()
        # Place of each row of the index among the used rows; the last place, without captions, is for all others.
        self._place = np.where(table_rows < 0, len(self._used), (np.cumsum(is_used) - 1)[table_rows])
        found = keep("captions", self._make)
        self._hashes = found["hashes"]
        self._offsets = offsets_of(found["counts"].astype(np.int64))
        self._tokens: NDArray[np.int32] | None = None
        self.fingerprint = found["fingerprint"].tobytes().decode()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_captions(self, rows: Ints) -> Ints:
        """How many captions each of n rows of the index has, int64 (n,)."""
        places = self._place[rows]
        return self._offsets[places + 1] - self._offsets[places]

    def count(self, tokenizer: CountsTokens) -> None:
        """Know the tokens of all captions."""

        def make() -> Arrays:
            chunks = (tokenizer.count([text for _, texts in part for text in texts]) for part in self._parts())
            return {"tokens": np.concatenate([np.empty(0, np.int32), *(np.asarray(one, np.int32) for one in chunks)])}

        self._tokens = self._keep(f"tokens-{tokenizer.fingerprint[:16]}", make)["tokens"]

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
        return clean_captions(self._values[int(self._place[row])].as_py())[0][chosen]

    def _parts(self) -> Iterator[list[tuple[int, list[str]]]]:
        """The captions of all used rows, some rows at a time: (row of the table, its captions)."""
        for begin in range(0, len(self._used), CHUNK):
            rows = self._used[begin : begin + CHUNK].tolist()
            values = self._values.slice(begin, CHUNK).to_pylist()
            yield [(row, self._captions(value, row)) for row, value in zip(rows, values, strict=True)]

    def _make(self) -> Arrays:
        """How many captions each used row has, int32, with a 0 for rows without; their hashes; and the fingerprint."""
        counts = [np.empty(0, np.int32)]
        hashes = [np.empty(0, np.int64)]
        for part in self._parts():
            counts.append(np.array([len(texts) for _, texts in part], np.int32))
            hashes.append(np.array([hash64(text.encode()) for _, texts in part for text in texts], np.int64))
        of_rows, of_texts = np.concatenate([*counts, np.zeros(1, np.int32)]), np.concatenate(hashes)
        fingerprint = self._fingerprint(offsets_of(of_rows.astype(np.int64)), of_texts)
        return {"counts": of_rows, "hashes": of_texts, "fingerprint": np.frombuffer(fingerprint.encode(), np.uint8)}

    def _fingerprint(self, offsets: Ints, hashes: Ints) -> str:
        digest = hashlib.sha256()
        for begin in range(0, len(self._place), CHUNK):
            places = self._place[begin : begin + CHUNK]
            counts = offsets[places + 1] - offsets[places]
            digest.update(counts.tobytes())
            digest.update(hashes[spans(offsets[places], counts)].tobytes())
        return digest.hexdigest()[:16]

    def _captions(self, value: object, row: int) -> list[str]:
        """The captions of a row of the table, none where there is no text."""
        try:
            return clean_captions(value)[0]
        except BadSample as error:
            if error.reason in (Reason.EMPTY_CAPTION, Reason.MISSING_CAPTION):
                return []
            raise DataError(f"{self._of}: {self._place_of_row(row)}: {error}; shorten or remove it") from error
