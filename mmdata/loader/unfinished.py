"""A batch in progress: its rows are written in units that threads share, then it is collated.

One unit writes each row, and a row depends on its own sample alone, so the batch does not depend on which thread does
which unit, or when. A row that cannot be used is masked, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import BadSample, ConfigError, DataError, Interrupted, LoadError
from mmdata.hashing import EMPTY_HASH
from mmdata.loader.entries.pixels import BatchPixels
from mmdata.loader.entries.targets import TargetEntries
from mmdata.loader.ledger import STAGES, LedgerEntry, Stage
from mmdata.loader.stats import WATCH_EVERY, StageClock, Stats
from mmdata.loader.workers.threads import Work
from mmdata.plan import Step

if TYPE_CHECKING:
    from mmdata.loader.builder import BatchBuilder

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


Write = Callable[[range, StageClock], None]
"""Writes some samples into the batch."""


class UnfinishedBatch:
    """A batch in progress: units that threads share; the thread that does the last one collates the batch.

    Its samples are numbered 0 … n-1, in the order of their rows in the batch.

    Args:
        builder: says what batches are made of, and reads the samples.
        step: the rows of the batch; -1 where a row is padding.
        stop: once it is set, reads raise Interrupted.

    Its work raises:
        DataError: a shard is not the one that was indexed.
        LoadError: any other error that is not a sample's fault; names epoch, step, shard and sample.
    """

    def __init__(self, builder: BatchBuilder, step: Step, stop: Event | None) -> None:
        spec = builder.spec
        self._spec, self._step, self._has_labels = spec, step, builder.index.has_labels
        self._places = np.flatnonzero(step.rows >= 0)  # (n,) positions in the batch
        self._samples = builder.read(step.rows[self._places], step.passes[self._places], stop)
        fields, num_rows = spec.fields, len(step.rows)
        self._fields = fields.begin(num_rows, builder.store, stop) if fields and fields.members else None
        self._targets = None
        if spec.targets:
            rows = step.rows[self._places]
            self._targets = TargetEntries(spec.targets, builder.index, builder.store, rows, step=step, stop=stop)
        self._negatives: dict[str, Tensor] = {}
        self._bad: list[tuple[int, LedgerEntry]] = []  # sample and fault; a sample may have several
        self._done: list[Stats] = []
        shape = (len(step.rows), step.bucket.length)
        self._input_ids = np.full(shape, spec.tokenizer.pad_id if spec.tokenizer else 0, np.int64)
        self._attention_mask = np.zeros(shape, np.int64)
        self._texts = [""] * len(step.rows)
        try:
            self._pixels = BatchPixels(step.bucket, len(step.rows), builder.buffers, spec.transform)
        except MemoryError as error:
            raise LoadError(self._explain(error, None)) from error

    def work(self) -> Work:
        """The batch as work that threads share; the longest units come first."""
        n = len(self._places)
        rows = _split(n, min(UNIT_ROWS, -(-n // MIN_UNITS)))
        parts: list[tuple[Write, list[range]]] = [
            (self._tokenize_negatives, [range(0)] if self._spec.negatives else []),
            (self._write_texts, _split(n, CAPTIONS_PER_CALL) if self._spec.tokenizer else []),
            (self._write_fields, rows if self._fields else []),
            (self._write_pixels, rows),
        ]
        return Work([partial(self._do, write, samples) for write, split in parts for samples in split], self._finish)

    def _do(self, write: Write, samples: range) -> None:
        """Write some samples."""
        with self._timed() as clock:
            write(samples, clock)

    @contextmanager
    def _timed(self) -> Generator[StageClock]:
        """The clock of a part of the work; an error names the sample on which it is."""
        clock = StageClock()
        try:
            yield clock
        except (DataError, ConfigError, Interrupted):  # they name their file, or no caller waits for the batch
            raise
        except Exception as error:
            raise LoadError(self._explain(error, clock.current)) from error
        clock.stop()
        self._done.append(clock.stats)

    def _each(self, samples: range, clock: StageClock) -> Iterator[tuple[int, int]]:
        """Number and place in the batch of each sample."""
        for i in samples:
            clock.current = i
            # Processor time costs a system call: sample it.
            clock.watch((i - samples.start) % WATCH_EVERY == 0)
            yield i, int(self._places[i])
        clock.current = None
        clock.watch(True)

    def _write_pixels(self, samples: range, clock: StageClock) -> None:
        """Read each image and its targets, decode it, and write its crop into its row of the batch."""
        clock.lap("collate")
        for i, place in self._each(samples, clock):
            stage: Stage = "read"
            epoch = int(self._step.passes[place])
            try:
                image = kept = self._samples.kept_image(i)
                if image is None:
                    image = self._samples.image(i)
                    clock.stats.read_bytes += len(image.data)
                stage = "field"
                objects = self._targets and self._targets.read(i, clock.stats.boxes)
                clock.lap("read")
                stage = "decode"
                decoded = self._pixels.decode(image, epoch=epoch, regions=objects)
                if kept is None:
                    self._samples.keep(i, decoded)
                clock.lap("decode")
                stage = "transform"
                written = self._pixels.write(decoded, place, number=image.number, epoch=epoch, regions=objects)
                if self._targets and objects and written.followed:
                    cut = self._targets.write(place, objects, written.followed, clock.stats.boxes)
                    clock.stats.cut += cut
                clock.stats.rows += 1
            except BadSample as error:
                self._mask(i, stage, error)
            clock.lap("read" if stage == "field" else stage)

    def _write_texts(self, samples: range, clock: StageClock) -> None:
        """Read each caption, make its text, and tokenize these in one call."""
        transform, tokenizer = self._spec.text_transform, self._spec.tokenizer
        assert tokenizer is not None, "else there is no such work"
        for i, place in self._each(samples, clock):
            try:
                caption = self._samples.caption(i)
                if transform:
                    clock.lap("read")
                    number, epoch = int(self._samples.rows[i]), int(self._step.passes[place])
                    caption = transform(caption, number=number, epoch=epoch)
                self._texts[place] = caption
            except BadSample as error:
                self._mask(i, "caption", error)
            clock.lap("transform" if transform else "read")
        places = self._places[samples.start : samples.stop]
        texts, length = [self._texts[place] for place in places.tolist()], self._step.bucket.length
        if transform.has_function:
            ids, mask, clock.stats.cut = tokenizer.encode_cut(texts, length)
            if clock.stats.cut:
                transform.warn_of_cut()
        else:  # the plan knows the captions in their template: they fit
            ids, mask = tokenizer.encode(texts, length)
        self._input_ids[places], self._attention_mask[places] = ids, mask
        clock.lap("tokenize")

    def _tokenize_negatives(self, samples: range, clock: StageClock) -> None:
        """Choose the negative captions, and tokenize them in one call."""
        spec, step = self._spec, self._step
        assert spec.negatives is not None
        self._negatives = spec.negatives.entries(step.rows, step.passes)
        clock.lap("tokenize")

    def _write_fields(self, samples: range, clock: StageClock) -> None:
        """Read the values in members of the samples."""
        assert self._fields is not None
        for i, place in self._each(samples, clock):
            try:
                self._fields.write(int(self._step.rows[place]), place)
            except BadSample as error:
                self._mask(i, "field", error)
        clock.lap("read")

    def _finish(self) -> LoadedBatch:
        """The batch, its masked rows and its clock; called when all units are done."""
        # One entry for a sample with several faults, that of the first stage.
        masked: dict[int, LedgerEntry] = {}
        for i, entry in sorted(self._bad, key=lambda bad: (bad[0], STAGES.index(bad[1].stage))):
            masked.setdefault(i, entry)
        usable = np.ones(len(self._places), bool)
        usable[list(masked)] = False
        with self._timed() as clock:
            batch = self._collate(usable)
            clock.lap("collate")
        # A thread may hold its unit, and so this object, for a moment longer: it must not keep the batch's memory.
        del self._pixels
        return LoadedBatch(batch, list(masked.values()), self._sum_up(batch), self._step.mark)

    def _collate(self, usable: NDArray[np.bool_]) -> Batch:
        """The batch; `usable`, bool (n,), says which samples it is of."""
        spec, read = self._spec, self._samples
        valid = self._spread(usable.astype(np.int64), fill=0).bool()
        entries: dict[str, Any] = {
            **self._pixels.entries(valid),
            "valid": valid,
            "rows": torch.from_numpy(self._step.rows.copy()),
            "keys": self._spread_texts(read.keys),
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
            entries["labels"] = self._spread(read.column("label"), fill=-1)
        entries["image_hash"] = self._spread(read.column("image_hash"), fill=0)
        if spec.tokenizer is not None:
            entries["caption_hash"] = self._spread(self._text_hashes(), fill=0)
            entries["captions"] = self._texts
            entries["caption_numbers"] = self._spread(read.chosen.position, fill=-1)
            if spec.captions is not None:
                entries["caption_sources"] = self._spread_texts(read.caption_sources())
        if self._negatives:
            self._negatives["negative_valid"] &= valid
            entries.update(self._negatives)
        if self._targets is not None:
            entries.update(self._targets.entries(valid))
        if self._fields is not None:
            entries.update(self._fields.entries(valid))
        return cast(Batch, entries)

    def _text_hashes(self) -> NDArray[np.int64]:
        """Hashes of the captions, int64 (n,); equal for all captions that are dropped."""
        hashes, transform, rows = self._samples.caption_hashes(), self._spec.text_transform, self._samples.rows
        if transform:
            pairs = zip(rows.tolist(), self._step.passes[self._places].tolist(), strict=True)
            dropped = np.array([transform.is_dropped(number=number, epoch=epoch) for number, epoch in pairs], bool)
            hashes = np.where(dropped, EMPTY_HASH, hashes)
        return hashes if self._spec.equal_captions is None else self._spec.equal_captions(rows, hashes)

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

    def _sum_up(self, batch: Batch) -> Stats:
        """The sums of all parts."""
        total = Stats()
        for stats in self._done:
            total.add(stats)
        valid = batch["valid"]
        total.rows, total.masked = int(valid.sum()), int((~valid).sum())
        if "attention_mask" in batch:
            total.tokens = int(batch["attention_mask"][valid].sum())
        total.token_places = total.rows * self._step.bucket.length
        return total

    def _mask(self, i: int, stage: Stage, error: BadSample) -> None:
        step, samples = self._step, self._samples
        offset = samples.offset(i, "caption" if stage == "caption" else "image")
        row, shard, key = int(step.rows[self._places[i]]), samples.shard(i), samples.keys[i]
        reason, detail = error.reason.value, error.detail
        self._bad.append((i, LedgerEntry(step.epoch, step.number, row, shard, key, offset, stage, reason, detail)))

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
