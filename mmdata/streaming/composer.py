"""A pass over a stream as a sequence of steps: a bounded buffer, bucketed as samples flow through it.

A step depends only on the samples and their order, the settings, the epoch, rank and world size; nothing here decodes
an image or looks at a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypedDict

import numpy as np

from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.loader.ledger import LedgerEntry
from mmdata.plan import (
    Bucket,
    BucketPolicy,
    LengthAspectPolicy,
    NativePolicy,
    Shapes,
    Step,
    choose_captions,
    choose_lengths,
)
from mmdata.plan.bucket_queues import fill_up
from mmdata.plan.buckets import merge_groups
from mmdata.seeding import Purpose, permutation, random_raw
from mmdata.streaming.position import Place
from mmdata.streaming.samples import Dropped, StreamSample, Waiting, WaitingSamples
from mmdata.transform.image import oriented_size
from mmdata.transform.text import Tokenizer

BUFFER_ROWS = 4096
BUFFER_BYTES = 2**29
"""The buffer of a shuffled stream is full at this many samples or encoded bytes, whichever comes first; it always
holds enough for one batch of some bucket."""

CHUNK_ROWS = 256
"""Captions are counted, and shapes assigned, this many at a time."""


@dataclass(frozen=True)
class StreamStep:
    """A batch to be made, and the samples that were dropped since the batch before it.

    Attributes:
        place: after it.
        labels: the batch has them: a sample of the pass had one by now.
    """

    step: Step
    place: Place
    samples: WaitingSamples
    labels: bool
    dropped: list[LedgerEntry]


class Composer:
    """Makes steps of samples.

    Args:
        data: settings.
        tokenizer: counts the captions' tokens.
        rank: 0 … world_size-1.
        world_size: processes that share a global batch; each makes its part of it from shards of its own.

    Attributes:
        lengths: text bounds; None until the first buffer is full, where they are to be chosen from it; kept from then
            on, so that later passes have the same shapes.
        policy: the buckets; None as long as there are no `lengths`.

    Raises:
        ConfigError: a setting needs an index.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, *, rank: int, world_size: int) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.rank, self.world_size = rank, world_size
        self.batch_size = data.global_batch_size // world_size
        _refuse_planned(data)
        assert data.image_buckets != "auto"
        self._image_shapes = data.image_buckets or [(data.image_size, data.image_size)]
        self.lengths: list[int] | None = None
        self.policy: BucketPolicy | None = None
        if isinstance(data.text_buckets, list):
            self.use_lengths(data.text_buckets)
        num_lengths = len(self.lengths or []) or data.num_text_buckets
        num_buckets = num_lengths * len(data.image_patches or self._image_shapes)
        # With this many samples one bucket at least holds a batch, and there is a choice of about as many again.
        self.buffer_rows = max(BUFFER_ROWS, 2 * num_buckets * self.batch_size)

    def use_lengths(self, lengths: list[int]) -> BucketPolicy:
        """Have these text bounds from now on; returns the buckets."""
        self.lengths = lengths
        if self.data.image_patches is not None:
            self.policy = NativePolicy(lengths, self.data.image_patches, patch_size=self.data.patch_size)
        else:
            self.policy = LengthAspectPolicy(lengths, self._image_shapes)
        return self.policy

    def choose_policy(self, waiting: list[Waiting]) -> BucketPolicy:
        """Text bounds with the least padding for these captions; the last is max_length, for those to come."""
        tokens = [min(one.tokens, self.data.max_length) for one in waiting]
        return self.use_lengths(
            choose_lengths(np.bincount([*tokens, self.data.max_length]), self.data.num_text_buckets)
        )


def _refuse_planned(data: DataConfig) -> None:
    """Raise ConfigError where a setting needs a plan of all rows."""
    settings = {
        "image_buckets: auto": data.image_buckets == "auto",
        "max_shapes": data.max_shapes is not None,
        "token_budget": data.token_budget is not None,
        "groups": data.groups is not None,
        "negative_captions": data.negative_captions is not None,
        "loading.worker_type: process": data.loading.worker_type == "process",
    }
    if planned := [name for name, given in settings.items() if given]:
        raise ConfigError(
            f"data: a stream has no index to plan by, and cannot do {', '.join(planned)}; leave that out, or make an "
            "index (`mmdata index`) and use mmdata.Loader"
        )


