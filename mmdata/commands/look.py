"""What a source of images and captions holds, for `mmdata init`: its kind, and what its rows are like.

`open_source` and `Index` do the detection and the reading. A raw source is judged by its first 256 rows, an index by
its first million.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmdata.convert import ConvertConfig
from mmdata.convert.row.examine import Examiner, Outcome
from mmdata.convert.row.numbers import refuse_numbers
from mmdata.convert.sources.open import find_parts, open_source
from mmdata.convert.sources.rows import Source
from mmdata.convert.sources.table_source import where_looked
from mmdata.convert.sources.tars import is_packed
from mmdata.convert.units.engines import in_order
from mmdata.errors import BadSample, ConfigError, DamagedShard, DataError, Reason, counted
from mmdata.index import Index, Manifest, ShardStore
from mmdata.plan import IndexRows
from mmdata.processes import usable_cores
from mmdata.storage.folder import has_manifest, local_folder
from mmdata.storage.urls import display_name, is_url
from mmdata.tars.captions import captions_of
from mmdata.text.tokenizer import Tokenizer

LOOKED_ROWS = 256
"""Rows of a raw source that are examined before anything is written; and rows of an index whose captions are read."""
LOOKED_INDEX_ROWS = 2**20
"""Rows of an index whose sizes, captions and labels are counted: more would tell the same."""
SHIPPED_TOKENIZER = "clip"
"""Name of the tokenizer that ships with mmdata."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Facts:
    """What the rows of a corpus are like.

    Attributes:
        rows: of the corpus; an upper bound until it is converted.
        rows_are_exact: False if `rows` is larger than the number of rows may be.
        looked: rows that the other facts come from.
        heights, widths: int64 (n,), pixels as displayed, of the rows that can be used.
        captions: of those rows.
        texts: some of those captions.
        labels: how many of those rows have a label.
        longest: tokens of the longest caption; 0 if nobody has counted them.
        repeated: captions that an earlier row has too; None if that is not known.
        faults: rows that cannot be used, by reason.
    """

    rows: int
    looked: int
    heights: Ints
    widths: Ints
    captions: int
    texts: list[str]
    labels: int
    longest: int = 0
    repeated: int | None = None
    faults: Counter[str] = field(default_factory=Counter[str])
    rows_are_exact: bool = True

    @property
    def rows_in_words(self) -> str:
        """ "300 rows", or "at most 302 rows"."""
        return f"{'' if self.rows_are_exact else 'at most '}{counted(self.rows, 'row')}"

    @property
    def usable(self) -> int:
        """Rows looked at that can be used."""
        return len(self.heights)

    @property
    def words(self) -> float:
        """Mean words of a caption."""
        return float(np.mean([len(text.split()) for text in self.texts])) if self.texts else 0.0

    @property
    def short_side(self) -> int:
        """Median of the shorter sides of the images, in pixels."""
        return int(np.median(np.minimum(self.heights, self.widths)))

    @property
    def is_english(self) -> bool:
        """Whether nearly all captions are written in ASCII: CLIP's vocabulary was made of English text."""
        return bool(self.texts) and float(np.mean([text.isascii() for text in self.texts])) >= 0.9

    @property
    def captions_in_all(self) -> int:
        """Captions of all rows, by those of the rows looked at."""
        return self.captions * self.rows // max(self.usable, 1)

    def lines(self) -> Iterator[str]:
        """The facts, for people."""
        if self.looked < self.rows:
            yield f"looked at the first {self.looked:,} rows"
        if self.usable:
            short, long = np.minimum(self.heights, self.widths), np.maximum(self.heights, self.widths)
            yield (
                f"images: {int(short.min()):,} to {int(long.max()):,} pixels a side; "
                f"the median is {int(np.median(self.heights)):,} × {int(np.median(self.widths)):,} (height × width)"
            )
        if self.captions:
            mean = self.captions / max(self.usable, 1)
            longest = f"; the longest has {self.longest:,} tokens" if self.longest else ""
            yield f"captions: {mean:.3g} a row, {self.words:.1f} words on average{longest}"
        else:
            yield "captions: none"
        if self.labels:
            yield f"labels: {self.labels:,} of {self.usable:,} rows have one"
        if self.faults:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in self.faults.most_common())
            total = self.faults.total()
            yield f"cannot be used: {counted(total, 'row')} ({listed})"


