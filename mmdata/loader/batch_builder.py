"""Makes a batch of samples, wherever their bytes come from: rows written in place, bad ones masked with a reason.

It is made in units that threads share. Each row is written by one of them and depends on nothing but itself, so a batch
is the same whoever makes which unit, and when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import BadSample, ConfigError, DataError, Interrupted, LoadError
from mmdata.loader.buffer_pool import BufferPool
from mmdata.loader.image_buffers import batch_pixels
from mmdata.loader.ledger import LedgerEntry, Stage
from mmdata.loader.negative_captions import NegativeTexts
from mmdata.loader.samples import Samples
from mmdata.loader.stats import WATCH_EVERY, StageClock, Stats
from mmdata.loader.work import LoadedBatch, Work
from mmdata.plan import Step
from mmdata.shards.images.decoder_warnings import name_warnings, sample_name
from mmdata.transform.pixels import PixelTransform
from mmdata.transform.text import Tokenizer

UNIT_ROWS = 16
"""Rows that a thread takes at a time, at most: some 10 ms of work, for which a clock and a turn cost 20 µs."""
MIN_UNITS = 16
"""A small batch has so many units nevertheless, so that each of as many threads finds one."""
CAPTIONS_AT_ONCE = 256
"""Captions tokenized in one call: it takes about as long as a unit of photos, and one of 1,024 would be waited for."""


@dataclass(frozen=True)
class BatchSpec:
    """What all batches of a loader or a stream are made with.

    Attributes:
        tokenizer: for the captions.
        transform: for the pixels.
        add_hashes: add image_hash and caption_hash to the batches.
        buffers: lends the memory of pixels; default: memory of this process.
    """

    tokenizer: Tokenizer
    transform: PixelTransform
    add_hashes: bool = False
    buffers: BufferPool = field(default_factory=BufferPool)


class _Part:
    """What one thread does of a batch.

    Attributes:
        samples: numbers of those that it is about.
        at: the one that it is at; None: none of them.
        wrote: those whose pixels it has written.
        stats: of this part.
        clock: measures for them.
    """

    def __init__(self, samples: range) -> None:
        self.samples = samples
        self.at: int | None = None
        self.wrote = range(0)
        self.stats = Stats()
        self.clock = StageClock(self.stats)


class BatchBuilder:
    """One batch while it is made: units of its rows, which threads share, and `finish`, which puts it together.

    Its samples are numbered 0 … n-1, in the order of their rows.

    Args:
        spec: what it is made with.
        step: the rows of the batch.
        samples: of the rows that are not -1.
        labels: whether the batch has labels.
        negatives: negative captions of the rows; None: the batch has none.

    Units and `finish` raise:
        DataError: a shard is not the one that was indexed.
        LoadError: anything else that is no fault of a sample; names where it happened.
    """

    def __init__(
        self,
        spec: BatchSpec,
        step: Step,
        samples: Samples,
        *,
        labels: bool,
        negatives: NegativeTexts | None = None,
    ) -> None:
        self._spec, self._tokenizer = spec, spec.tokenizer
        self._step, self._samples, self._labels, self._negatives = step, samples, labels, negatives
        self._places = np.flatnonzero(step.rows >= 0)  # (n,) positions in the batch
        self._bad_images: dict[int, LedgerEntry] = {}  # by sample
        self._bad_captions: dict[int, LedgerEntry] = {}
        self._parts: list[_Part] = []  # those that are done
        self._failed = False
        shape = (len(step.rows), step.bucket.length)
        self._input_ids = np.full(shape, self._tokenizer.pad_id, np.int64)
        self._attention_mask = np.zeros(shape, np.int64)
        self._do(self._lend, range(0))

    def work(self) -> Work[LoadedBatch]:
        """All of it, for threads to share."""
        return Work(self.units(), self.finish)

    def units(self) -> list[Callable[[], None]]:
        """The work on the rows, each to be called once, in any order; the longest units come first."""
        n = len(self._places)
        rows = min(UNIT_ROWS, -(-n // MIN_UNITS))
        units = [] if self._negatives is None else [partial(self._do, self._tokenize_negatives, range(0))]
        units += [partial(self._do, self._tokenize, samples) for samples in _split(n, CAPTIONS_AT_ONCE)]
        units += [partial(self._do, self._write_pixels, samples) for samples in _split(n, rows)]
        return units

    def finish(self) -> LoadedBatch:
        """The batch and its account; all units must be done."""
        self._do(self._collate, range(0))
        bad = {**self._bad_captions, **self._bad_images}  # image and caption both bad: one line for the row
        made = LoadedBatch(self._batch, [bad[i] for i in sorted(bad)], self._sum_up())
        del self._batch, self._pixels  # a thread that is late to let go of its unit keeps this alive, but not them
        return made

    def _do(self, work: Callable[[_Part], None], samples: range) -> None:
        """A part of the work, under a clock of its own; nothing where another part has failed."""
        if self._failed:
            return
        part = _Part(samples)
        try:
            with name_warnings(lambda: self._name(part)):
                work(part)
        except BaseException as error:
            self._failed = True
            # The first three name their file, or nobody waits for what was interrupted.
            if isinstance(error, (DataError, ConfigError, Interrupted)) or not isinstance(error, Exception):
                raise
            raise LoadError(self._explain(error, part.at)) from error
        part.clock.stop()
        self._parts.append(part)

    def _lend(self, part: _Part) -> None:
        """Borrow the memory for the pixels."""
        step, spec = self._step, self._spec
        self._pixels = batch_pixels(step.bucket, len(step.rows), spec.buffers, spec.transform)
        part.clock.lap("collate")

    def _explain(self, error: Exception, i: int | None) -> str:
        """Where an error happened, what it is, and how to see it again."""
        step, samples = self._step, self._samples
        words = f"epoch {step.epoch}, step {step.number}"
        if i is None:
            first = step.rows[self._places[:1]].tolist()
            return f"{words}, {len(self._places)} rows, the first {first}: {type(error).__name__}: {error}"
        row = int(step.rows[self._places[i]])
        words = f"{words}, shard '{samples.shard(i)}', sample '{samples.keys[i]}': {type(error).__name__}: {error}"
        in_index = samples.offset(i, "image") >= 0
        return f"{words}; `mmdata replay CONFIG {row} --epoch {step.epoch}` makes it alone" if in_index else words

    def _write_pixels(self, part: _Part) -> None:
        """Decode and crop each image into its place."""
        clock, first = part.clock, part.samples.start
        clock.lap("collate")
        for i in part.samples:
            if self._failed:
                return
            part.at = i
            clock.watch((i - first) % WATCH_EVERY == 0)
            stage: Stage = "read"
            place = int(self._places[i])
            try:
                image = self._samples.image(i)
                part.stats.read_bytes += len(image.data)
                clock.lap("read")
                stage = "decode"
                epoch = int(self._step.passes[place])
                whole = self._pixels.decode(image, epoch=epoch)
                clock.lap("decode")
                stage = "transform"
                self._pixels.write(whole, place, number=image.number, epoch=epoch)
            except BadSample as error:
                self._bad_images[i] = self._entry(i, stage, error)
            clock.lap(stage)
        part.wrote = part.samples

    def _name(self, part: _Part) -> str:
        """Of the sample that a part is at."""
        return "" if part.at is None else sample_name(self._samples.shard(part.at), self._samples.keys[part.at])

    def _tokenize(self, part: _Part) -> None:
        """Read the captions, and tokenize them in one call."""
        captions: list[str] = []
        for i in part.samples:
            if self._failed:
                return
            part.at = i
            try:
                captions.append(self._samples.caption(i))
            except BadSample as error:
                self._bad_captions[i] = self._entry(i, "caption", error)
                captions.append("")
        part.at = None
        part.clock.lap("read")
        places = self._places[part.samples.start : part.samples.stop]
        encoded = self._tokenizer.encode(captions, self._step.bucket.length)
        self._input_ids[places], self._attention_mask[places] = encoded
        part.clock.lap("tokenize")

    def _tokenize_negatives(self, part: _Part) -> None:
        """The negative captions, in one call."""
        assert self._negatives is not None
        self._further = self._negatives.encode(self._tokenizer, self._places, len(self._step.rows))
        part.clock.lap("tokenize")

    def _entry(self, i: int, stage: Stage, error: BadSample) -> LedgerEntry:
        step, samples = self._step, self._samples
        offset = samples.offset(i, "caption" if stage == "caption" else "image")
        row, shard, key = int(step.rows[self._places[i]]), samples.shard(i), samples.keys[i]
        return LedgerEntry(step.epoch, step.number, row, shard, key, offset, stage, error.reason.value, error.detail)

    def _collate(self, part: _Part) -> None:
        """Put all that is in the batch together."""
        usable = np.zeros(len(self._step.rows), bool)
        usable[self._places] = self._usable()
        valid = torch.from_numpy(usable)
        # Attention over no position at all is NaN, and NaN reaches the gradient even where the loss masks the row.
        self._attention_mask[:, 0] = 1
        keys = [""] * len(usable)
        for place, key in zip(self._places.tolist(), self._samples.keys, strict=True):
            keys[place] = key
        self._batch = batch = Batch(
            **self._pixels.entries(valid),
            input_ids=torch.from_numpy(self._input_ids),
            attention_mask=torch.from_numpy(self._attention_mask),
            valid=valid,
            rows=torch.from_numpy(self._step.rows.copy()),
            keys=keys,
        )
        if self._labels:
            batch["labels"] = self._spread(self._samples.labels(), fill=-1)
        if self._spec.add_hashes:
            batch["image_hash"] = self._spread(self._samples.image_hashes(), fill=0)
            batch["caption_hash"] = self._spread(self._samples.caption_hashes(), fill=0)
        if self._negatives is not None:
            there = self._spread(self._negatives.there().astype(np.int64), fill=0).bool()
            batch["negative_input_ids"], batch["negative_attention_mask"] = map(torch.from_numpy, self._further)
            batch["negative_valid"] = valid & there
            if self._spec.add_hashes:
                batch["negative_caption_hash"] = self._spread(self._negatives.hashes(), fill=0)
        part.clock.lap("collate")

    def _spread(self, values: NDArray[np.int64], *, fill: int) -> Tensor:
        """Values of the samples (n,) at their places in the batch (B,)."""
        spread = np.full(len(self._step.rows), fill, np.int64)
        spread[self._places] = values
        return torch.from_numpy(spread)

    def _usable(self) -> NDArray[np.bool_]:
        """Which samples are, bool (n,)."""
        usable = np.ones(len(self._places), bool)
        usable[[*self._bad_images, *self._bad_captions]] = False
        return usable

    def _sum_up(self) -> Stats:
        """The sums of all parts; each row is of the worker that wrote its pixels."""
        usable, valid = self._usable(), self._batch["valid"]
        total = Stats(rows=int(valid.sum()), masked=int((~valid).sum()))
        total.tokens = int(self._batch["attention_mask"][valid].sum())
        total.token_places = total.rows * self._step.bucket.length
        for part in self._parts:
            for worker in part.stats.workers.values():
                worker["rows"] = int(usable[part.wrote.start : part.wrote.stop].sum())
            total.add(part.stats)
        return total


def _split(n: int, size: int) -> list[range]:
    """0 … n-1 in ranges of so many, one at least."""
    return [range(i, min(i + size, n)) for i in range(0, n, max(1, size))] or [range(0)]
