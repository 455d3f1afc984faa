"""Makes a batch of samples, wherever their bytes come from: rows written in place, bad ones masked with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import BadSample, ConfigError, DataError, LoadError
from mmdata.loader.extra import ExtraTexts
from mmdata.loader.ledger import LedgerEntry, Stage
from mmdata.loader.pixels import Images, Patches, batch_pixels
from mmdata.loader.slots import SlotRing
from mmdata.loader.stats import WATCH_EVERY, StageClock, Stats
from mmdata.plan import Bucket
from mmdata.shards.cache import Interrupted
from mmdata.transform.pixels import EncodedImage, PixelTransform
from mmdata.transform.text import Tokenizer

Tokens = tuple[NDArray[np.int64], NDArray[np.int64]]
"""input_ids and attention_mask."""


def worker_threads(count: int) -> ThreadPoolExecutor:
    """Threads to make batches in, each with one thread of torch: more would compete with the other workers' cores.

    The caller's own number of threads stays as it is.
    """
    return ThreadPoolExecutor(
        count, thread_name_prefix="mmdata-worker", initializer=torch.set_num_threads, initargs=(1,)
    )


@dataclass(frozen=True)
class Task:
    """One rank's part of one step.

    Attributes:
        epoch, step: which.
        bucket: shape of the batch.
        rows: int64 (B,), -1 where the batch is filled up.
        passes: int64 (B,), which pass over its dataset each row is in: decides its caption and its crop.
    """

    epoch: int
    step: int
    bucket: Bucket
    rows: NDArray[np.int64]
    passes: NDArray[np.int64]


@dataclass(frozen=True)
class Made:
    """A batch, and what happened while it was made."""

    batch: Batch
    masked: list[LedgerEntry]
    stats: Stats


class Samples(Protocol):
    """The n samples of a task, for its rows that are not -1, in that order; i is 0 … n-1."""

    @property
    def keys(self) -> Sequence[str]:
        """n keys."""
        ...

    def shard(self, i: int) -> str:
        """Name of the shard, for messages."""
        ...

    def offset(self, i: int, kind: Literal["image", "caption"]) -> int:
        """Of a member in its shard, in bytes; -1: unknown."""
        ...

    def image(self, i: int) -> EncodedImage:
        """The image, not yet decoded."""
        ...

    def caption(self, i: int) -> str:
        """The caption chosen for this epoch; raises BadSample."""
        ...

    def labels(self) -> NDArray[np.int64]:
        """int64 (n,), -1 where a sample has none."""
        ...

    def image_hashes(self) -> NDArray[np.int64]:
        """int64 (n,)."""
        ...

    def caption_hashes(self) -> NDArray[np.int64]:
        """Of the chosen captions, int64 (n,)."""
        ...


class Assembler:
    """Makes batches. One serves many threads at once.

    Args:
        tokenizer: for the captions.
        transform: for the pixels.
        hashes: add image_hash and caption_hash to the batches.
        slots: lends the memory of pixels; default: memory of this process.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        transform: PixelTransform,
        *,
        hashes: bool = False,
        slots: SlotRing | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.transform = transform
        self._hashes = hashes
        self._slots = slots or SlotRing()

    def make(self, task: Task, samples: Samples, *, labels: bool, extra: ExtraTexts | None = None) -> Made:
        """Make a batch.

        Args:
            task: what is to be made.
            samples: of its rows.
            labels: whether the batch has them.
            extra: further captions, if it has those.

        Raises:
            DataError: a shard is not the one that was indexed.
            LoadError: anything else that is no fault of a sample; names where it happened.
        """
        places = np.flatnonzero(task.rows >= 0)
        rows = _Rows(self, task, samples, places)
        try:
            pixels = batch_pixels(task.bucket, len(task.rows), self._slots, self.transform)
            rows.write_pixels(pixels)
            (input_ids, attention_mask), further = rows.tokenize(extra)
        except (DataError, ConfigError, Interrupted):
            raise  # they name their file; nobody waits for what was interrupted
        except Exception as error:
            raise LoadError(rows.explain(error)) from error
        usable = np.zeros(len(task.rows), bool)
        usable[places] = rows.usable
        rows.count(usable, attention_mask)
        valid = torch.from_numpy(usable)
        batch = Batch(
            **pixels.entries(valid),
            input_ids=torch.from_numpy(input_ids),
            attention_mask=torch.from_numpy(attention_mask),
            valid=valid,
            rows=torch.from_numpy(task.rows.copy()),
            keys=rows.spread_keys(),
        )
        if labels:
            batch["labels"] = rows.spread(samples.labels(), fill=-1)
        if self._hashes:
            batch["image_hash"] = rows.spread(samples.image_hashes(), fill=0)
            batch["caption_hash"] = rows.spread(samples.caption_hashes(), fill=0)
        if extra is not None:
            there = rows.spread(np.array([text is not None for text in extra.texts], np.int64), fill=0)
            batch["extra_input_ids"], batch["extra_attention_mask"] = map(torch.from_numpy, further)
            batch["extra_valid"] = valid & there.bool()
            if self._hashes:
                batch["extra_caption_hash"] = rows.spread(extra.hashes(), fill=0)
        rows.clock.lap("collate")
        rows.clock.stop()
        return Made(batch, rows.masked, rows.stats)