@dataclass(frozen=True)
class Look:
    """A source before anything is made of it.

    Attributes:
        path: of the source.
        kind: shards have an index that a tokenizer whose folder is known has counted; tars need one; all else is raw.
        facts: of its rows.
        source: of a raw corpus or of tars without an index; else None.
        tokenizer: folder or name of the tokenizer that counted the shards; None for the other kinds.
    """

    path: Path
    kind: Literal["shards", "tars", "raw"]
    facts: Facts
    source: Source | None = None
    tokenizer: str | None = None
    indexed: Manifest | None = None
    """Of the index that the tars have already, which lacks the lengths that a known tokenizer has counted."""
    other_parts: Sequence[str] = ()
    """Parts of the source that `split` did not choose, such as "validation"."""

    @property
    def is_converted(self) -> bool:
        """Whether `mmdata convert` made these shards, and no tokenizer has counted their captions yet."""
        made = self.indexed
        return made is not None and made.tokenizer is None and "run" in (made.accounts or {})

    @property
    def is_of_urls(self) -> bool:
        """Whether the shards lie behind a URL, and their index on this machine."""
        return self.indexed is not None and "://" in self.indexed.location

    @property
    def tars(self) -> Path:
        """The tars to index: a folder, or a tar. Of tars behind URLs, the folder of their index."""
        if self.indexed is None or self.is_of_urls:
            return self.path
        folder = self.path / self.indexed.location
        names = [entry.name for entry in self.indexed]
        return folder / names[0] if len(names) == 1 else folder

    @property
    def name(self) -> str:
        """A name for config, shards and run: the source's, or its folder's if it has a usual one such as "train"."""
        path = self.path.resolve()
        own = path.name if path.is_dir() else path.stem
        return path.parent.name if own.lower() in USUAL_NAMES and path.parent.name else own


USUAL_NAMES = {"annotations", "captions", "data", "images", "labels", "metadata", "results", "shards", "train"}
"""Names that say nothing of a corpus."""


def look(source: str, *, tokenizer: str | None = None, split: str | None = None) -> Look:
    """Look at a table, a folder, a tar or shards.

    Args:
        source: the path.
        tokenizer: folder or name of the tokenizer that counted the shards, if it is not beside them.
        split: part of a raw corpus.

    Raises:
        DataError: no such path, an empty or unreadable corpus, or none of the first rows can be used.
        ConfigError: a URL, a table without columns of the usual names, or no such part.
    """
    if is_url(source):
        shown = display_name(source)
        raise ConfigError(
            f"'{shown}': a URL; `mmdata index '{shown}' --out FOLDER` makes an index of the tars there, for "
            f"`mmdata init FOLDER`, and `mmdata convert '{shown}' OUT` shards of a table there; copy anything else to "
            "this machine first"
        )
    path = local_folder(source)
    if path.is_dir() and has_manifest(path):
        if split is not None:
            raise ConfigError(f"split '{split}': '{path}' holds shards, all of one part; give the folder of the part")
        index = Index.open(path)
        beside = path / "tokenizer"
        tokenizer = tokenizer or (str(beside) if beside.exists() else _shipped_tokenizer(index))
        if index.captions and index.tokenizer is not None and tokenizer is not None:
            return Look(path, "shards", facts_of_index(index), None, tokenizer)
        return Look(path, "tars", facts_of_index(index), indexed=index.manifests[0])
    try:
        corpus = open_source(path, config := ConvertConfig(split=split))
        refuse_numbers(corpus, path, config)
        facts = _facts_of_rows(path, corpus)
    except DamagedShard as error:
        raise DataError(
            f"{error}; or index what can be read with `mmdata index {path} --skip-damaged`, then `mmdata init {path}`"
        ) from error
    except (ConfigError, DataError) as error:
        if "--" not in str(error) or "--split" in str(error):
            raise
        raise type(error)(
            f"{error}; that is an option of `mmdata convert {path} OUT`: then `mmdata init OUT`"
        ) from error
    others = () if split is None else tuple(name for name in find_parts(path) if name != split)
    return Look(path, "tars" if is_packed(path) else "raw", facts, corpus, other_parts=others)


