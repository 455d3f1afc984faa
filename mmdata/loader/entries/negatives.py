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
        path: of a file whose keys are keys of the index.
        index: of the rows.
        tokenizer: counts all captions once, in their template.
        template: around each caption, as around those of the rows.

    Attributes:
        length: tokens of the longest caption: the width in every batch.
        fingerprint: equal for equal files.

    Raises:
        ConfigError: the file does not exist, or the corpus does not have its keys.
        DataError: the file cannot be read, a key occurs twice, or a caption is empty.
    """

    def __init__(self, path: Path, index: Index, tokenizer: Tokenizer, *, template: str | None = None) -> None:
        self._tokenizer, self._template = tokenizer, template
        keys, lists, self.fingerprint = _read(path)
        rows = _find_rows(path, keys, index.keys(np.arange(len(index))))
        lists = [_cleaned(path, key, texts) for key, texts in zip(keys, lists, strict=True)]
        texts = [text for captions in lists for text in captions]
        self._texts = pa.array(texts, pa.large_string())  # null where one is missing
        self._count, self._start = np.zeros((2, len(index)), np.int64)
        self._count[rows] = counts = [len(captions) for captions in lists]
        self._start[rows] = [0, *accumulate(counts)][:-1]
        found = self._texts.drop_null()
        if not len(found):
            raise DataError(f"negative captions '{path}': the file has no caption; {REMEDY}")
        counted = counts_of(tokenizer, template)
        chunks = (found.slice(begin, CHUNK).to_pylist() for begin in range(0, len(found), CHUNK))
        self.length = min(max(max(counted.count(chunk)) for chunk in chunks), tokenizer.max_length)

    def entries(self, rows: NDArray[np.int64], passes: NDArray[np.int64]) -> dict[str, Tensor]:
        """The entries of a batch; see `Batch`. `negative_valid` says which rows have a negative caption.

        It is chosen as the row's own caption is: where a row has as many of both, the i-th goes with the i-th.

        Args:
            rows: int64 (B,), -1 where a row is padding.
            passes: int64 (B,), of the rows.
        """
        count = np.where(rows >= 0, self._count[rows], 0)
        chosen = self._start[rows] + choose_captions(rows, np.maximum(count, 1), passes)
        texts = self._texts.take(pa.array(chosen, mask=count == 0)).to_pylist()
        valid = np.array([text is not None for text in texts], bool)
        found = [text for text in texts if text is not None]
        input_ids = np.full((len(rows), self.length), self._tokenizer.pad_id, np.int64)
        attention_mask = np.zeros((len(rows), self.length), np.int64)
        filled_in = [filled(self._template, text) for text in found]
        input_ids[valid], attention_mask[valid] = self._tokenizer.encode(filled_in, self.length)
        attention_mask[:, 0] = 1  # attention over no token is NaN
        hashes = np.zeros(len(rows), np.int64)
        hashes[valid] = [hash64(text.encode()) for text in found]
        entries = {"negative_input_ids": input_ids, "negative_attention_mask": attention_mask, "negative_valid": valid}
        entries["negative_caption_hash"] = hashes
        return {name: torch.from_numpy(values) for name, values in entries.items()}


def _read(path: Path) -> tuple[list[str], list[list[str | None] | None], str]:
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
    if unknown := [key for key in keys if key not in row_of]:
        raise ConfigError(
            f"data.negative_captions '{path}': {len(unknown):,} of {len(keys):,} keys are not in data.shards, "
            f"the first '{unknown[0]}': the file is of another corpus, or the rows were left out by the conversion; "
            "make it of the keys of these shards"
        )
    for listed, where in ((corpus, "data.shards"), (keys, "the file")):
        seen = set[str]()
        if (twice := next((key for key in listed if key in seen or seen.add(key)), None)) is not None:
            raise DataError(
                f"negative captions '{path}': key '{twice}' occurs twice in {where}: give a row's captions in one list"
            )
    return [row_of[key] for key in keys]


def _cleaned(path: Path, key: str, texts: list[str | None] | None) -> list[str | None]:
    """Clean captions as those of the shards are cleaned, so that equal captions have equal hashes."""
    try:
        return [None if text is None else clean_caption(text) for text in texts or []]
    except BadSample as error:
        raise DataError(f"negative captions '{path}', key '{key}': {error}; remove it, or put null") from error
