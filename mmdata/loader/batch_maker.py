"""Makes one rank's part of one step; reads its members by offset from shards."""

from __future__ import annotations

from threading import Event

import numpy as np
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.images.pixels import PixelTransform
from mmdata.index import Index, ShardStore
from mmdata.loader.batch_builder import BatchBuilder, BatchSpec
from mmdata.loader.buffer_pool import BufferPool
from mmdata.loader.corpus import Corpus, needs_hashes
from mmdata.loader.fields import MemberSource, parse_fields
from mmdata.loader.member_fields import PROBED_ROWS, MemberField, MemberFields
from mmdata.loader.negative_captions import NegativeCaptions
from mmdata.loader.samples import CheckImages, IndexSamples
from mmdata.loader.work import LoadedBatch, Work
from mmdata.loader.workers.open_files import most_shards
from mmdata.plan import CaptionSources, Plan, Step
from mmdata.plan.rows import first_rows
from mmdata.text.tokenizer import Tokenizer
from mmdata.text.transform import TextTransform


class BatchMaker:
    """Makes batches of an index's rows. One maker serves many threads at the same time.

    Args:
        index: of the shards.
        tokenizer: for the captions; None: batches have no texts.
        transform: for the pixels.
        add_hashes: add image_hash and caption_hash to the batches.
        add_captions: add the text of the captions to the batches.
        negatives: negative captions of the rows, for the batches.
        check_images: whether images are compared with their hashes in the index; see `LoadingConfig.check_images`.
        captions: sources from which the rows draw their captions; None: those of the shards in turn.
        text_transform: makes the texts of the captions; None: they stay as they are.
        fields: entries of the batches that lie in members of the samples.
        buffers: lends the memory of pixels; default: memory of this process.
    """

    def __init__(
        self,
        index: Index,
        tokenizer: Tokenizer | None,
        transform: PixelTransform,
        *,
        add_hashes: bool = False,
        add_captions: bool = False,
        negatives: NegativeCaptions | None = None,
        check_images: CheckImages = "auto",
        captions: CaptionSources | None = None,
        text_transform: TextTransform | None = None,
        fields: MemberFields | None = None,
        buffers: BufferPool | None = None,
    ) -> None:
        self.index = index
        self.tokenizer = tokenizer
        self.transform = transform
        self.negatives = negatives
        self.captions = captions
        self.text_transform = text_transform or TextTransform()
        self.fields = fields
        self.store = ShardStore(index)
        self._check_images: CheckImages = check_images
        self._spec = BatchSpec(
            tokenizer,
            transform,
            self.text_transform,
            add_hashes=add_hashes,
            add_captions=add_captions,
            buffers=buffers or BufferPool(),
        )
        self._has_labels = index.has_labels

    @classmethod
    def from_config(
        cls, data: DataConfig, corpus: Corpus, plan: Plan, *, buffers: BufferPool | None = None
    ) -> BatchMaker:
        """Build a maker from a section `data`, its corpus and its plan, whose first rows say what `data.fields` are."""
        maker = cls(
            corpus.index,
            corpus.tokenizer,
            PixelTransform.from_config(data),
            add_hashes=needs_hashes(data),
            add_captions=data.add_captions,
            negatives=corpus.negatives,
            check_images=data.loading.check_images,
            captions=corpus.captions,
            text_transform=TextTransform.from_config(data),
            fields=_member_fields(data, corpus, plan),
            buffers=buffers,
        )
        for tars in (maker.store, *corpus.joined.shards.values()):
            tars.open_shards.most = most_shards(data, plan)
        return maker

    def begin(self, step: Step, stop: Event | None = None) -> Work[LoadedBatch]:
        """Begin a batch; see `BatchBuilder`. Its units raise Interrupted once `stop` is set."""
        planned = step.rows >= 0
        rows, passes = step.rows[planned], step.passes[planned]
        samples = self.samples(rows, passes, stop=stop)
        negatives = None if self.negatives is None else self.negatives.choose(rows, passes)
        fields = None if self.fields is None else self.fields.entries(len(step.rows), self.store, stop)
        return BatchBuilder(
            self._spec, step, samples, labels=self._has_labels, negatives=negatives, fields=fields
        ).work()

    def samples(self, rows: NDArray[np.int64], passes: NDArray[np.int64], stop: Event | None = None) -> IndexSamples:
        """The samples of n rows in their passes, int64 (n,) each."""
        checked = self._check_images
        return IndexSamples(
            self.index, self.store, rows, passes, check_images=checked, stop=stop, captions=self.captions
        )

    def make(self, step: Step) -> LoadedBatch:
        """Make a batch in the caller's thread.

        Raises:
            DataError: a shard is not the one that was indexed.
            LoadError: any other error that is not a sample's fault.
        """
        return self.begin(step).run()


def _member_fields(data: DataConfig, corpus: Corpus, plan: Plan) -> MemberFields | None:
    """The entries of `data.fields` that lie in members; None if there are none."""
    joined = corpus.joined.shards
    found = [
        MemberField(name, source, joined[source.join].missing if source.join else data.missing_fields)
        for name, source in parse_fields(data.fields, corpus.joined).items()
        if isinstance(source, MemberSource)
    ]
    if not found:
        return None
    store = ShardStore(corpus.index)
    return MemberFields(found, corpus.index, first_rows(plan.rows, PROBED_ROWS), joined, store)
