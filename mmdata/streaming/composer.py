"""Composes the batches of a pass: samples enter a bounded buffer, are assigned to buckets, and leave it in steps.

A step depends only on the samples and their order, the settings, the number of the pass, the rank and the world size.
This file decodes no image and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from mmdata.config import DataConfig
from mmdata.config.data import sources
from mmdata.errors import ConfigError
from mmdata.images.jpeg import oriented_size
from mmdata.index.caption_lengths import counts_of
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
from mmdata.plan.buckets import merge_groups
from mmdata.plan.schedule import fill_up
from mmdata.seeding import Purpose, permutation, random_raw
from mmdata.streaming.position import PassPosition
from mmdata.streaming.samples import BatchSamples, BufferedSample, Dropped, StreamSample
from mmdata.tars.members import USUAL, Members
from mmdata.text.tokenizer import Tokenizer

BUFFER_ROWS = 4096
BUFFER_BYTES = 2**29
"""The buffer is full at BUFFER_ROWS samples or BUFFER_BYTES encoded bytes, whichever comes first. It goes above
BUFFER_BYTES if no bucket holds a batch yet."""

CHUNK_ROWS = 256
"""Samples whose captions are tokenized, and whose buckets are assigned, in one call."""


@dataclass(frozen=True)
class StreamStep:
    """A batch to be made.

    Attributes:
        in_passes: the position after this step.
        labels: whether the batch has labels: true from the first sample with a label in the pass on.
        dropped: samples that were dropped since the step before.
    """

    step: Step
    in_passes: PassPosition
    samples: BatchSamples
    labels: bool
    dropped: list[LedgerEntry]


class Composer:
    """What all passes of a rank share: the settings, the rank and the buckets. A `Pass` makes the steps.

    Args:
        data: settings.
        tokenizer: counts the tokens of captions; None: batches have no tokens.
        rank: 0 … world_size-1.
        world_size: processes that share a global batch.

    Attributes:
        lengths: text bounds. With `text_buckets: auto` they are None until the first buffer is full, then chosen from
            its captions and kept, so that later passes have the same shapes.
        members: which members of a sample are image, caption and label.
        reads_captions: whether batches have anything of the captions; otherwise a sample may be without one.
        policy: the buckets; None while `lengths` is None.

    Raises:
        ConfigError: a setting needs an index.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer | None, *, rank: int, world_size: int) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.reads_captions = tokenizer is not None or data.add_captions
        self.members = Members.parse(**data.members.model_dump()) if data.members else USUAL
        self.rank, self.world_size = rank, world_size
        self.batch_size = data.global_batch_size // world_size
        _refuse_planned(data)
        assert data.image_buckets != "auto"
        self._image_shapes = data.image_buckets or [(data.image_size, data.image_size)]
        self.lengths: list[int] | None = None
        self.policy: BucketPolicy | None = None
        if tokenizer is None:
            self.use_lengths([0])
        elif isinstance(data.text_buckets, list):
            self.use_lengths(data.text_buckets)
        num_lengths = len(self.lengths or []) or data.num_text_buckets
        num_buckets = num_lengths * len(data.image_patches or self._image_shapes)
        # num_buckets · batch_size samples fill a batch of at least one bucket. Twice as many leave a choice of buckets.
        self.buffer_rows = max(BUFFER_ROWS, 2 * num_buckets * self.batch_size)

    def use_lengths(self, lengths: list[int]) -> BucketPolicy:
        """Set the text bounds; returns the buckets."""
        self.lengths = lengths
        if self.data.image_patches is not None:
            self.policy = NativePolicy(lengths, self.data.image_patches, patch_size=self.data.patch_size)
        else:
            self.policy = LengthAspectPolicy(lengths, self._image_shapes)
        return self.policy

    def choose_policy(self, samples: list[BufferedSample]) -> BucketPolicy:
        """Set the text bounds that pad the captions of these samples least; returns the buckets."""
        tokens = [min(one.tokens, self.data.max_length) for one in samples]
        # max_length is one of the lengths, and so the last bound: later captions may be longer than these.
        return self.use_lengths(
            choose_lengths(np.bincount([*tokens, self.data.max_length]), self.data.num_text_buckets)
        )


