"""A stream: the batches of one rank from shards that have no index. Worker threads make the batches ahead.

The batches have the loader's form: one bucket each, the same dtypes and transforms. Which samples share a batch depends
on shards and settings alone, never on the workers.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from mmdata.batch import Batch, shown
from mmdata.config import DataConfig
from mmdata.cores import most_workers
from mmdata.errors import DataError, Reason, counted
from mmdata.images.pixels import PixelTransform
from mmdata.launcher import resolve_ranks
from mmdata.loader.builder import BatchSpec
from mmdata.loader.frameworks import Interoperable, Iteration
from mmdata.loader.ledger import MIN_ROWS_FOR_RATE, Ledger, LedgerEntry, RowCounts
from mmdata.loader.loader import data_config
from mmdata.loader.stats import Stats
from mmdata.loader.unfinished import LoadedBatch, UnfinishedBatch
from mmdata.loader.workers.buffers import BufferPool
from mmdata.loader.workers.interrupt_safe import SharedGenerator
from mmdata.loader.workers.work import Work
from mmdata.plan import rank_slice
from mmdata.plan.position import check_count, check_epoch, check_state
from mmdata.streaming.composer import Composer, StreamStep
from mmdata.streaming.passes import Passes
from mmdata.streaming.position import PassPosition, StreamPosition, check_steps
from mmdata.streaming.prefetch import make_ahead
from mmdata.streaming.shard_names import ShardNames, assign_shards, find_shards, single_dataset, with_shards
from mmdata.streaming.state import RankState, check_identity, identity, rank_state
from mmdata.tars.texts import Loss, Losses
from mmdata.text.tokenizer import load_tokenizer
from mmdata.text.transform import TextTransform

logger = logging.getLogger("mmdata")


def stream(
    shards: ShardNames | None,
    config: str | os.PathLike[str] | dict[str, Any] | DataConfig,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    steps_per_epoch: int | None = None,
) -> Stream:
    """The batches of one rank from shards without an index.

    Without an index there is no promise that all ranks together give each sample once an epoch, and resuming reads the
    shards of a pass again. `mmdata.Loader`, over an index, promises both; docs/stream.md compares them.

    Args:
        shards: a path, a URL, a folder, a brace pattern, or a list of these; .tar, also compressed (gzip, bz2, xz).
            None: `data.shards` of the settings, which may be a path, a URL, a folder or a brace pattern.
        config: see `Loader.from_config`; a dictionary needs no `shards` if the argument `shards` is given.
        rank: 0 … world_size-1. Without rank and world_size both come from the launcher, as in `Loader.from_config`.
        world_size: number of processes; each reads different shards.
        steps_per_epoch: batches of an epoch, the same on every rank; about samples / global_batch_size. A pass may go
            on in the next epoch. None, on one rank only: an epoch is one pass.

    Raises:
        ConfigError: a setting is unknown, missing or out of range, `pipe:` in a shard's name, fewer shards than ranks,
            several ranks without steps_per_epoch, or the settings name several datasets.
        DataError: a local shard does not exist.
        ValueError: world_size does not divide the global batch size.

    Example:
        for batch in mmdata.stream("https://host/cc3m-{0000..0331}.tar", "configs/x.yaml"):
            step(batch)
    """
    if shards is not None and isinstance(config, dict):
        config = with_shards(config, shards)
    data = data_config(config)
    found = find_shards(single_dataset(data) if shards is None else shards, may_lack=data.skip_damaged)
    return Stream(found, data, rank=rank, world_size=world_size, steps_per_epoch=steps_per_epoch)


class _Outcome(NamedTuple):
    """A batch and what its step knows of it.

    Attributes:
        dropped: samples that were dropped since the batch before it.
        in_passes: the position after it.
        lost: (sample, what its text members lost) of the samples that lost something.
    """

    made: LoadedBatch
    dropped: list[LedgerEntry]
    in_passes: PassPosition
    lost: list[tuple[str, dict[Loss, str]]]


class Stream(Interoperable):
    """The batches of one rank, pass after pass.

    Iterating gives the current epoch; at its end the next epoch begins, also without `set_epoch`. In each pass the
    ranks together read every shard once: each sample is in one batch, or in the ledger.

    Args:
        shards: the shards of all ranks, in the same order on each.
        data: settings.
        rank, world_size, steps_per_epoch: see `stream`.

    Attributes:
        shards, rank, world_size: as given.
        ledger: the samples that could not be used: masked in their batch, or, with row -1, dropped before batching.
        stats: sums over the batches yielded.
    """

    def __init__(
        self,
        shards: list[str],
        data: DataConfig,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        ranks = resolve_ranks(rank, world_size)
        self.rank, self.world_size = rank, world_size = ranks
        # Both raise now, and not at the first batch, if the numbers do not fit.
        rank_slice(data.global_batch_size, rank, world_size)
        assign_shards(shards, rank, world_size)
        check_steps(steps_per_epoch, world_size, data.global_batch_size)
        tokenizer = load_tokenizer(data)
        transform = PixelTransform.from_config(data)
        self.shards = shards
        self.stats = Stats()
        self._data = data
        self._steps = steps_per_epoch
        self.ledger = Ledger(data.loading.max_bad_share, ranks)
        self._losses = Losses()
        self._composer = Composer(data, tokenizer, rank=rank, world_size=world_size)
        self._spec = BatchSpec(
            transform,
            tokenizer,
            TextTransform.from_config(data),
            add_hashes=data.add_hashes,
            add_captions=data.add_captions,
        )
        self._buffers = BufferPool()
        self._identity = identity(shards, data, steps_per_epoch, spec=self._spec)
        self._position = StreamPosition(steps_per_epoch)
        # The passes at the end of an epoch, and their position: the next epoch goes on with the same buffer and shard.
        self._kept: tuple[PassPosition, Passes] | None = None
        # Ends the threads of the newest iteration that is under way.
        self._end_iteration: Callable[[], None] | None = None

    def __len__(self) -> int:
        """Batches of an epoch: `steps_per_epoch`; raises TypeError without it."""
        if self._steps is None:
            raise TypeError(
                "a stream has no length: without an index nobody has counted its samples; give steps_per_epoch, or an "
                "index: `mmdata index` makes one, and mmdata.Loader has an exact len()"
            )
        return self._steps

    def __repr__(self) -> str:
        steps = f"{self._steps:,} batches" if self._steps else "batches"
        where = f"rank {self.rank} of {self.world_size}; epoch {self._position.epoch}, step {self._position.step}"
        return f"Stream({len(self.shards):,} shards, {steps} of {self.batch_size:,} rows, {where})"

    def __bool__(self) -> bool:
        """True; without this, `if stream:` would ask for the length."""
        return True

    @property
    def batch_size(self) -> int:
        """Rows of each batch on this rank."""
        return self._composer.batch_size

    @property
    def lost(self) -> Counter[str]:
        """Losses of the batches so far: samples that lost a text member, by what was lost; and, as "damaged_shard",
        shards of which the rest could not be read (`data.skip_damaged`)."""
        shards = self.ledger.masked[Reason.DAMAGED_SHARD.value]
        return Counter(self._losses.as_dict()) + Counter(damaged_shard=shards)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch, as `Loader.set_epoch`.

        With `steps_per_epoch` an epoch begins where the epoch before it ended. If this stream has not given the epoch
        before it, epoch e begins with pass e, and a warning is logged.

        Raises:
            ValueError: epoch is negative, or above 1,048,575.
        """
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank, counted in batches yielded, and the identity of the stream; JSON.

        `merge_states` makes one state of the states of all ranks.
        """
        own = RankState(self._position.in_passes, self._composer.lengths, self._position.epoch_start)
        return {
            "epoch": self._position.epoch,
            "step": self._position.step,
            **self.ledger.counts.state(),
            "world_size": self._composer.world_size,
            "ranks": {str(self._composer.rank): own.pack()},
            "stream": self._identity,
        }

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One state of the states that all ranks took at the same step."""
        ranks = {rank: own for state in states for rank, own in state["ranks"].items()}
        counts = self.ledger.merge([RowCounts.of(state) for state in states])
        return {**states[0], **counts.state(), "ranks": ranks}

    def check_rows(self, state: dict[str, Any]) -> None:
        """Judge the samples that a state counts, if they are a thousand or more, or a whole epoch.

        Raises:
            DataError: more than `max_bad_share` of them could not be used; says how many for which reason.
        """
        counts = RowCounts.of(state)
        if counts.seen >= MIN_ROWS_FOR_RATE or state["epoch"] > 0 or state["step"] == self._steps:
            self.ledger.judge(counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was yielded when the state was taken.

        The pass is read again from its start, without decoding. If the state has no position of this rank, because the
        number of ranks was another or the ranks' states were not merged, the rank begins a new pass and logs a warning.

        A running iteration ends: asked for another batch, it raises a RuntimeError.

        Raises:
            ConfigError: the state belongs to another stream (the error names what differs), or to no stream.
        """
        check_identity(check_state(state, of="stream"), self._identity)
        epoch = check_epoch(state, of="stream")
        step = check_count(state, "step", of="stream", at_most=self._steps)
        own = rank_state(state, rank=self._composer.rank, world_size=self._composer.world_size)
        counts = RowCounts.of(state)
        self._drop_kept()
        if own.lengths:
            self._composer.use_lengths(own.lengths)
        self.ledger.restore(counts)
        self._position.restore(epoch, step, own.in_passes, epoch_start=own.epoch_start)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current epoch, from the position that `load_state_dict` set, or from the epoch's start.

        Raises:
            DataError: a shard cannot be read or is damaged, the shards have no sample, or too many samples cannot be
                used.
            RuntimeError: `set_epoch`, `load_state_dict` or a newer iteration has moved the stream's position, and this
                iteration was asked for another batch.
        """
        return Iteration(self._iterate(), of="stream")

    def close(self) -> None:
        """End the threads, and close the open shards. An iteration under way ends; iterating again begins a new one."""
        self._position.interrupt("close")
        if self._end_iteration is not None:
            self._end_iteration()
        self._drop_kept()

    def _iterate(self) -> Generator[Batch]:
        position = self._position
        iteration, restores = position.begin(), position.restores
        passes = self._passes()
        loading = self._data.loading
        workers = {"num_workers": most_workers(loading.num_workers), "prefetch": loading.prefetch_batches}
        # Shared, since `close` may be called by another thread than the one that waits for a batch.
        batches = SharedGenerator(make_ahead(self._numbered(passes.steps), self._begin, stats=self.stats, **workers))
        kept = False  # whether `self._kept` owns the passes
        closed = False

        def end() -> None:
            nonlocal closed
            closed = True
            passes.stop()
            batches.close()
            passes.close()

        self._end_iteration = end
        try:
            for made, dropped, in_passes, lost in batches:
                position.check(iteration)
                self.stats.add(made.stats)
                self._account(dropped, made)
                self._count_losses(lost)
                position.advance(iteration, in_passes)
                if position.steps_left == 0:
                    self._kept, kept = (in_passes, passes), True
                yield shown(made.batch)
        finally:
            # `stop` before the threads end, so that a thread that reads a shard ends at the next sample. `close` after
            # them, because they use the passes.
            if not kept:
                passes.stop()
            batches.close()
            if not kept:
                passes.close()
            if self._end_iteration is end:
                self._end_iteration = None
        if closed and not kept:  # `close` came before the last batch
            position.check(iteration)
        if position.restores == restores:  # else `load_state_dict` has replaced the counts of this iteration
            self._end_epoch(passes, unfinished=position.is_of(iteration) and bool(position.steps_left))
        position.end(iteration)

    def _passes(self) -> Passes:
        """The passes from the current position on: those kept from the last epoch if they fit, else new ones."""
        if self._kept is not None and self._kept[0] == self._position.in_passes:
            kept, self._kept = self._kept[1], None
            return kept
        self._drop_kept()
        return Passes(self.shards, self._composer, start=self._position.in_passes, endless=self._steps is not None)

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
        self._kept = None

    def _end_epoch(self, passes: Passes, *, unfinished: bool) -> None:
        """Count the samples after the last batch, and judge all; `unfinished`: the epoch lacks batches."""
        if passes.ended:
            self._account(passes.dropped, None)
            if passes.seen == 0:
                shards = counted(len(self.shards), "shard")
                raise DataError(f"stream: no sample in any of {shards}; the first is '{self.shards[0]}'")
        self.ledger.check()
        if unfinished:
            raise DataError(
                f"stream: no sample for rank {self._composer.rank} in any of {len(self.shards)} shards: all are in "
                "`.ledger`, or data.max_rows leaves this rank none"
            )

    def _account(self, dropped: list[LedgerEntry], made: LoadedBatch | None) -> None:
        self.stats.masked += len(dropped)
        bad = [*dropped, *(made.masked if made else [])]
        self.ledger.add(bad, len(bad) + (made.stats.rows if made else 0))

    def _count_losses(self, lost: list[tuple[str, dict[Loss, str]]]) -> None:
        for sample, losses in lost:
            for loss in self._losses.add(sample, losses):  # the kinds of loss that are new
                told = "%s (%s); this sample and later ones with the same fault are used without it"
                logger.warning(told, self._losses.first[loss], loss)

    def _how_to_skip(self) -> str:
        return (
            "to skip the first 3 batches of an epoch, take them (`for _ in itertools.islice(stream, 3)`) and call "
            "stream.load_state_dict(stream.state_dict()). A stream need not go through Accelerator.prepare: its "
            "batches are already those of this rank"
        )

    def _how_to_make(self) -> str:
        return "mmdata.stream(shards, config, rank=rank, world_size=world_size, steps_per_epoch=steps)"

    def _numbered(self, steps: Iterator[StreamStep]) -> Iterator[StreamStep]:
        """The steps that the current epoch still has, with the epoch's number and their numbers in it."""
        epoch = self._position.epoch
        for number, step in enumerate(islice(steps, self._position.steps_left), self._position.step):
            dropped = [replace(entry, epoch=epoch, step=number) for entry in step.dropped]
            yield replace(step, step=step.step._replace(epoch=epoch, number=number), dropped=dropped)

    def _begin(self, step: StreamStep) -> Work[_Outcome]:
        batch = UnfinishedBatch(self._spec, step.step, step.samples, buffers=self._buffers, has_labels=step.labels)
        work = batch.work()
        return work.then(lambda made: _Outcome(made, step.dropped, step.in_passes, step.samples.losses()))
