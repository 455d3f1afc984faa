"""Makes one rank's part of one step, its members read by offset from shards."""

from __future__ import annotations

from threading import Event

import numpy as np
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.loader.batch_builder import BatchBuilder
from mmdata.loader.buffer_pool import BufferPool
from mmdata.loader.corpus import needs_hashes, open_index
from mmdata.loader.negative_captions import NegativeCaptions, open_negative_captions
from mmdata.loader.samples import CheckImages, IndexSamples
from mmdata.loader.work import LoadedBatch, Task, Work
from mmdata.shards import Index, ShardStore
from mmdata.transform.pixels import PixelTransform
from mmdata.transform.text import Tokenizer


class BatchMaker:
    """Makes batches of an index's rows. One worker serves many threads at once.

    Args:
        index: of the shards.
        tokenizer: for the captions.
        transform: for the pixels.
        hashes: add image_hash and caption_hash to the batches.
        negatives: further captions of the rows, for the batches.
        check_images: whether images are compared with their hashes in the index; see `DataConfig.check_images`.
        slots: lends the memory of pixels; default: memory of this process.
    """

    def __init__(
        self,
        index: Index,
        tokenizer: Tokenizer,
        transform: PixelTransform,
        *,
        hashes: bool = False,
        negatives: NegativeCaptions | None = None,
        check_images: CheckImages = "auto",
        slots: BufferPool | None = None,
    ) -> None:
        self.index = index
        self.check_images: CheckImages = check_images
        self.store = ShardStore(index)
        self.tokenizer = tokenizer
        self.transform = transform
        self.negatives = negatives
        self._assembler = BatchBuilder(tokenizer, transform, hashes=hashes, slots=slots)
        self._has_labels = index.has_labels

    @classmethod
    def from_config(cls, data: DataConfig, *, slots: BufferPool | None = None) -> BatchMaker:
        """The worker that a section `data` describes."""
        tokenizer = Tokenizer.load(data.tokenizer, max_length=data.max_length)
        transform = PixelTransform.from_config(data)
        index = open_index(data)
        negatives = open_negative_captions(data, index, tokenizer)
        hashes, check = needs_hashes(data), data.check_images
        return cls(index, tokenizer, transform, hashes=hashes, negatives=negatives, check_images=check, slots=slots)

    def begin(self, task: Task, stop: Event | None = None) -> Work[LoadedBatch]:
        """Begin a batch; see `BatchBuilder.begin`. Its units raise Interrupted once `stop` is set."""
        there = task.rows >= 0
        rows, passes = task.rows[there], task.passes[there]
        samples = self.samples(rows, passes, stop=stop)
        negatives = None if self.negatives is None else self.negatives.choose(rows, passes)
        return self._assembler.begin(task, samples, labels=self._has_labels, negatives=negatives)

    def samples(self, rows: NDArray[np.int64], passes: NDArray[np.int64], stop: Event | None = None) -> IndexSamples:
        """The samples of n rows in their passes, int64 (n,) each."""
        return IndexSamples(self.index, self.store, rows, passes, check_images=self.check_images, stop=stop)

    def make(self, task: Task) -> LoadedBatch:
        """Make a batch in the caller's thread.

        Raises:
            DataError: a shard is not the one that was indexed.
            LoadError: anything else that is no fault of a sample.
        """
        return self.begin(task).run()