class Pass:
    """One pass over a rank's samples.

    Args:
        composer: the settings, and what earlier passes chose.
        epoch: number of the pass, from 0; its captions and crops are those of the epoch of this number.
        dropped: samples that could not be used before it, and that no step has told of.

    Attributes:
        dropped: samples that could not be used, since the last step.
        seen: samples that came, dropped ones included.
    """

    def __init__(self, composer: Composer, epoch: int, *, dropped: list[LedgerEntry] | None = None) -> None:
        self.dropped = dropped or []
        self.seen = 0
        self._composer = composer
        self._epoch = epoch
        self._step = 0
        self._usable = 0
        self._labels = False
        self._unassigned: list[Waiting] = []  # until there is a policy
        self._queues: list[list[Waiting]] = []  # one a bucket
        self._held_rows, self._held_bytes = 0, 0  # in both

    def steps(self, samples: Iterable[StreamSample | Dropped]) -> Iterator[StreamStep]:
        """The steps of the pass; every sample that was not dropped is in one of them, once."""
        flow = iter(samples)
        while chunk := list(islice(flow, CHUNK_ROWS)):
            self.seen += len(chunk)
            self.dropped += [self._entry(one) for one in chunk if isinstance(one, Dropped)]
            self._unassigned += self._wait([one for one in chunk if isinstance(one, StreamSample)])
            if self._composer.policy or self._full():
                yield from self._assign()
        yield from self._assign()
        yield from self._finish()

    def _entry(self, bad: Dropped) -> LedgerEntry:
        reason, detail = bad.error.reason.value, bad.error.detail
        return LedgerEntry(self._epoch, self._step, -1, bad.shard, bad.key, -1, "read", reason, detail)

    def _wait(self, samples: list[StreamSample]) -> list[Waiting]:
        # The image's hash stands for the sample: it goes through its captions in turn, in whatever order it comes.
        hashes = np.asarray([sample.image_hash for sample in samples], np.int64)
        num_captions = np.asarray([len(sample.captions) for sample in samples], np.int64)
        chosen = choose_captions(hashes, num_captions, self._epoch).tolist()
        captions = [sample.captions[i] for sample, i in zip(samples, chosen, strict=True)]
        tokens = self._composer.tokenizer.count(captions)
        rank, world_size = self._composer.rank, self._composer.world_size
        rows = range(rank + self._usable * world_size, rank + (self._usable + len(samples)) * world_size, world_size)
        self._usable += len(samples)
        self._held_rows += len(samples)
        self._held_bytes += sum(len(sample.image) for sample in samples)
        return list(map(Waiting, rows, samples, captions, tokens))

    def _full(self) -> bool:
        return self._held_rows >= self._composer.buffer_rows or self._held_bytes >= BUFFER_BYTES

    def _assign(self) -> Iterator[StreamStep]:
        """Samples to their buckets, and steps of those that are full."""
        waiting, self._unassigned = self._unassigned, []
        if not waiting:
            return
        policy = self._composer.policy or self._composer.choose_policy(waiting)
        self._queues = self._queues or [[] for _ in policy.buckets]
        sizes = [oriented_size(w.sample.info.height, w.sample.info.width, w.sample.info.orientation) for w in waiting]
        height, width = np.asarray(sizes, np.int64).T
        buckets = policy.assign(Shapes(np.asarray([w.tokens for w in waiting], np.int64), height, width))
        for one, bucket in zip(waiting, buckets.tolist(), strict=True):
            self._queues[bucket].append(one)
            if not self._composer.data.shuffle and len(self._queues[bucket]) == self._composer.batch_size:
                yield self._cut(bucket)
        while self._full() and (drawn := self._draw()) is not None:
            yield self._cut(drawn)

    def _finish(self) -> Iterator[StreamStep]:
        """What is left: full batches, then the rests merged (`merge_groups`), the last one filled up."""
        while (drawn := self._draw()) is not None:
            yield self._cut(drawn)
        if not self._queues:
            return
        size = self._composer.batch_size
        for group, targets in merge_groups(self._buckets()):
            line = [(bucket, one) for bucket in group for one in self._queues[bucket]]
            for bucket in group:
                self._queues[bucket] = []
            taken = len(line) // size * size if targets else len(line)
            for begin in range(0, taken, size):
                yield self._emit(line[begin][0], [one for _, one in line[begin : begin + size]])
            target_of = dict(zip(group, targets, strict=False))  # the last group leaves nothing
            for bucket, one in line[taken:]:
                self._queues[target_of[bucket]].append(one)

    def _draw(self) -> int | None:
        """A bucket that holds a batch, by chance in proportion to its samples; None where none does."""
        full = [i for i, queue in enumerate(self._queues) if len(queue) >= self._composer.batch_size]
        if not full:
            return None
        counts = [len(self._queues[i]) for i in full]
        drawn = int(random_raw(1, purpose=Purpose.BATCH_ORDER, **self._randomness())[0]) % sum(counts)
        return full[int(np.searchsorted(np.cumsum(counts), drawn, side="right"))]

    def _cut(self, bucket: int) -> StreamStep:
        """A batch of a bucket's samples: its oldest, or some by chance."""
        size, queue = self._composer.batch_size, self._queues[bucket]
        if self._composer.data.shuffle:
            order = permutation(len(queue), purpose=Purpose.ROW_ORDER, **self._randomness()).tolist()
            queue = [queue[i] for i in order]
        self._queues[bucket] = queue[size:]
        return self._emit(bucket, queue[:size])

    def _emit(self, bucket: int, waiting: list[Waiting]) -> StreamStep:
        self._labels = self._labels or any(one.sample.label >= 0 for one in waiting)
        rows = fill_up(np.array([[one.row] for one in waiting], np.int64), self._composer.batch_size)[:, 0]
        step = Step(self._epoch, self._step, self._buckets()[bucket], rows, np.full_like(rows, self._epoch))
        dropped, self.dropped = self.dropped, []
        self._step += 1
        self._held_rows -= len(waiting)
        self._held_bytes -= sum(len(one.sample.image) for one in waiting)
        place = Place(self._epoch, self._step)
        return StreamStep(step, place, WaitingSamples(waiting), self._labels, dropped)

    def _buckets(self) -> tuple[Bucket, ...]:
        assert self._composer.policy is not None
        return tuple(self._composer.policy.buckets)

    def _randomness(self) -> _Randomness:
        position = self._step * self._composer.world_size + self._composer.rank
        return {"seed": self._composer.data.seed, "epoch": self._epoch, "position": position}


class _Randomness(TypedDict):
    seed: int
    epoch: int
    position: int