def _shipped_tokenizer(index: Index) -> str | None:
    """Name of the tokenizer that ships with mmdata if it counted the index; no folder of shards holds a copy of it."""
    if index.tokenizer is None:
        return None
    return SHIPPED_TOKENIZER if Tokenizer.load(SHIPPED_TOKENIZER).fingerprint == index.tokenizer else None


def _facts_of_rows(path: Path, source: Source) -> Facts:
    """What the first rows of a raw source are like; their images are decoded.

    Raises:
        DataError: none of these rows can be used.
    """
    examiner = Examiner.from_config(source, ConvertConfig())
    found: list[Outcome] = list(in_order(usable_cores(), examiner, islice(source.rows(), LOOKED_ROWS)))
    samples = [(one.sample, one.label) for one in found if one.sample is not None and not one.fault]
    faults = [(one.fault[0], one.path) for one in found if one.fault]
    if not samples:
        missing = next((at for reason, at in faults if reason is Reason.MISSING_IMAGE), "")
        raise DataError(
            f"source '{path}': none of {counted(len(found), 'row')} looked at can be used "
            f"({'; '.join(sorted({str(reason) for reason, _ in faults}))}); `mmdata convert {path} OUT` lists each "
            f"with its reason{where_looked(source, missing)}"
        )
    texts = [caption for sample, _ in samples for caption in sample.captions]
    turned = [sample.info.orientation >= 5 for sample, _ in samples]
    sizes = np.array([(sample.info.height, sample.info.width) for sample, _ in samples], np.int64).reshape(-1, 2)
    sizes[turned] = sizes[turned, ::-1]
    are_all = len(found) < LOOKED_ROWS
    return Facts(
        rows=len(found) if are_all else source.rows_at_most,
        rows_are_exact=are_all or source.rows_are_exact,
        looked=len(found),
        heights=sizes[:, 0],
        widths=sizes[:, 1],
        captions=len(texts),
        texts=texts,
        labels=sum(label is not None for _, label in samples),
        faults=Counter(str(reason) for reason, _ in faults),
    )


def facts_of_index(index: Index) -> Facts:
    """What the rows of an index are like; captions of some rows are read, and no image."""
    if not len(index):
        raise DataError(f"shards '{index.sources[0].folder}': no rows in the index; see its quarantine.jsonl")
    rows = np.arange(min(len(index), LOOKED_INDEX_ROWS))
    heights, widths = IndexRows(index).sizes(rows)
    hashes = index.take_lists(rows, "caption_hash")[1]
    histogram = index.token_histogram()
    return Facts(
        rows=len(index),
        looked=len(rows),
        heights=heights,
        widths=widths,
        captions=len(hashes),
        texts=list(_captions(index, _looked_rows(index, rows))),
        labels=int((index.take(rows, ["label"])["label"] >= 0).sum()),
        longest=int(np.flatnonzero(histogram)[-1]) if index.captions and index.tokenizer else 0,
        repeated=len(hashes) - len(np.unique(hashes)),
    )


def _looked_rows(index: Index, rows: Ints) -> Ints:
    """The rows whose captions are read. Behind a URL they are the first, as each shard that is read is fetched."""
    return rows[:LOOKED_ROWS] if index.caches else rows[:: -(-len(rows) // LOOKED_ROWS)]


def _captions(index: Index, rows: Ints) -> Iterator[str]:
    """The captions of some rows, as they are in the tars."""
    if not index.captions:
        return
    store = ShardStore(index)
    columns = index.take(rows, ["caption_offset", "caption_bytes", "caption_format"])
    shards, _ = index.locate(rows)
    for i, shard in enumerate(shards.tolist()):
        data = store.read(shard, int(columns["caption_offset"][i]), int(columns["caption_bytes"][i]))
        try:
            yield from captions_of(data, int(columns["caption_format"][i]))
        except BadSample:
            continue


def refuse_labels_only(look: Look) -> None:
    """Raise ConfigError for tars of labels only: a dual encoder needs texts, and nobody has named the classes."""
    if not look.facts.captions:
        raise ConfigError(
            f"'{look.path}': shards with labels and no captions, and a dual encoder needs texts: make captions of the "
            f'class names with `mmdata convert {look.tars} OUT --caption-template "a photo of a {{}}."`, and then '
            "`mmdata init OUT`; a loader of your own needs no texts (leave data.tokenizer out)"
        )