class _Rows:
    """The rows of one task that are not filled up, while their batch is made.

    Attributes:
        usable: bool (n,); False from the moment at which a row turned out bad.
        masked: the ledger's lines for those.
        stats: of this batch.
        clock: measures for them.
    """

    def __init__(self, assembler: Assembler, task: Task, samples: Samples, places: NDArray[np.int64]) -> None:
        self._assembler = assembler
        self._task = task
        self._samples = samples
        self._places = places  # (n,) positions in the batch
        self.usable = np.ones(len(places), bool)
        self.masked: list[LedgerEntry] = []
        self.stats = Stats()
        self.clock = StageClock(self.stats)
        self._at: int | None = None  # the sample that is worked at

    def explain(self, error: Exception) -> str:
        """Where an error happened, what it is, and how to see it again."""
        task, samples, i = self._task, self._samples, self._at
        words = f"epoch {task.epoch}, step {task.step}"
        if i is None:
            first = task.rows[self._places[:1]].tolist()
            return f"{words}, {len(self._places)} rows, the first {first}: {type(error).__name__}: {error}"
        row = int(task.rows[self._places[i]])
        words = f"{words}, shard '{samples.shard(i)}', sample '{samples.keys[i]}': {type(error).__name__}: {error}"
        in_index = samples.offset(i, "image") >= 0
        return f"{words}; `mmdata replay CONFIG {row} --epoch {task.epoch}` makes it alone" if in_index else words

    def write_pixels(self, pixels: Images | Patches) -> None:
        """Decode and crop each row into its place."""
        clock = self.clock
        clock.lap("collate")
        for i, place in enumerate(self._places.tolist()):
            self._at = i
            clock.watch(i % WATCH_EVERY == 0)
            image = self._samples.image(i)
            self.stats.read_bytes += len(image.data)
            clock.lap("read")
            stage: Stage = "decode"
            try:
                epoch = int(self._task.passes[place])
                whole = pixels.decode(image, epoch=epoch)
                clock.lap("decode")
                stage = "transform"
                pixels.write(whole, place, number=image.number, epoch=epoch)
            except BadSample as error:
                self._mask(i, stage, error)
            clock.lap(stage)
        clock.watch(True)
        self._at = None

    def tokenize(self, extra: ExtraTexts | None) -> tuple[Tokens, Tokens]:
        """input_ids and attention_mask, int64 (B, L) each, of the captions and of the extra ones, in one call.

        Every row has at least one unmasked position.
        """
        captions = [self._caption(i) for i in range(len(self._places))]
        self._at = None
        self.clock.lap("read")
        length, extra_length = self._task.bucket.length, extra.length if extra else 0
        there = [i for i, text in enumerate(extra.texts) if text is not None] if extra else []
        captions += [extra.texts[i] or "" for i in there] if extra else []
        encoded = self._assembler.tokenizer.encode(captions, max(length, extra_length))
        own = slice(len(self._places))
        tokens = self._place(encoded, own, self._places, length)
        further = self._place(encoded, slice(own.stop, None), self._places[there], extra_length)
        self.clock.lap("tokenize")
        return tokens, further

    def _place(self, encoded: Tokens, texts: slice, places: NDArray[np.int64], length: int) -> Tokens:
        """Some of the encoded texts at their places in the batch: (B, length) each."""
        shape = (len(self._task.rows), length)
        input_ids = np.full(shape, self._assembler.tokenizer.pad_id, np.int64)
        attention_mask = np.zeros(shape, np.int64)
        input_ids[places], attention_mask[places] = (tokens[texts, :length] for tokens in encoded)
        # Attention over no position at all is NaN, and NaN reaches the gradient even where the loss masks the row.
        attention_mask[:, :1] = 1
        return input_ids, attention_mask

    def spread(self, values: NDArray[np.int64], *, fill: int) -> Tensor:
        """Values of the samples (n,) at their places in the batch (B,)."""
        spread = np.full(len(self._task.rows), fill, np.int64)
        spread[self._places] = values
        return torch.from_numpy(spread)

    def spread_keys(self) -> list[str]:
        """B keys."""
        keys = [""] * len(self._task.rows)
        for place, key in zip(self._places.tolist(), self._samples.keys, strict=True):
            keys[place] = key
        return keys

    def count(self, valid: NDArray[np.bool_], attention_mask: NDArray[np.int64]) -> None:
        """Account for rows and padding."""
        self.stats.rows, self.stats.masked = int(valid.sum()), int((~valid).sum())
        self.stats.tokens = int(attention_mask[valid].sum())
        self.stats.token_places = int(valid.sum()) * self._task.bucket.length

    def _caption(self, i: int) -> str:
        self._at = i
        try:
            return self._samples.caption(i)
        except BadSample as error:
            self._mask(i, "caption", error)
            return ""

    def _mask(self, i: int, stage: Stage, error: BadSample) -> None:
        if not self.usable[i]:
            return  # image and caption both bad: one line for the row
        self.usable[i] = False
        task, samples = self._task, self._samples
        offset = samples.offset(i, "caption" if stage == "caption" else "image")
        row, shard, key = int(task.rows[self._places[i]]), samples.shard(i), samples.keys[i]
        reason = error.reason.value
        self.masked.append(LedgerEntry(task.epoch, task.step, row, shard, key, offset, stage, reason, error.detail))
