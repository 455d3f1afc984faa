"""Negative captions from a file: wrong captions of the images, added to a batch with the rows' own captions.

The choice among a row's negative captions depends on the row and its pass alone, as that of its own caption does.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.errors import BadSample, ConfigError, DataError
from mmdata.hashing import hash64
from mmdata.index import Index
from mmdata.index.caption_lengths import counts_of
from mmdata.plan import choose_captions
from mmdata.safe_read import read_regular
from mmdata.tars import clean_caption
from mmdata.tars.captions import filled
from mmdata.text.tokenizer import Tokenizer

REMEDY = "expected Parquet with the columns key (string) and captions (list of strings, null where one is missing)"
CHUNK = 4096


class NegativeCaptions:
    """The negative captions of a corpus's rows.

    Args:
        of_rows: row number to the captions of that row; None where one is missing.
        num_rows: rows of the corpus.
        length: tokens of the longest caption: the width in every batch.
        fingerprint: equal for equal files.
        template: around each caption, as around those of the rows.
    """

    def __init__(
        self,
        of_rows: dict[int, list[str | None]],
        num_rows: int,
        *,
        length: int,
        fingerprint: str,
        template: str | None = None,
    ) -> None:
        self.length = length
        self._template = template
        self.fingerprint = fingerprint
        self._count = np.zeros(num_rows, np.int64)
        self._count[list(of_rows)] = [len(captions) for captions in of_rows.values()]
        self._start = np.zeros(num_rows, np.int64)
        self._start[list(of_rows)] = [0, *accumulate(map(len, of_rows.values()))][:-1]
        self._texts = pa.array([text for captions in of_rows.values() for text in captions], pa.large_string())

    @classmethod
    def read(cls, path: Path, index: Index, tokenizer: Tokenizer, *, template: str | None = None) -> NegativeCaptions:
        """Read a file whose keys are keys of the index. The tokenizer counts all captions once, in their template.

        Raises:
            ConfigError: the file does not exist, or the corpus does not have its keys.
            DataError: the file cannot be read, a key occurs twice, or a caption is empty.
        """
        keys, lists, fingerprint = _read(path)
        rows = _find_rows(path, keys, index.keys(np.arange(len(index))))
        of_rows = {row: _cleaned(path, key, texts) for row, key, texts in zip(rows, keys, lists, strict=True) if texts}
        texts = [text for captions in of_rows.values() for text in captions if text is not None]
        if not texts:
            raise DataError(f"negative captions '{path}': the file has no caption; {REMEDY}")
        counts = counts_of(tokenizer, template)
        longest = max(max(counts.count(texts[i : i + CHUNK])) for i in range(0, len(texts), CHUNK))
        length = min(longest, tokenizer.max_length)
        return cls(of_rows, len(index), length=length, fingerprint=fingerprint, template=template)

    def entries(
        self, tokenizer: Tokenizer, rows: NDArray[np.int64], passes: NDArray[np.int64], *, add_hashes: bool
    ) -> dict[str, Tensor]:
        """The entries of a batch; see `Batch`. `negative_valid` says which rows have a negative caption.

        It is chosen as the row's own caption is: where a row has as many of both, the i-th goes with the i-th.

        Args:
            tokenizer: tokenizes all captions in one call.
            rows: int64 (B,), -1 where a row is padding.
            passes: int64 (B,), of the rows.
            add_hashes: add their hashes, 0 where there is none.
        """
        places = np.flatnonzero(rows >= 0)  # (n,)
        texts = self._choose(rows[places], passes[places])
        present = places[[text is not None for text in texts]]
        found = [text for text in texts if text is not None]
        input_ids = np.full((len(rows), self.length), tokenizer.pad_id, np.int64)
        attention_mask = np.zeros((len(rows), self.length), np.int64)
        input_ids[present], attention_mask[present] = tokenizer.encode(
            [filled(self._template, text) for text in found], self.length
        )
        attention_mask[:, 0] = 1  # attention over no token is NaN
        valid = np.zeros(len(rows), bool)
        valid[present] = True
        entries = {"negative_input_ids": input_ids, "negative_attention_mask": attention_mask, "negative_valid": valid}
        if add_hashes:
            entries["negative_caption_hash"] = np.zeros(len(rows), np.int64)
            entries["negative_caption_hash"][present] = [hash64(text.encode()) for text in found]
        return {name: torch.from_numpy(values) for name, values in entries.items()}

    def _choose(self, rows: NDArray[np.int64], passes: NDArray[np.int64]) -> list[str | None]:
        """The negative caption of each of n rows, int64 (n,), in its pass; None where it has none."""
        count = self._count[rows]  # 0 for a row without any: it chooses text 0, which is then replaced by None
        chosen = self._start[rows] + choose_captions(rows, np.maximum(count, 1), passes)
        present = count > 0
        found: list[str | None] = self._texts.take(pa.array(np.where(present, chosen, 0))).to_pylist()
        return [text if some else None for text, some in zip(found, present.tolist(), strict=True)]


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
    """The row of each key of the file in the corpus."""
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
            f"negative captions '{path}': key '{key}' occurs twice in {where}: give a row's captions in one list"
        )
    return [row_of[key] for key in keys]


def _cleaned(path: Path, key: str, texts: list[str | None]) -> list[str | None]:
    """Clean captions as those of the shards are cleaned, so that equal captions have equal hashes."""
    try:
        return [None if text is None else clean_caption(text) for text in texts]
    except BadSample as error:
        raise DataError(f"negative captions '{path}', key '{key}': {error}; remove it, or put null") from error
