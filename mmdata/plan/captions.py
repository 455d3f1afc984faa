"""Which caption a row has in a pass: one of its own in turn, or one of a source that is drawn by probability.

It depends on (seed, row, pass) alone, so it is the same in each process, on any number of ranks, and after a resume.
`caption_sources` opens the sources that the settings name, and `check_rows` looks for rows without any caption.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mmdata.config import DataConfig
from mmdata.errors import ConfigError, meant
from mmdata.index import Index
from mmdata.index.caption_lengths import CaptionTokens, CountsTokens, caption_lengths
from mmdata.index.columns import spans
from mmdata.seeding import mix
from mmdata.tables.joined import JOINED, Joined
from mmdata.tables.selection import Selection, row_chunks

logger = logging.getLogger("mmdata")

Ints = NDArray[np.int64]

SHARDS = "shards"
"""Name of the source of captions that is the captions in the shards."""


def choose_captions(rows: Ints, num_captions: Ints, epoch: int | Ints) -> Ints:
    """Choose one of its captions for each row in an epoch.

    A row has its captions in turn, epoch by epoch, and starts at a caption that differs from row to row.

    Args:
        rows: int64 (n,).
        num_captions: int64 (n,), at least 1 each.
        epoch: from 0; or int64 (n,), if the rows are in different passes over their datasets.

    Returns:
        int64 (n,), the position of the caption among those of its row.
    """
    # `mix` gives each row its own start; without it all rows of equal numbers of captions would change in step.
    return ((mix(rows) % num_captions.astype(np.uint64)).astype(np.int64) + epoch) % num_captions


class CaptionSource(Protocol):
    """A list of captions for each row of an index; `chosen` are positions in these lists.

    A source whose lengths the histograms of the index tell has `in_histograms`, and one that has at most one caption
    for each row has `one_each`; see `ShardCaptions`.
    """

    @property
    def fingerprint(self) -> str:
        """Equal for sources with equal texts."""
        ...

    def num_captions(self, rows: Ints) -> Ints:
        """How many captions each of n rows has, int64 (n,)."""
        ...

    def count(self, tokenizer: CountsTokens) -> None:
        """Know the tokens of the captions."""
        ...

    def tokens(self, rows: Ints, chosen: Ints) -> Ints:
        """Tokens of one caption of each of n rows, int64 (n,); 1 before they are counted."""
        ...

    def hashes(self, rows: Ints, chosen: Ints) -> Ints:
        """Hashes of one caption of each of n rows, int64 (n,)."""
        ...


class ShardCaptions:
    """The captions in the shards.

    Args:
        index: of the shards.
        tokens: of the captions: those of the index, or counted anew; None: not counted.

    Attributes:
        one_each: every row has one caption (or, in a corpus of labels, none).
    """

    fingerprint = "shards"

    def __init__(self, index: Index, tokens: Literal["index"] | CaptionTokens | None = None) -> None:
        self._index, self._tokens = index, tokens
        self.one_each = all(part.captions in (part.rows, 0) for part in index.manifests)
        self._all_have_one = all(part.captions == part.rows for part in index.manifests)

    @property
    def in_histograms(self) -> Literal["tokens", "constant"] | None:
        """What the histograms of the index tell: the tokens, or nothing more than that all are equally long."""
        if self._tokens is None:
            return "constant"
        return "tokens" if self._tokens == "index" else None

    def num_captions(self, rows: Ints) -> Ints:
        """How many captions each of n rows has, int64 (n,)."""
        if self._all_have_one:
            return np.ones(len(rows), np.int64)
        return np.diff(self._index.take_lists(rows, "caption_hash")[0])

    def count(self, tokenizer: CountsTokens) -> None:
        """Know the tokens of the captions."""
        self._tokens = caption_lengths(self._index, tokenizer)

    def tokens(self, rows: Ints, chosen: Ints) -> Ints:
        """Tokens of one caption of each of n rows, int64 (n,); 1 before they are counted."""
        if self._tokens is None:
            return np.ones(len(rows), np.int64)
        if isinstance(self._tokens, tuple):
            offsets, counts = self._tokens
            return counts[offsets[rows] + chosen].astype(np.int64)
        offsets, counts = self._index.take_lists(rows, "caption_tokens")
        return counts[offsets[:-1] + chosen].astype(np.int64)

    def hashes(self, rows: Ints, chosen: Ints) -> Ints:
        """Hashes of one caption of each of n rows, int64 (n,)."""
        offsets, hashes = self._index.take_lists(rows, "caption_hash")
        return hashes[offsets[:-1] + chosen]


class NoTexts(ShardCaptions):
    """Batches without texts: each row has one caption of no tokens, which is equal to another as its image is."""

    fingerprint = "no texts"

    def num_captions(self, rows: Ints) -> Ints:
        """1 for each of n rows, int64 (n,)."""
        return np.ones(len(rows), np.int64)

    def count(self, tokenizer: CountsTokens) -> None:
        """There is nothing to count."""

    def tokens(self, rows: Ints, chosen: Ints) -> Ints:
        """0 for each of n rows, int64 (n,)."""
        return np.zeros(len(rows), np.int64)

    def hashes(self, rows: Ints, chosen: Ints) -> Ints:
        """Hashes of the images of n rows, int64 (n,)."""
        return self._index.take(rows, ["image_hash"])["image_hash"]


class Chosen(NamedTuple):
    """The captions of n rows: the number of the source, -1 where a row has no caption, and the position in its list."""

    source: Ints
    position: Ints


class CaptionSources:
    """Several sources of captions, of which each row draws one in each pass.

    A row that a source has no caption for draws from the others, in proportion to their probabilities. A source of
    probability 0 is for the rows that the others have nothing for.

    Args:
        sources: by name.
        probabilities: of the sources; their sum is 1.
        seed: of the draws.

    Attributes:
        name: for states and messages, with a digest of probabilities and texts.

    Example:
        With {"shards": 0.25, "join:recap": 0.75} a row has a caption of the table in three of four passes, on average.
    """

    def __init__(self, sources: Mapping[str, CaptionSource], probabilities: Mapping[str, float], *, seed: int) -> None:
        self.sources = list(sources.values())
        self.names = list(sources)
        self._probabilities = np.array([probabilities[name] for name in sources], np.float64)[:, None]  # (S, 1)
        # Other numbers than those that `RowWeights` draws of the same seed.
        self._seed = mix(mix(np.array([seed])).astype(np.int64))
        digest = hashlib.sha256()
        for name, source in sources.items():
            digest.update(f"{float(probabilities[name])!r} {source.fingerprint}\n".encode())
        self._digest = digest.hexdigest()[:16]
        listed = ", ".join(f"{name} {probabilities[name]:g}" for name in sources)
        self.name = f"data.captions {listed} ({self._digest})"
        self._counted_by = ""

    @classmethod
    def in_turn(cls, source: CaptionSource) -> Self:
        """The captions of one source, of which each row has one after the other."""
        return cls({source.fingerprint: source}, {source.fingerprint: 1.0}, seed=0)

    @property
    def fingerprint(self) -> str:
        """Equal for equal texts and probabilities whose tokens were counted alike."""
        known = self.in_histograms != "constant"
        return hashlib.sha256(f"{self._digest} {self._counted_by} {known}".encode()).hexdigest()[:16]

    @property
    def in_histograms(self) -> Literal["tokens", "constant"] | None:
        """What the histograms of the index tell of the lengths; see `ShardCaptions`."""
        return getattr(self.sources[0], "in_histograms", None) if len(self.sources) == 1 else None

    @property
    def one_each(self) -> bool:
        """Whether every row has the same caption in each pass."""
        return len(self.sources) == 1 and getattr(self.sources[0], "one_each", False)

    @property
    def has_texts(self) -> bool:
        """Whether batches have texts."""
        return not isinstance(self.sources[0], NoTexts)

    def count(self, tokenizer: CountsTokens) -> None:
        """Know the tokens of all captions; before, each counts as one token long."""
        self._counted_by = tokenizer.fingerprint
        for source in self.sources:
            source.count(tokenizer)

    def num_captions(self, rows: Ints) -> Ints:
        """How many captions each source has for n rows, int64 (S, n)."""
        return np.stack([source.num_captions(rows) for source in self.sources])

    def choose(self, rows: Ints, passes: int | Ints) -> Chosen:
        """Source and position of the captions of n rows, int64 (n,), in a pass or a pass each."""
        numbers = self.num_captions(rows)
        source = self._draw(numbers, rows, passes) if len(self.sources) > 1 else np.zeros(len(rows), np.int64)
        number = numbers[source, np.arange(len(rows))]
        return Chosen(np.where(number > 0, source, -1), choose_captions(rows, np.maximum(number, 1), passes))

    def _draw(self, numbers: Ints, rows: Ints, passes: int | Ints) -> Ints:
        """The source of each of n rows, int64 (n,), by how many captions each source has for them, int64 (S, n)."""
        weights = np.where(numbers > 0, self._probabilities, 0.0)  # (S, n)
        weights = np.where(weights.any(axis=0), weights, numbers > 0)
        bounds = np.cumsum(weights, axis=0)
        # Of 32 bits, so that the product never rounds up to the last bound.
        uniform = (self._random(rows, passes) >> np.uint64(32)) * 2.0**-32
        return np.minimum((uniform * bounds[-1] >= bounds).sum(axis=0), len(bounds) - 1)

    def tokens(self, rows: Ints, passes: int | Ints) -> Ints:
        """Tokens of the captions of n rows, int64 (n,); 0 where a row has none."""
        return self._of_chosen("tokens", rows, passes)

    def hashes(self, rows: Ints, passes: int | Ints) -> Ints:
        """Hashes of the captions of n rows, int64 (n,); 0 where a row has none."""
        return self._of_chosen("hashes", rows, passes)

    def _of_chosen(self, what: Literal["tokens", "hashes"], rows: Ints, passes: int | Ints) -> Ints:
        chosen, found = self.choose(rows, passes), np.zeros(len(rows), np.int64)
        for number, source in enumerate(self.sources):
            mine = chosen.source == number
            if mine.all():
                return getattr(source, what)(rows, chosen.position)
            found[mine] = getattr(source, what)(rows[mine], chosen.position[mine])
        return found

    def all_tokens(self, rows: Ints) -> Iterator[tuple[float, Ints, Ints]]:
        """Each caption that n rows may have, source by source.

        Yields:
            The probability of the source; for each of its T captions of these rows the position of the row among them,
            and its tokens, int64 (T,) each.
        """
        for source, probability in zip(self.sources, self._probabilities[:, 0].tolist(), strict=True):
            numbers = source.num_captions(rows)
            of_rows = np.repeat(np.arange(len(rows)), numbers)
            yield probability, of_rows, source.tokens(rows[of_rows], spans(np.zeros(len(rows), np.int64), numbers))

    def _random(self, rows: Ints, passes: int | Ints) -> NDArray[np.uint64]:
        """A number for each row in its pass."""
        of_passes = mix(np.asarray(passes, np.int64).reshape(-1)) ^ self._seed
        return mix((mix((mix(rows) ^ self._seed).astype(np.int64)) + of_passes).astype(np.int64))


def caption_sources(data: DataConfig, index: Index, joined: Joined) -> CaptionSources | None:
    """The sources that a section `data` names; None: the captions of the shards in turn.

    Args:
        data: settings.
        index: of the shards.
        joined: what `data.join` names.

    Raises:
        ConfigError: no such source (the nearest one is named), a column without texts, or shards without captions.
        DataError: a table is damaged, or holds a text that is no caption.
    """
    if isinstance(data.captions, str):
        return None
    of = "data.captions"
    tables = (JOINED + name for name in joined.types)
    known = [SHARDS, *tables, *(f"{JOINED}{name}:MEMBER" for name in joined.shards)]
    found: dict[str, CaptionSource] = {}
    for name in data.captions:
        column = name.removeprefix(JOINED)
        tars, _, member = column.partition(":")
        if name == SHARDS:
            check_captions(
                index, of, f"leave '{SHARDS}' out of {of}, and name columns of joined tables ({JOINED}COLUMN)"
            )
            found[name] = ShardCaptions(index)
        elif name.startswith(JOINED) and member and tars in joined.shards:
            found[name] = joined.shards[tars].captions(member, of=f"{of} {name}")
        elif name in known:
            found[name] = joined.table_of(column).captions(column, of=f"{of} {name}")
        else:
            raise ConfigError(f"{of}: no source '{name}'{meant(name, known)}; there are {', '.join(known)}")
    return CaptionSources(found, data.captions, seed=data.seed)


def check_captions(index: Index, of: str, remedy: str) -> None:
    """Raise a ConfigError if a folder of the index holds labels only; `of` is the setting that needs captions."""
    for part in index.manifests:
        if not part.has_captions:
            raise ConfigError(f"{of}: shards '{part.folder}' hold labels and no captions: {remedy}")


def check_rows(captions: CaptionSources, index: Index, selection: Selection | None, num_rows: int) -> None:
    """Warn of rows, of those selected or of the first `num_rows`, that a source has no caption for.

    Raises:
        ConfigError: a row has no caption in any source; names the first.
    """
    num_rows = num_rows if selection is None else len(selection)
    lacking = np.zeros(len(captions.names), np.int64)
    without, first = 0, -1
    for rows in row_chunks(selection, num_rows):
        lacks = captions.num_captions(rows) == 0  # (S, n)
        lacking += lacks.sum(axis=1)
        none = lacks.all(axis=0)
        if not without and none.any():
            first = int(rows[none.argmax()])
        without += int(none.sum())
    if without:
        key = index.keys(np.array([first]))[0]
        raise ConfigError(
            f"data.captions: {without:,} of {num_rows:,} rows have no caption in {', '.join(captions.names)}, such as "
            f"row {first:,} (key '{key}'): leave them out (data.select='COLUMN is not None', or, where a table does "
            "not have them, missing: mask), or name a source that has them; one of probability 0 is used where the "
            "others have nothing"
        )
    for name, count in zip(captions.names, lacking.tolist(), strict=True):
        if count:
            logger.warning(
                f"data.captions: {count:,} of {num_rows:,} rows have no caption in {name}, and draw from the other "
                "sources"
            )