def _refuse_planned(data: DataConfig) -> None:
    """Raise a ConfigError if a setting needs a plan of all rows."""
    settings = {
        "image_buckets: auto": data.image_buckets == "auto",
        "token_budget": data.token_budget is not None,
        "groups": data.groups is not None,
        "val.share": data.val.share is not None,
        "select": data.select is not None or any(source.select is not None for source in sources(data)),
        "join": bool(data.join),
        "fields": bool(data.fields),
        "caption_hash": data.caption_hash is not None,
        "row_weights": data.row_weights is not None,
        "order": data.order is not None,
        "leftover": data.leftover != "merge",
        "captions: every": data.captions == "every",
        "captions of several sources": not isinstance(data.captions, str),
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
        composer: the settings, the rank and the buckets.
        epoch: number of the pass, from 0. Captions and crops are chosen as in the loader's epoch of this number.
        dropped: samples of earlier passes that were dropped after their last step.

    Attributes:
        dropped: samples that were dropped since the last step.
        seen: number of samples read, dropped samples included.
    """

    def __init__(self, composer: Composer, epoch: int, *, dropped: list[LedgerEntry] | None = None) -> None:
        self.dropped = dropped or []
        self.seen = 0
        self._composer = composer
        self._epoch = epoch
        self._step = 0
        self._usable = 0
        self._labels = False
        self._unassigned: list[BufferedSample] = []  # samples without a bucket, until there is a policy
        self._queues: list[list[BufferedSample]] = []  # samples by bucket
        self._held_rows, self._held_bytes = 0, 0  # of `_unassigned` and `_queues` together: the buffer

    def steps(self, samples: Iterable[StreamSample | Dropped]) -> Iterator[StreamStep]:
        """The steps of the pass. Each sample is in one step, or in `dropped`."""
        remaining = iter(samples)
        while chunk := list(islice(remaining, CHUNK_ROWS)):
            self.seen += len(chunk)
            self.dropped += [self._entry(one) for one in chunk if isinstance(one, Dropped)]
            self._unassigned += self._buffer([one for one in chunk if isinstance(one, StreamSample)])
            if self._composer.policy or self._full():
                yield from self._assign()
        yield from self._assign()
        yield from self._finish()

    def _entry(self, bad: Dropped) -> LedgerEntry:
        reason, detail = bad.error.reason.value, bad.error.detail
        return LedgerEntry(self._epoch, self._step, -1, bad.shard, bad.key, -1, "read", reason, detail)

    def _buffer(self, samples: list[StreamSample]) -> list[BufferedSample]:
        # The image's hash, not the position in the pass, decides where a sample starts in its list of captions. So it
        # goes through them in turn, one each epoch, whatever the order of the pass.
        captions, tokens = [""] * len(samples), [0] * len(samples)
        if self._composer.reads_captions:
            hashes = np.asarray([sample.image_hash for sample in samples], np.int64)
            num_captions = np.asarray([len(sample.captions) for sample in samples], np.int64)
            chosen = choose_captions(hashes, num_captions, self._epoch).tolist()
            captions = [sample.captions[i] for sample, i in zip(samples, chosen, strict=True)]
        if (tokenizer := self._composer.tokenizer) is not None:
            data = self._composer.data
            tokens = counts_of(tokenizer, data.caption_template).count(captions)
        rank, world_size = self._composer.rank, self._composer.world_size
        # Rank r numbers its samples r, r + world_size, …, so that rows are unique over all ranks.
        rows = range(rank + self._usable * world_size, rank + (self._usable + len(samples)) * world_size, world_size)
        self._usable += len(samples)
        self._held_rows += len(samples)
        self._held_bytes += sum(len(sample.image) for sample in samples)
        return list(map(BufferedSample, rows, samples, captions, tokens))

    def _full(self) -> bool:
        return self._held_rows >= self._composer.buffer_rows or self._held_bytes >= BUFFER_BYTES

    def _assign(self) -> Iterator[StreamStep]:
        """Assign samples to buckets, and cut steps while the buffer is full."""
        unassigned, self._unassigned = self._unassigned, []
        if not unassigned:
            return
        policy = self._composer.policy or self._composer.choose_policy(unassigned)
        self._queues = self._queues or [[] for _ in policy.buckets]
        infos = [one.sample.info for one in unassigned]
        sizes = [oriented_size(info.height, info.width, info.orientation) for info in infos]
        height, width = np.asarray(sizes, np.int64).T
        buckets = policy.assign(Shapes(np.asarray([one.tokens for one in unassigned], np.int64), height, width))
        for one, bucket in zip(unassigned, buckets.tolist(), strict=True):
            self._queues[bucket].append(one)
            # Without shuffling there is nothing to mix: a batch leaves as soon as its bucket holds one.
            if not self._composer.data.shuffle and len(self._queues[bucket]) == self._composer.batch_size:
                yield self._cut(bucket)
        while self._full() and (drawn := self._draw()) is not None:
            yield self._cut(drawn)

    def _finish(self) -> Iterator[StreamStep]:
        """Cut the full batches that are left, then merge the remainders of the buckets (see `merge_groups`).

        Only the last batch of the pass is filled up with masked rows.
        """
        while (drawn := self._draw()) is not None:
            yield self._cut(drawn)
        if not self._queues:
            return
        size = self._composer.batch_size
        for group, targets in merge_groups(self._buckets()):
            merged = [(bucket, one) for bucket in group for one in self._queues[bucket]]
            for bucket in group:
                self._queues[bucket] = []
            taken = len(merged) // size * size if targets else len(merged)
            for begin in range(0, taken, size):
                # The bucket of the first sample holds all: a group lists the longest texts and most patches first.
                yield self._emit(merged[begin][0], [one for _, one in merged[begin : begin + size]])
            target_of = dict(zip(group, targets, strict=False))  # the last group has no targets and leaves no samples
            for bucket, one in merged[taken:]:
                self._queues[target_of[bucket]].append(one)

    def _draw(self) -> int | None:
        """Draw one of the buckets that hold a batch, with probability ∝ its samples; None if no bucket holds one."""
        full = [i for i, queue in enumerate(self._queues) if len(queue) >= self._composer.batch_size]
        if not full:
            return None
        counts = [len(self._queues[i]) for i in full]
        drawn = int(random_raw(1, purpose=Purpose.BATCH_ORDER, **self._randomness())[0]) % sum(counts)
        return full[int(np.searchsorted(np.cumsum(counts), drawn, side="right"))]

    def _cut(self, bucket: int) -> StreamStep:
        """Take a batch out of a bucket: its oldest samples, or random ones if shuffled."""
        size, queue = self._composer.batch_size, self._queues[bucket]
        if self._composer.data.shuffle:
            order = permutation(len(queue), purpose=Purpose.ROW_ORDER, **self._randomness()).tolist()
            queue = [queue[i] for i in order]
        self._queues[bucket] = queue[size:]
        return self._emit(bucket, queue[:size])

    def _emit(self, bucket: int, chosen: list[BufferedSample]) -> StreamStep:
        self._labels = self._labels or any(one.sample.label >= 0 for one in chosen)
        rows = fill_up(np.array([[one.row] for one in chosen], np.int64), self._composer.batch_size)[:, 0]
        step = Step(self._epoch, self._step, self._buckets()[bucket], rows, np.full_like(rows, self._epoch))
        dropped, self.dropped = self.dropped, []
        self._step += 1
        self._held_rows -= len(chosen)
        self._held_bytes -= sum(len(one.sample.image) for one in chosen)
        in_passes = PassPosition(self._epoch, self._step)
        return StreamStep(step, in_passes, BatchSamples(chosen), self._labels, dropped)

    def _buckets(self) -> tuple[Bucket, ...]:
        assert self._composer.policy is not None
        return tuple(self._composer.policy.buckets)

    def _randomness(self) -> dict[str, int]:
        # One number for each step of each rank, so that ranks draw differently.
        position = self._step * self._composer.world_size + self._composer.rank
        return {"seed": self._composer.data.seed, "epoch": self._epoch, "position": position}
