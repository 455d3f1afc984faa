"""Negative captions from a file: negatives of the images, added to a batch with the rows' own captions.

Which one a row has follows from the row and its pass alone, as its own caption does. Reads no image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mmdata.errors import BadSample, ConfigError, DataError
from mmdata.hashing import hash64
from mmdata.plan import choose_captions
from mmdata.safe_read import read_regular
from mmdata.shards import Index, clean_caption
from mmdata.transform.text import Tokenizer

REMEDY = "expected Parquet with the columns key (string) and captions (list of strings, null where one is missing)"
CHUNK = 4096


@dataclass(frozen=True)
class NegativeTexts:
    """Further captions of the n rows of a step.

    Attributes:
        texts: n captions, None for a row without one.
        length: tokens that each takes up in the batch; all fit.
    """

    texts: Sequence[str | None]
    length: int

    def there(self) -> NDArray[np.bool_]:
        """Which rows have one, bool (n,)."""
        return np.array([text is not None for text in self.texts], bool)

    def encode(
        self, tokenizer: Tokenizer, places: NDArray[np.int64], rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """input_ids and attention_mask at the rows' places in a batch of so many, int64 (rows, length) each.

        Every row has at least one unmasked position.
        """
        input_ids = np.full((rows, self.length), tokenizer.pad_id, np.int64)
        attention_mask = np.zeros((rows, self.length), np.int64)
        there = places[self.there()]
        texts = [text for text in self.texts if text is not None]
        input_ids[there], attention_mask[there] = tokenizer.encode(texts, self.length)
        attention_mask[:, 0] = 1
        return input_ids, attention_mask

    def hashes(self) -> NDArray[np.int64]:
        """int64 (n,), as those of captions; 0 where there is none."""
        return np.array([0 if text is None else hash64(text.encode()) for text in self.texts], np.int64)


class NegativeCaptions:
    """The negative captions of a corpus's rows.

    Args:
        of_rows: a list for each row that has some, by its number; None in it stands for none.
        num_rows: rows of the corpus.
        length: tokens of the longest, as the batches are wide in every step.
        fingerprint: equal for equal files.
    """

    def __init__(self, of_rows: dict[int, list[str | None]], num_rows: int, *, length: int, fingerprint: str) -> None:
        self.length = length
        self.fingerprint = fingerprint
        self._count = np.zeros(num_rows, np.int64)
        self._count[list(of_rows)] = [len(captions) for captions in of_rows.values()]
        self._start = np.zeros(num_rows, np.int64)
        self._start[list(of_rows)] = [0, *accumulate(map(len, of_rows.values()))][:-1]
        self._texts = pa.array([text for captions in of_rows.values() for text in captions], pa.large_string())

    @classmethod
    def read(cls, path: Path, index: Index, tokenizer: Tokenizer) -> NegativeCaptions:
        """Those of a file; each key is one of the index. All captions are counted by the tokenizer, once.

        Raises:
            ConfigError: no such file, or keys that the corpus does not have.
            DataError: the file cannot be read, a key stands twice, or a caption is empty.
        """
        keys, lists, fingerprint = _read(path)
        rows = _find_rows(path, keys, index.keys(np.arange(len(index))))
        of_rows = {row: _cleaned(path, key, texts) for row, key, texts in zip(rows, keys, lists, strict=True) if texts}
        texts = [text for captions in of_rows.values() for text in captions if text is not None]
        if not texts:
            raise DataError(f"negative captions '{path}': there is no caption in it; {REMEDY}")
        longest = max(max(tokenizer.count(texts[i : i + CHUNK])) for i in range(0, len(texts), CHUNK))
        return cls(of_rows, len(index), length=min(longest, tokenizer.max_length), fingerprint=fingerprint)

    def choose(self, rows: NDArray[np.int64], passes: NDArray[np.int64]) -> NegativeTexts:
        """The negative caption of each of n rows, int64 (n,), in its pass.

        Chosen as the row's own caption is: where a row has as many of both, the i-th goes with the i-th.
        """
        count = self._count[rows]
        chosen = self._start[rows] + choose_captions(rows, np.maximum(count, 1), passes)
        there = count > 0
        found: list[str | None] = self._texts.take(pa.array(np.where(there, chosen, 0))).to_pylist()
        texts = [text if some else None for text, some in zip(found, there.tolist(), strict=True)]
        return NegativeTexts(texts, self.length)


def _read(path: Path) -> tuple[list[str], list[list[str | None]], str]:
    try:
        content = read_regular(path, "negative captions")
        table = pq.read_table(pa.BufferReader(content), columns=["key", "captions"])
        table = table.cast(pa.schema({"key": pa.string(), "captions": pa.list_(pa.string())}))
    except FileNotFoundError:
        raise ConfigError(f"data.negative_captions '{path}': no such file; {REMEDY}") from None
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"negative captions '{path}': cannot be read: {error}; {REMEDY}") from error
    keys, lists = table.column("key").to_pylist(), table.column("captions").to_pylist()
    return keys, lists, hashlib.sha256(content).hexdigest()[:16]


def _find_rows(path: Path, keys: list[str], corpus: list[str]) -> list[int]:
    """The row of each key."""
    row_of = {key: row for row, key in enumerate(corpus)}
    unknown = [key for key in keys if key not in row_of]
    if unknown:
        raise ConfigError(
            f"data.negative_captions '{path}': {len(unknown):,} of {len(keys):,} keys are not in data.shards, "
            f"the first '{unknown[0]}': the file is of another corpus, or the rows were left out by the conversion; "
            "make it of the keys of these shards"
        )
    if len(row_of) < len(corpus) or len(set(keys)) < len(keys):
        twice, where = (corpus, "data.shards") if len(row_of) < len(corpus) else (keys, "the file")
        seen: set[str] = set()
        key = next(key for key in twice if key in seen or seen.add(key))
        raise DataError(
            f"negative captions '{path}': key '{key}' stands twice in {where}: give all of a row in one list"
        )
    return [row_of[key] for key in keys]


def _cleaned(path: Path, key: str, texts: list[str | None]) -> list[str | None]:
    """As the captions of the shards are cleaned, so that equal ones have equal hashes."""
    try:
        return [None if text is None else clean_caption(text) for text in texts]
    except BadSample as error:
        raise DataError(f"negative captions '{path}', key '{key}': {error}; leave it out, or put null") from error
