"""Makes one rank's part of each step, of what a `BatchSpec` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray

from mmdata.batch import Batch, CaptionBatch
from mmdata.config import DataConfig
from mmdata.errors import BadSample, DataError
from mmdata.images.pixels import PixelTransform
from mmdata.index import Index, ShardStore
from mmdata.loader.corpus import Corpus, most_shards
from mmdata.loader.entries.fields import Fields
from mmdata.loader.entries.negatives import NegativeCaptions
from mmdata.loader.entries.targets import Targets
from mmdata.loader.reader import RowReader
from mmdata.loader.unfinished import LoadedBatch, UnfinishedBatch
from mmdata.loader.workers.buffers import BufferPool
from mmdata.loader.workers.threads import Work
from mmdata.plan import CaptionSources, IndexRows, Plan, ShardCaptions, Step
from mmdata.tars.captions import filled
from mmdata.text.tokenizer import Tokenizer
from mmdata.text.transform import TextTransform


@dataclass(frozen=True)
class BatchSpec:
    """What batches are made of.

    Attributes:
        transform: for the pixels.
        tokenizer: for the captions; None: batches have no tokens.
        text_transform: for the captions.
        captions: sources from which the rows draw their captions; None: those of the shards in turn.
        negatives: negative captions of the rows; None: batches have none.
        fields: entries beside images and captions; None: there are none.
        targets: what follows the crops of images; None: there is nothing.
        equal_captions: changes the hashes of captions of n rows, where a column says which are equal.
    """

    transform: PixelTransform
    tokenizer: Tokenizer | None = None
    text_transform: TextTransform = field(default_factory=TextTransform)
    captions: CaptionSources | None = None
    negatives: NegativeCaptions | None = None
    fields: Fields | None = None
    targets: Targets | None = None
    equal_captions: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]] | None = None

    @classmethod
    def from_config(cls, data: DataConfig, corpus: Corpus, plan: Plan) -> BatchSpec:
        """The spec of a section `data`, its corpus and its plan, whose first rows say what members hold."""
        return cls(
            PixelTransform.from_config(data),
            corpus.tokenizer,
            TextTransform.from_config(data),
            captions=corpus.captions,
            negatives=corpus.negatives,
            fields=Fields.from_config(data, corpus.index, corpus.joined, plan) if data.fields else None,
            targets=Targets.from_config(data, corpus.index, corpus.joined, corpus.tokenizer, plan),
            equal_captions=plan.rows.equal_captions if isinstance(plan.rows, IndexRows) else None,
        )


class BatchBuilder:
    """Makes batches of an index's rows. One builder serves many threads at the same time.

    Args:
        index: of the shards.
        spec: what batches are made of.

    Attributes:
        store: reads the shards.
        buffers: lends the memory of pixels.
    """

    def __init__(self, index: Index, spec: BatchSpec) -> None:
        self.index, self.spec = index, spec
        self.store = ShardStore(index)
        self.buffers = BufferPool()
        self._captions = spec.captions or CaptionSources.in_turn(ShardCaptions(index))

    @classmethod
    def from_config(cls, data: DataConfig, corpus: Corpus, plan: Plan) -> BatchBuilder:
        """Build a builder from a section `data`, its corpus and its plan."""
        builder = cls(corpus.index, BatchSpec.from_config(data, corpus, plan))
        for tars in (builder.store, *corpus.joined.shards.values()):
            tars.open_shards.most = most_shards(data, plan)
        return builder

    def begin(self, step: Step, stop: Event | None = None) -> Work:
        """Begin a batch. Its units raise Interrupted once `stop` is set; see `UnfinishedBatch` for other errors."""
        return UnfinishedBatch(self, step, stop).work()

    def read(self, rows: NDArray[np.int64], passes: NDArray[np.int64], stop: Event | None = None) -> RowReader:
        """The samples of n rows in their passes, int64 (n,) each."""
        return RowReader(self.index, self.store, rows, passes, captions=self._captions, stop=stop)

    def make(self, step: Step) -> LoadedBatch:
        """Make a batch in the caller's thread; see `UnfinishedBatch` for errors."""
        return self.begin(step).run()

    def added(self, batch: Batch) -> Batch:
        """A batch that was made, with its entries of joined tables."""
        return batch if self.spec.fields is None else self.spec.fields.added(batch)

    def all_captions(self, rows: NDArray[np.int64]) -> CaptionBatch:
        """All captions, in their template, of each row that has several; none of a row that has one, or without texts.

        Where rows draw their captions from sources, each has the one of its batch alone.

        Args:
            rows: int64 (n,), row numbers in the index, each once.

        Raises:
            DataError: a caption is not the one that was indexed.
        """
        offsets, _ = self.index.take_lists(rows, "caption_hash")
        counts = np.diff(offsets)
        counts[counts == 1] = 0  # the batch has it already
        tokenizer = self.spec.tokenizer
        if tokenizer is None or self.spec.captions is not None:
            counts[:] = 0
        of_rows = np.repeat(rows, counts)  # (T,)
        # A row of n captions has each of them once in n passes: pass 0, 1, … of each row, [0, 1, 0, 1, 2] for 2 and 3.
        passes = np.arange(len(of_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        reader = RowReader(self.index, self.store, of_rows, passes)
        texts = [filled(self.spec.text_transform.template, _caption(reader, i)) for i in range(len(of_rows))]
        input_ids = attention_mask = np.empty((0, 1), np.int64)
        if tokenizer is not None and texts:
            length = min(max(tokenizer.count(texts)), tokenizer.max_length)
            input_ids, attention_mask = tokenizer.encode(texts, length)
            attention_mask[:, 0] = 1  # attention over no token is NaN
        return CaptionBatch(
            input_ids=torch.from_numpy(input_ids),
            attention_mask=torch.from_numpy(attention_mask),
            caption_hash=torch.from_numpy(np.array(reader.caption_hashes(), np.int64)),
            rows=torch.from_numpy(of_rows),
        )


def _caption(reader: RowReader, i: int) -> str:
    try:
        return reader.caption(i)
    except BadSample as error:
        raise DataError(
            f"shard '{reader.shard(i)}', sample '{reader.keys[i]}': {error}; an evaluation needs all captions of "
            "the rows it counts"
        ) from error
