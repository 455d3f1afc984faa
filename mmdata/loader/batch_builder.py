"""Makes a batch of samples: rows are written in place, and bad rows are masked with a reason.

Threads share a batch in units of rows. One unit writes each row, and a row depends on its own sample alone, so the
batch does not depend on which thread does which unit, or when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import BadSample, ConfigError, DataError, Interrupted, LoadError
from mmdata.hashing import EMPTY_HASH
from mmdata.images.decoder_warnings import name_warnings, sample_name
from mmdata.images.pixels import PixelTransform
from mmdata.loader.buffer_pool import BufferPool
from mmdata.loader.image_buffers import batch_images
from mmdata.loader.ledger import LedgerEntry, Stage
from mmdata.loader.member_fields import FieldEntries
from mmdata.loader.negative_captions import NegativeTexts
from mmdata.loader.samples import Samples
from mmdata.loader.stats import WATCH_EVERY, StageClock, Stats
from mmdata.loader.work import LoadedBatch, Work
from mmdata.plan import Step
from mmdata.text.tokenizer import Tokenizer
from mmdata.text.transform import TextTransform

UNIT_ROWS = 16
"""Rows of a unit, at most: about 10 ms of work, for which the clock and the queue cost 20 µs."""
MIN_UNITS = 16
"""A small batch is cut into this many units nevertheless, so that up to 16 threads share it."""
CAPTIONS_PER_CALL = 256
"""Captions tokenized in one call: it takes about as long as a unit of photos. With 1,024 the batch waits for it."""


@dataclass(frozen=True)
class BatchSpec:
    """The settings that all batches of a loader or a stream share.

    Attributes:
        tokenizer: for the captions; None: batches have no tokens.
        transform: for the pixels.
        text_transform: for the captions.
        add_hashes: add image_hash and caption_hash to the batches.
        add_captions: add the text of the captions to the batches.
        buffers: lends the memory of pixels.
    """

    tokenizer: Tokenizer | None
    transform: PixelTransform
    text_transform: TextTransform = field(default_factory=TextTransform)
    add_hashes: bool = False
    add_captions: bool = False
    buffers: BufferPool = field(default_factory=BufferPool)

    @property
    def reads_captions(self) -> bool:
        """Whether batches have anything of the captions: tokens or text."""
        return self.tokenizer is not None or self.add_captions


class _Part:
    """One thread's part of a batch.

    Attributes:
        samples: numbers of the samples of this part.
        current: the sample in progress, for messages; None where it is all of them.
        written: the samples whose pixels this part has written.
    """

    def __init__(self, samples: range) -> None:
        self.samples = samples
        self.current: int | None = None
        self.written = range(0)
        self.stats = Stats()
        self.clock = StageClock(self.stats)


class BatchBuilder:
    """A batch in progress: units that threads share, and `finish`, which collates the batch.

    Its samples are numbered 0 … n-1, in the order of their rows in the batch.

    Args:
        spec: settings of all batches.
        step: the rows of the batch; -1 where a row is padding.
        samples: of the rows that are not -1.
        labels: whether the batch has labels.
        negatives: negative captions of the n samples; None: the batch has none.
        fields: entries of the batch that lie in members of the samples; None: there are none.

    Units and `finish` raise:
        DataError: a shard is not the one that was indexed.
        LoadError: any other error that is not a sample's fault; names epoch, step, shard and sample.
    """

    def __init__(
        self,
        spec: BatchSpec,
        step: Step,
        samples: Samples,
        *,
        labels: bool,
        negatives: NegativeTexts | None = None,
        fields: FieldEntries | None = None,
    ) -> None:
        self._spec = spec
        self._step, self._samples, self._labels, self._negatives = step, samples, labels, negatives
        self._fields = fields
        self._places = np.flatnonzero(step.rows >= 0)  # (n,) positions in the batch
        self._bad_images: dict[int, LedgerEntry] = {}  # by sample
        self._bad_captions: dict[int, LedgerEntry] = {}
        self._bad_fields: dict[int, LedgerEntry] = {}
        self._done: list[_Part] = []
        self._failed = False  # a part has raised: the other parts return early
        shape = (len(step.rows), step.bucket.length)
        self._input_ids = np.full(shape, spec.tokenizer.pad_id if spec.tokenizer else 0, np.int64)
        self._attention_mask = np.zeros(shape, np.int64)
        self._captions = [""] * len(step.rows)
        self._do(self._lend_pixels, range(0))

    def work(self) -> Work[LoadedBatch]:
        """The batch as work that threads share."""
        return Work(self.units(), self.finish)

    def units(self) -> list[Callable[[], None]]:
        """The work on the rows. Each unit is called once, in any order; the longest come first."""
        n = len(self._places)
        rows = min(UNIT_ROWS, -(-n // MIN_UNITS))
        units: list[Callable[[], None]] = []
        if (tokenizer := self._spec.tokenizer) is not None and self._negatives is not None:
            units.append(partial(self._do, partial(self._tokenize_negatives, tokenizer), range(0)))
        if self._spec.reads_captions:
            units += [partial(self._do, self._write_captions, samples) for samples in _split(n, CAPTIONS_PER_CALL)]
        if (fields := self._fields) is not None:
            units += [partial(self._do, partial(self._write_fields, fields), samples) for samples in _split(n, rows)]
        units += [partial(self._do, self._write_pixels, samples) for samples in _split(n, rows)]
        return units

    def finish(self) -> LoadedBatch:
        """The batch, its masked rows and its clock; called when all units are done."""
        self._do(self._collate, range(0))
        # One entry for a row of which several are bad.
        bad = {**self._bad_fields, **self._bad_captions, **self._bad_images}
        made = LoadedBatch(self._batch, [bad[i] for i in sorted(bad)], self._sum_up(), self._step.mark)
        # A thread may hold its unit, and so this object, for a moment longer: it must not keep the batch's memory.
        del self._batch, self._pixels
        return made

    def _do(self, work: Callable[[_Part], None], samples: range) -> None:
        """Do a part of the work, timed by a clock of its own; does nothing if another part has failed."""
        if self._failed:
            return
        part = _Part(samples)
        try:
            with name_warnings(lambda: self._name(part)):
                work(part)
        except BaseException as error:
            self._failed = True
            # DataError and ConfigError name their file; after Interrupted no caller waits for the batch.
            if isinstance(error, (DataError, ConfigError, Interrupted)) or not isinstance(error, Exception):
                raise
            raise LoadError(self._explain(error, part.current)) from error
        part.clock.stop()
        self._done.append(part)

    def _lend_pixels(self, part: _Part) -> None:
        """Borrow the memory for the pixels."""
        step, spec = self._step, self._spec
        self._pixels = batch_images(step.bucket, len(step.rows), spec.buffers, spec.transform)
        part.clock.lap("collate")

    def _explain(self, error: Exception, i: int | None) -> str:
        """The message of a LoadError: where the error happened, what it is, and the command that repeats it."""
        step, samples = self._step, self._samples
        where = f"epoch {step.epoch}, step {step.number}"
        if i is None:
            first = step.rows[self._places[:1]].tolist()
            return f"{where}, {len(self._places)} rows, the first {first}: {type(error).__name__}: {error}"
        row = int(step.rows[self._places[i]])
        message = f"{where}, shard '{samples.shard(i)}', sample '{samples.keys[i]}': {type(error).__name__}: {error}"
        if samples.offset(i, "image") < 0:  # a stream's: it has no index to find the row in
            return message
        return f"{message}; `mmdata replay CONFIG {row} --epoch {step.epoch}` makes this row alone"

    def _write_pixels(self, part: _Part) -> None:
        """Read each image, decode it, and write its crop into its row of the batch."""
        clock, first = part.clock, part.samples.start
        clock.lap("collate")
        for i in part.samples:
            if self._failed:
                return
            part.current = i
            clock.watch((i - first) % WATCH_EVERY == 0)  # processor time costs a system call: sample it
            stage: Stage = "read"
            place = int(self._places[i])
            try:
                image = self._samples.image(i)
                part.stats.read_bytes += len(image.data)
                clock.lap("read")
                stage = "decode"
                epoch = int(self._step.passes[place])
                decoded = self._pixels.decode(image, epoch=epoch)
                clock.lap("decode")
                stage = "transform"
                self._pixels.write(decoded, place, number=image.number, epoch=epoch)
            except BadSample as error:
                self._bad_images[i] = self._entry(i, stage, error)
            clock.lap(stage)
        part.written = part.samples

    def _name(self, part: _Part) -> str:
        """Name of the sample in progress, for the warnings of a decoder."""
        i = part.current
        return "" if i is None else sample_name(self._samples.shard(i), self._samples.keys[i])

    def _write_captions(self, part: _Part) -> None:
        """Read the captions, make their texts, and tokenize these in one call if there is a tokenizer."""
        captions = self._each_text(part, part.samples, self._samples.caption)
        part.clock.lap("read")
        texts = captions
        if transform := self._spec.text_transform:
            numbers, epochs = self._samples.numbers.tolist(), self._step.passes[self._places].tolist()
            texts = self._each_text(
                part, captions, lambda i: transform(captions[i], number=numbers[i], epoch=epochs[i])
            )
            part.clock.lap("transform")
        if self._failed:
            return
        places = self._places[part.samples.start : part.samples.stop]
        listed = [texts.get(i, "") for i in part.samples]
        for place, text in zip(places.tolist(), listed, strict=True):
            self._captions[place] = text
        if (tokenizer := self._spec.tokenizer) is not None:
            self._input_ids[places], self._attention_mask[places] = self._encode(tokenizer, listed, part)
            part.clock.lap("tokenize")

    def _each_text(self, part: _Part, samples: Iterable[int], text_of: Callable[[int], str]) -> dict[int, str]:
        """The texts of some samples; those of which there is none are entered in the ledger."""
        texts: dict[int, str] = {}
        for i in samples:
            if self._failed:
                break
            part.current = i
            try:
                texts[i] = text_of(i)
            except BadSample as error:
                self._bad_captions[i] = self._entry(i, "caption", error)
        part.current = None
        return texts

    def _encode(self, tokenizer: Tokenizer, texts: list[str], part: _Part) -> tuple[NDArray[np.int64], ...]:
        """input_ids and attention_mask of texts."""
        length = self._step.bucket.length
        if not self._spec.text_transform.has_function:
            return tokenizer.encode(texts, length)  # the plan knows the captions in their template: they fit
        input_ids, attention_mask, part.stats.cut = tokenizer.encode_cut(texts, length)
        if part.stats.cut:
            self._spec.text_transform.warn_of_cut()
        return input_ids, attention_mask

    def _write_fields(self, fields: FieldEntries, part: _Part) -> None:
        """Read the values in members of the samples."""
        for i in part.samples:
            if self._failed:
                return
            part.current = i
            place = int(self._places[i])
            try:
                fields.write(int(self._step.rows[place]), place)
            except BadSample as error:
                self._bad_fields[i] = self._entry(i, "field", error)
        part.clock.lap("read")

    def _tokenize_negatives(self, tokenizer: Tokenizer, part: _Part) -> None:
        """Tokenize the negative captions in one call."""
        assert self._negatives is not None
        self._negative_tokens = self._negatives.encode(tokenizer, self._places, len(self._step.rows))
        part.clock.lap("tokenize")

    def _entry(self, i: int, stage: Stage, error: BadSample) -> LedgerEntry:
        step, samples = self._step, self._samples
        offset = samples.offset(i, "caption" if stage == "caption" else "image")
        row, shard, key = int(step.rows[self._places[i]]), samples.shard(i), samples.keys[i]
        return LedgerEntry(step.epoch, step.number, row, shard, key, offset, stage, error.reason.value, error.detail)

    def _collate(self, part: _Part) -> None:
        """Put the batch together: pixels, tokens, masks, labels, hashes and keys."""
        usable = np.zeros(len(self._step.rows), bool)
        usable[self._places] = self._usable()
        valid = torch.from_numpy(usable)
        keys = [""] * len(usable)
        for place, key in zip(self._places.tolist(), self._samples.keys, strict=True):
            keys[place] = key
        images: Any = self._pixels.entries(valid)
        self._batch = batch = Batch(
            **images,
            valid=valid,
            rows=torch.from_numpy(self._step.rows.copy()),
            keys=keys,
        )
        if self._spec.tokenizer is not None:
            # The text of a row without its image is not given: a loss that forgets `valid` must not train on it.
            self._input_ids[~usable] = self._spec.tokenizer.pad_id
            self._attention_mask[~usable] = 0
            # Attention over no token is NaN, and NaN reaches the gradient though the loss masks the row.
            self._attention_mask[:, 0] = 1
            batch["input_ids"] = torch.from_numpy(self._input_ids)
            batch["attention_mask"] = torch.from_numpy(self._attention_mask)
        if self._labels:
            batch["labels"] = self._spread(self._samples.labels(), fill=-1)
        if self._spec.add_captions:
            batch["captions"] = self._captions
            if (chosen := self._samples.chosen_captions()) is not None:
                batch["caption_numbers"] = self._spread(chosen.numbers, fill=-1)
                if chosen.sources is not None:
                    sources = [""] * len(usable)
                    for place, name in zip(self._places.tolist(), chosen.sources, strict=True):
                        sources[place] = name
                    batch["caption_sources"] = sources
        if self._spec.add_hashes:
            batch["image_hash"] = self._spread(self._samples.image_hashes(), fill=0)
            if self._spec.reads_captions:
                batch["caption_hash"] = self._spread(self._text_hashes(), fill=0)
        if self._negatives is not None:
            present = self._spread(self._negatives.present().astype(np.int64), fill=0).bool()
            batch["negative_input_ids"], batch["negative_attention_mask"] = map(torch.from_numpy, self._negative_tokens)
            batch["negative_valid"] = valid & present
            if self._spec.add_hashes:
                batch["negative_caption_hash"] = self._spread(self._negatives.hashes(), fill=0)
        if self._fields is not None:
            cast("dict[str, Any]", batch).update(self._fields.entries(valid))
        part.clock.lap("collate")

    def _text_hashes(self) -> NDArray[np.int64]:
        """Hashes of the captions, int64 (n,); equal for all captions that are dropped."""
        hashes, transform = self._samples.caption_hashes(), self._spec.text_transform
        if not transform:
            return hashes
        pairs = zip(self._samples.numbers.tolist(), self._step.passes[self._places].tolist(), strict=True)
        dropped = np.array([transform.is_dropped(number=number, epoch=epoch) for number, epoch in pairs], bool)
        return np.where(dropped, EMPTY_HASH, hashes)

    def _spread(self, values: NDArray[np.int64], *, fill: int) -> Tensor:
        """Values of the samples (n,) in the rows of the batch (B,); `fill` in padding rows."""
        spread = np.full(len(self._step.rows), fill, np.int64)
        spread[self._places] = values
        return torch.from_numpy(spread)

    def _usable(self) -> NDArray[np.bool_]:
        """Which samples have a good image, a good caption and good fields, bool (n,)."""
        usable = np.ones(len(self._places), bool)
        usable[[*self._bad_images, *self._bad_captions, *self._bad_fields]] = False
        return usable

    def _sum_up(self) -> Stats:
        """The sums of all parts; a row counts for the worker that wrote its pixels."""
        usable, valid = self._usable(), self._batch["valid"]
        total = Stats(rows=int(valid.sum()), masked=int((~valid).sum()))
        if "attention_mask" in self._batch:
            total.tokens = int(self._batch["attention_mask"][valid].sum())
        total.token_places = total.rows * self._step.bucket.length
        for part in self._done:
            for worker in part.stats.workers.values():
                worker["rows"] = int(usable[part.written.start : part.written.stop].sum())
            total.add(part.stats)
        return total


def _split(n: int, size: int) -> list[range]:
    """0 … n-1 in ranges of at most `size`; at least one range, which may be empty."""
    return [range(i, min(i + size, n)) for i in range(0, n, max(1, size))] or [range(0)]
