"""A batch in progress: its rows are written in units that threads share, then it is collated.

One unit writes each row, and a row depends on its own sample alone, so the batch does not depend on which thread does
which unit, or when. A row that cannot be used is masked, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import BadSample, ConfigError, DataError, Interrupted, LoadError
from mmdata.hashing import EMPTY_HASH
from mmdata.images.pillow import name_warnings, sample_name
from mmdata.loader.image_buffers import batch_pixels
from mmdata.loader.ledger import STAGES, LedgerEntry, Stage
from mmdata.loader.member_fields import FieldEntries
from mmdata.loader.reader import RowReader
from mmdata.loader.stats import WATCH_EVERY, StageClock, Stats
from mmdata.loader.workers.buffers import BufferPool
from mmdata.loader.workers.work import Work
from mmdata.plan import Step
from mmdata.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mmdata.loader.builder import BatchSpec

UNIT_ROWS = 16
"""Rows of a unit, at most: about 10 ms of work, for which the clock and the queue cost 20 µs."""
MIN_UNITS = 16
"""A small batch is cut into this many units nevertheless, so that up to 16 threads share it."""
CAPTIONS_PER_CALL = 256
"""Captions tokenized in one call: it takes about as long as a unit of photos. With 1,024 the batch waits for it."""


@dataclass(frozen=True)
class LoadedBatch:
    """A batch, its masked rows, the clock of the workers that made it, and the mark of its step."""

    batch: Batch
    masked: list[LedgerEntry]
    stats: Stats
    mark: dict[str, Any] | None = None


class _BatchPart:
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

    def begin(self, i: int) -> None:
        """Begin with sample i."""
        self.current = i
        # Processor time costs a system call: sample it.
        self.clock.watch((i - self.samples.start) % WATCH_EVERY == 0)


class UnfinishedBatch:
    """A batch in progress: units that threads share; the thread that does the last one collates the batch.

    Its samples are numbered 0 … n-1, in the order of their rows in the batch.

    Args:
        spec: what batches are made of.
        step: the rows of the batch; -1 where a row is padding.
        samples: of the rows that are not -1.
        buffers: lends the memory of pixels.
        has_labels: whether the batch has labels.
        fields: entries of the batch that lie in members of the samples; None: there are none.

    Its work raises:
        DataError: a shard is not the one that was indexed.
        LoadError: any other error that is not a sample's fault; names epoch, step, shard and sample.
    """

    def __init__(
        self,
        spec: BatchSpec,
        step: Step,
        samples: RowReader,
        *,
        buffers: BufferPool,
        has_labels: bool,
        fields: FieldEntries | None = None,
    ) -> None:
        self._spec, self._step, self._samples, self._has_labels = spec, step, samples, has_labels
        self._fields = fields
        self._negatives: dict[str, Tensor] = {}
        self._places = np.flatnonzero(step.rows >= 0)  # (n,) positions in the batch
        self._bad: list[tuple[int, LedgerEntry]] = []  # sample and fault; a sample may have several
        self._done: list[_BatchPart] = []
        self._failed = False  # a part has raised: the other parts return early
        shape = (len(step.rows), step.bucket.length)
        self._input_ids = np.full(shape, spec.tokenizer.pad_id if spec.tokenizer else 0, np.int64)
        self._attention_mask = np.zeros(shape, np.int64)
        self._texts = [""] * len(step.rows)
        self._guard(partial(self._lend_pixels, buffers), _BatchPart(range(0)))

    def work(self) -> Work[LoadedBatch]:
        """The batch as work that threads share; the longest units come first."""
        n = len(self._places)
        rows = _split(n, min(UNIT_ROWS, -(-n // MIN_UNITS)))
        parts: list[tuple[Callable[[_BatchPart], None], list[range]]] = [
            (self._tokenize_negatives, [range(0)] if self._spec.negatives and self._spec.tokenizer else []),
            (self._write_texts, _split(n, CAPTIONS_PER_CALL) if self._spec.reads_captions else []),
            (self._write_fields, rows if self._fields else []),
            (self._write_pixels, rows),
        ]
        return Work([partial(self._do, write, samples) for write, split in parts for samples in split], self._finish)

    def _do(self, work: Callable[[_BatchPart], None], samples: range) -> None:
        """Do a part of the work, timed by a clock of its own."""
        part = _BatchPart(samples)
        self._guard(work, part)
        part.clock.stop()
        self._done.append(part)

    def _guard(self, work: Callable[[_BatchPart], None], part: _BatchPart) -> None:
        """Do a part of the work, and name the sample of an error; does nothing if another part has failed."""
        if self._failed:
            return
        try:
            with name_warnings(lambda: self._name(part)):
                work(part)
        except BaseException as error:
            self._failed = True
            # DataError and ConfigError name their file; after Interrupted no caller waits for the batch.
            if isinstance(error, (DataError, ConfigError, Interrupted)) or not isinstance(error, Exception):
                raise
            raise LoadError(self._explain(error, part.current)) from error

    def _lend_pixels(self, buffers: BufferPool, part: _BatchPart) -> None:
        """Borrow the memory for the pixels."""
        self._pixels = batch_pixels(self._step.bucket, len(self._step.rows), buffers, self._spec.transform)

    def _write_pixels(self, part: _BatchPart) -> None:
        """Read each image, decode it, and write its crop into its row of the batch."""
        part.clock.lap("collate")
        for i in part.samples:
            if self._failed:
                return
            part.begin(i)
            stage: Stage = "read"
            place = int(self._places[i])
            try:
                image = self._samples.image(i)
                part.stats.read_bytes += len(image.data)
                part.clock.lap("read")
                stage = "decode"
                epoch = int(self._step.passes[place])
                decoded = self._pixels.decode(image, epoch=epoch)
                part.clock.lap("decode")
                stage = "transform"
                self._pixels.write(decoded, place, number=image.number, epoch=epoch)
            except BadSample as error:
                self._mask(i, stage, error)
            part.clock.lap(stage)
        part.written = part.samples

    def _write_texts(self, part: _BatchPart) -> None:
        """Read each caption, make its text, and tokenize these in one call if there is a tokenizer."""
        transform = self._spec.text_transform
        for i in part.samples:
            if self._failed:
                return
            part.begin(i)
            place = int(self._places[i])
            try:
                caption = self._samples.caption(i)
                if transform:
                    part.clock.lap("read")
                    number, epoch = int(self._samples.numbers[i]), int(self._step.passes[place])
                    caption = transform(caption, number=number, epoch=epoch)
                self._texts[place] = caption
            except BadSample as error:
                self._mask(i, "caption", error)
            part.clock.lap("transform" if transform else "read")
        part.current = None
        part.clock.watch(True)
        if self._spec.tokenizer is not None:
            self._tokenize(self._spec.tokenizer, self._places[part.samples.start : part.samples.stop], part)
            part.clock.lap("tokenize")

    def _tokenize(self, tokenizer: Tokenizer, places: NDArray[np.int64], part: _BatchPart) -> None:
        texts, length = [self._texts[place] for place in places.tolist()], self._step.bucket.length
        if self._spec.text_transform.has_function:
            ids, mask, part.stats.cut = tokenizer.encode_cut(texts, length)
            if part.stats.cut:
                self._spec.text_transform.warn_of_cut()
        else:  # the plan knows the captions in their template: they fit
            ids, mask = tokenizer.encode(texts, length)
        self._input_ids[places], self._attention_mask[places] = ids, mask

    def _tokenize_negatives(self, part: _BatchPart) -> None:
        """Choose the negative captions, and tokenize them in one call."""
        spec, step = self._spec, self._step
        assert spec.negatives is not None
        assert spec.tokenizer is not None
        self._negatives = spec.negatives.entries(spec.tokenizer, step.rows, step.passes, add_hashes=spec.add_hashes)
        part.clock.lap("tokenize")

    def _write_fields(self, part: _BatchPart) -> None:
        """Read the values in members of the samples."""
        assert self._fields is not None
        for i in part.samples:
            if self._failed:
                return
            part.begin(i)
            place = int(self._places[i])
            try:
                self._fields.write(int(self._step.rows[place]), place)
            except BadSample as error:
                self._mask(i, "field", error)
        part.clock.lap("read")

    def _finish(self) -> LoadedBatch:
        """The batch, its masked rows and its clock; called when all units are done."""
        # One entry for a sample with several faults, that of the first stage.
        masked: dict[int, LedgerEntry] = {}
        for i, entry in sorted(self._bad, key=lambda bad: (bad[0], STAGES.index(bad[1].stage))):
            masked.setdefault(i, entry)
        usable = np.ones(len(self._places), bool)
        usable[list(masked)] = False
        self._do(partial(self._collate, usable), range(0))
        made = LoadedBatch(self._batch, list(masked.values()), self._sum_up(usable), self._step.mark)
        # A thread may hold its unit, and so this object, for a moment longer: it must not keep the batch's memory.
        del self._batch, self._pixels
        return made

    def _collate(self, usable: NDArray[np.bool_], part: _BatchPart) -> None:
        """Put the batch together; `usable`, bool (n,), says which samples it is of."""
        spec, samples = self._spec, self._samples
        valid = self._spread(usable.astype(np.int64), fill=0).bool()
        entries: dict[str, Any] = {
            **self._pixels.entries(valid),
            "valid": valid,
            "rows": torch.from_numpy(self._step.rows.copy()),
            "keys": self._spread_texts(samples.keys),
        }
        if spec.tokenizer is not None:
            # The text of a row without its image is not given: a loss that forgets `valid` must not train on it.
            self._input_ids[~valid.numpy()] = spec.tokenizer.pad_id
            self._attention_mask[~valid.numpy()] = 0
            # Attention over no token is NaN, and NaN reaches the gradient though the loss masks the row.
            self._attention_mask[:, 0] = 1
            entries["input_ids"] = torch.from_numpy(self._input_ids)
            entries["attention_mask"] = torch.from_numpy(self._attention_mask)
        if self._has_labels:
            entries["labels"] = self._spread(samples.labels(), fill=-1)
        if spec.add_captions:
            entries["captions"] = self._texts
            chosen = samples.chosen_captions()
            entries["caption_numbers"] = self._spread(chosen.numbers, fill=-1)
            if chosen.sources is not None:
                entries["caption_sources"] = self._spread_texts(chosen.sources)
        if spec.add_hashes:
            entries["image_hash"] = self._spread(samples.image_hashes(), fill=0)
            if spec.reads_captions:
                entries["caption_hash"] = self._spread(self._text_hashes(), fill=0)
        if self._negatives:
            self._negatives["negative_valid"] &= valid
            entries.update(self._negatives)
        if self._fields is not None:
            entries.update(self._fields.entries(valid))
        self._batch = cast(Batch, entries)
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

    def _spread_texts(self, texts: Any) -> list[str]:
        """Texts of the samples in the rows of the batch; "" in padding rows."""
        spread = [""] * len(self._step.rows)
        for place, text in zip(self._places.tolist(), texts, strict=True):
            spread[place] = text
        return spread

    def _sum_up(self, usable: NDArray[np.bool_]) -> Stats:
        """The sums of all parts; a row counts for the worker that wrote its pixels."""
        valid = self._batch["valid"]
        total = Stats(rows=int(valid.sum()), masked=int((~valid).sum()))
        if "attention_mask" in self._batch:
            total.tokens = int(self._batch["attention_mask"][valid].sum())
        total.token_places = total.rows * self._step.bucket.length
        for part in self._done:
            for worker in part.stats.workers.values():
                worker["rows"] = int(usable[part.written.start : part.written.stop].sum())
            total.add(part.stats)
        return total

    def _mask(self, i: int, stage: Stage, error: BadSample) -> None:
        step, samples = self._step, self._samples
        offset = samples.offset(i, "caption" if stage == "caption" else "image")
        row, shard, key = int(step.rows[self._places[i]]), samples.shard(i), samples.keys[i]
        reason, detail = error.reason.value, error.detail
        self._bad.append((i, LedgerEntry(step.epoch, step.number, row, shard, key, offset, stage, reason, detail)))

    def _name(self, part: _BatchPart) -> str:
        """Name of the sample in progress, for the warnings of a decoder."""
        i = part.current
        return "" if i is None else sample_name(self._samples.shard(i), self._samples.keys[i])

    def _explain(self, error: Exception, i: int | None) -> str:
        """The message of a LoadError: where the error happened, what it is, and the command that repeats it."""
        step, samples = self._step, self._samples
        where = f"epoch {step.epoch}, step {step.number}"
        if i is None:
            first = step.rows[self._places[:1]].tolist()
            return f"{where}, {len(self._places)} rows, the first {first}: {type(error).__name__}: {error}"
        row = int(step.rows[self._places[i]])
        message = f"{where}, shard '{samples.shard(i)}', sample '{samples.keys[i]}': {type(error).__name__}: {error}"
        if step.mark is not None:  # a stream's: it has no index to find the row in
            return message
        return f"{message}; `mmdata replay CONFIG {row} --epoch {step.epoch}` makes this row alone"


def _split(n: int, size: int) -> list[range]:
    """0 … n-1 in ranges of at most `size`; at least one range, which may be empty."""
    return [range(i, min(i + size, n)) for i in range(0, n, max(1, size))] or [range(0)]
