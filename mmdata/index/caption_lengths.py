"""Lengths of captions in tokens: those of the index, or counted again if the index was made with another tokenizer."""

from __future__ import annotations

import hashlib
import logging
import shlex
from collections.abc import Sequence
from typing import Literal, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from mmdata.index.index import Index
from mmdata.index.store import ShardStore
from mmdata.tars.captions import filled

logger = logging.getLogger("mmdata")

CaptionTokens = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Tokens of all captions of an index: offsets (rows + 1,) and counts, special tokens included, untruncated."""

CHUNK_ROWS = 4096

_counted: WeakValueDictionary[tuple[str, str], NDArray[np.int32]] = WeakValueDictionary()
"""Counts of a plan that is still in use, by index and tokenizer: a run and its evaluation may read the same shards."""


class CountsTokens(Protocol):
    """Counts the tokens of captions, as `mmdata.text.tokenizer.Tokenizer` does."""

    @property
    def name(self) -> str:
        """Its folder or name, for messages; "" if there is none."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal counts."""
        ...

    def count(self, captions: Sequence[str]) -> Sequence[int]:
        """Number of tokens of each caption, special tokens included."""
        ...


class TemplatedCounts:
    """Counts the tokens of captions in a template, which are not those of the caption and of the template together.

    Args:
        tokenizer: counts them.
        template: with {} where the caption stands.
    """

    def __init__(self, tokenizer: CountsTokens, template: str) -> None:
        self._tokenizer = tokenizer
        self.template = template
        self.name = tokenizer.name
        self.fingerprint = hashlib.sha256(f"{tokenizer.fingerprint} {template}".encode()).hexdigest()[:16]

    def count(self, captions: Sequence[str]) -> Sequence[int]:
        """Number of tokens of each caption in the template, special tokens included."""
        return self._tokenizer.count([filled(self.template, caption) for caption in captions])


def counts_of(tokenizer: CountsTokens, template: str | None) -> CountsTokens:
    """What counts the tokens of captions in a template; None: of captions as they are."""
    return tokenizer if template is None else TemplatedCounts(tokenizer, template)


def caption_lengths(index: Index, tokenizer: CountsTokens) -> Literal["index"] | CaptionTokens:
    """ "index" if this tokenizer counted the captions in the index; else the lengths, counted now.

    Raises:
        DataError: a caption is not the one that was indexed: a plan must not depend on one rank's copy of the shards.
            Not found out if a plan of the same index that is still in use has the lengths already.
    """
    if index.tokenizer == tokenizer.fingerprint:
        return "index"
    offsets, _ = index.lists("caption_hash")
    key = (index.fingerprint, tokenizer.fingerprint)
    if (known := _counted.get(key)) is not None:
        return offsets, known
    # If one of several folders lacks the lengths, the captions of all folders are counted.
    counter = f"tokenizer '{tokenizer.name}'" if tokenizer.name else "this tokenizer"
    options = tokenizer.name or "…"
    if isinstance(tokenizer, TemplatedCounts):
        counter += f" and caption_template '{tokenizer.template}'"
        options += f" --caption-template {shlex.quote(tokenizer.template)}"
    for part in index.manifests:
        if part.tokenizer != tokenizer.fingerprint:
            logger.warning(
                "%d rows of '%s': caption lengths are not in the index for %s and are counted now; %s",
                part.rows,
                part.folder,
                counter,
                _how_to_store(part.folder, options, has_others=part.tokenizer is not None),
            )
    store = ShardStore(index)
    counted = [np.empty(0, np.int32)]
    for start in range(0, len(index), CHUNK_ROWS):
        found = store.captions(np.arange(start, min(start + CHUNK_ROWS, len(index))))
        counted.append(np.asarray(tokenizer.count([caption for captions in found for caption in captions]), np.int32))
    counts = np.concatenate(counted)
    counts.setflags(write=False)  # several plans share it
    _counted[key] = counts
    return offsets, counts


def _how_to_store(folder: object, tokenizer: str, *, has_others: bool) -> str:
    """How to get the lengths into an index; `has_others`: it holds those of another tokenizer or template."""
    if has_others:
        return (
            f"`mmdata index {folder} --tokenizer {tokenizer} --out FOLDER` makes an index that holds them: then set "
            "data.shards to FOLDER"
        )
    return f"`mmdata index {folder} --tokenizer {tokenizer}` adds them"
