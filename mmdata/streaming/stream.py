"""A stream: the batches of one rank from shards that have no index, made ahead by worker threads.

The batches are of the loader's kind (one bucket each, same dtypes, same transforms). Which samples share one follows
from shards and settings alone; workers change only who makes it and when.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from mmdata.batch import Batch
from mmdata.config import DataConfig
from mmdata.cores import most_workers
from mmdata.errors import DataError
from mmdata.launcher import resolve_ranks
from mmdata.loader.batch_builder import BatchBuilder, BatchSpec
from mmdata.loader.frameworks import Interoperable, Iteration
from mmdata.loader.ledger import MIN_ROWS_FOR_RATE, Ledger, LedgerEntry, RowCounts
from mmdata.loader.loader import data_config
from mmdata.loader.stats import Stats
from mmdata.loader.work import LoadedBatch, Work
from mmdata.plan import rank_slice
from mmdata.plan.position import check_count, check_epoch, check_state
from mmdata.shards.texts import Loss, Losses
from mmdata.streaming.composer import Composer, StreamStep
from mmdata.streaming.passes import Passes
from mmdata.streaming.position import Place, RankPosition, RankState, check_identity, check_steps, identity, rank_state
from mmdata.streaming.prefetch import make_ahead
from mmdata.streaming.shard_names import ShardNames, deal, find_shards, single_dataset, with_shards
from mmdata.transform.pixels import PixelTransform
from mmdata.transform.text import Tokenizer

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

    Args:
        shards: a path, a URL, a folder, a brace pattern, or a list of these; .tar, also compressed (gzip, bz2, xz).
            None: the `shards` of the settings, which may be any one of these.
        config: as `Loader.from_config` takes it; a dictionary needs no `shards` where they are given here.
        rank: 0 … world_size-1. Without rank and world_size both are the launcher's, as for `Loader.from_config`.
        world_size: processes; each reads shards of its own.
        steps_per_epoch: batches of an epoch, the same on every rank; about samples / global_batch_size. Passes go on
            from one epoch to the next. None, on one rank only: an epoch is one pass.

    Raises:
        ConfigError: a setting is unknown, missing or out of range, `pipe:` in a shard's name, fewer shards than ranks,
            several ranks without steps_per_epoch, or the settings name several datasets.
        DataError: a local shard is not there.
        ValueError: world_size does not divide the global batch size.

    Example:
        for batch in mmdata.stream("https://host/cc3m-{0000..0331}.tar", "configs/x.yaml"):
            step(batch)
    """
    if shards is not None and isinstance(config, dict):
        config = with_shards(config, shards)
    data = data_config(config)
    found = find_shards(single_dataset(data) if shards is None else shards)
    return Stream(found, data, rank=rank, world_size=world_size, steps_per_epoch=steps_per_epoch)


class _Outcome(NamedTuple):
    """A batch, the samples that were dropped before it, the place after it, and what its samples have lost."""

    made: LoadedBatch
    dropped: list[LedgerEntry]
    place: Place
    lost: list[tuple[str, dict[Loss, str]]]


class Stream(Interoperable):
    """The batches of one rank, pass after pass.

    Iterating gives the current epoch; when it is exhausted the next one begins, also without `set_epoch`. In each pass
    all ranks together read every shard once: every sample is in a batch once, or in the ledger.

    Args:
        shards: of all ranks; see `stream`.
        data: settings.
        rank: see `stream`.
        world_size: processes, each with a stream of its own over the same shards.
        steps_per_epoch: see `stream`.

    Attributes:
        shards, rank, world_size: as given.
        ledger: the samples that could not be used. Row -1 where that was found before batching, else the row is masked
            in its batch.
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
        rank_slice(data.global_batch_size, rank, world_size)  # raises if they do not fit
        deal(shards, rank, world_size)  # likewise
        check_steps(steps_per_epoch, world_size, data.global_batch_size)
        tokenizer = Tokenizer.load(data.tokenizer, max_length=data.max_length)
        transform = PixelTransform.from_config(data)
        self.shards = shards
        self.stats = Stats()
        self._data = data
        self._steps = steps_per_epoch
        self.ledger = Ledger(data.loading.max_bad_share, ranks)
        self._losses = Losses()
        self._composer = Composer(data, tokenizer, rank=rank, world_size=world_size)
        self._spec = BatchSpec(tokenizer, transform, add_hashes=data.add_hashes)
        self._identity = identity(shards, data, steps_per_epoch, transform=transform, tokenizer=tokenizer)
        self._position = RankPosition(steps_per_epoch)
        self._kept: tuple[Place, Passes] | None = None  # where an epoch ended; no thread is at them
        logger.warning(
            "a stream of %d shards: it cannot promise each sample once over all ranks in an epoch, or exact resume "
            "without reading the shards again%s; mmdata.Loader does, over an index, which `mmdata index` makes",
            len(shards),
            "" if steps_per_epoch else ", or, without steps_per_epoch, equally many steps on each rank",
        )

    def __len__(self) -> int:
        """Batches of an epoch: `steps_per_epoch`; raises TypeError without it."""
        if self._steps is None:
            raise TypeError(
                "a stream has no length: without an index nobody has counted its samples; give steps_per_epoch, or an "
                "index: `mmdata index` makes one, and mmdata.Loader has an exact len()"
            )
        return self._steps

    def __bool__(self) -> bool:
        """True; without this, `if stream:` would ask for the length."""
        return True

    @property
    def batch_size(self) -> int:
        """Rows of a batch on this rank."""
        return self._composer.batch_size

    @property
    def lost(self) -> Counter[str]:
        """Samples in the batches so far of which a text member could not be used, by what they lost."""
        return Counter(self._losses.as_dict())

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch, as `Loader.set_epoch`.

        With `steps_per_epoch` an epoch begins where the one before it ended. Where this stream has not given that one,
        it begins with the pass of its number, and says so.

        Raises:
            ValueError: epoch is negative, or above 1,048,575.
        """
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is, counted in batches yielded, and the stream it belongs to; JSON.

        `merge_states` makes one state of those of all ranks.
        """
        own = RankState(self._position.place, self._composer.lengths, self._position.start)
        return {
            "epoch": self._position.epoch,
            "step": self._position.step,
            **self.ledger.counts.state(),
            "world_size": self._composer.world_size,
            "ranks": {str(self._composer.rank): own.pack()},
            "stream": self._identity,
        }

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One state of those that all ranks took at the same step."""
        ranks = {rank: place for state in states for rank, place in state["ranks"].items()}
        counts = self.ledger.merge([RowCounts.of(state) for state in states])
        return {**states[0], **counts.state(), "ranks": ranks}

    def check_rows(self, state: dict[str, Any]) -> None:
        """Judge the samples that a state counts, from the thousandth or the end of the first epoch on.

        Raises:
            DataError: more than `max_bad_share` of them could not be used; says how many for which reason.
        """
        counts = RowCounts.of(state)
        if counts.seen >= MIN_ROWS_FOR_RATE or state["epoch"] > 0 or state["step"] == self._steps:
            self.ledger.judge(counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was yielded when the state was taken.

        The pass is read again from its start, without decoding. Where the state has no place of this rank, because
        there were another number of ranks or it was not merged, the rank begins a new pass, and says so.

        An iteration that is under way ends: asked for another batch, it raises a RuntimeError.

        Raises:
            ConfigError: the state belongs to another stream; what differs is named. Or it is none of a stream.
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
        self._position.restore(epoch, step, own.place, start=own.start)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current epoch, from where `load_state_dict` put it, or from its start.

        Raises:
            DataError: a shard cannot be read or is damaged, no sample in any, or too many that cannot be used.
            RuntimeError: asked for another batch after `set_epoch`, `load_state_dict` or a newer iteration has moved
                the position; there is one.
        """
        return Iteration(self._iterate(), of="stream")

    def close(self) -> None:
        """Close the shard that waits for the next epoch. The threads of an iteration end with the iteration."""
        self._drop_kept()

    def _iterate(self) -> Generator[Batch]:
        position = self._position
        iteration, restores = position.begin(), position.restores
        passes = self._passes()
        loading = self._data.loading
        workers = {"num_workers": most_workers(loading.num_workers), "prefetch": loading.prefetch_batches}
        batches = make_ahead(self._numbered(passes.steps), self._begin, stats=self.stats, **workers)
        kept = False  # for the next epoch
        try:
            for made, dropped, place, lost in batches:
                position.check(iteration)
                self.stats.add(made.stats)
                self._account(dropped, made)
                self._count_losses(lost)
                position.advance(iteration, place)
                if position.left == 0:
                    self._kept, kept = (place, passes), True
                yield made.batch
        finally:
            if not kept:
                passes.stop()
            batches.close()
            if not kept:
                passes.close()
        if position.restores == restores:  # the samples that are counted are still those of this iteration
            self._end_epoch(passes, nothing_came=position.is_of(iteration) and bool(position.left))
        position.end(iteration)

    def _passes(self) -> Passes:
        """The passes from the current place on: those kept from the epoch before, their buffer filled, or new ones."""
        if self._kept is not None and self._kept[0] == self._position.place:
            kept, self._kept = self._kept[1], None
            return kept
        self._drop_kept()
        return Passes(self.shards, self._composer, start=self._position.place, endless=self._steps is not None)

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
        self._kept = None

    def _end_epoch(self, passes: Passes, *, nothing_came: bool) -> None:
        """Account for what came after the last batch; `nothing_came`: the epoch should have had more batches."""
        if passes.ended:
            self._account(passes.dropped, None)
            if passes.seen == 0:
                first = self.shards[0]
                raise DataError(f"stream: no sample in any of {len(self.shards)} shards; the first is '{first}'")
        self.ledger.check()
        if nothing_came:
            raise DataError(
                f"stream: no sample for rank {self._composer.rank} in any of {len(self.shards)} shards: all came into "
                "`.ledger`, or data.max_rows leaves it none"
            )

    def _account(self, dropped: list[LedgerEntry], made: LoadedBatch | None) -> None:
        self.stats.masked += len(dropped)
        bad = [*dropped, *(made.masked if made else [])]
        self.ledger.add(bad, len(bad) + (made.stats.rows if made else 0))

    def _count_losses(self, lost: list[tuple[str, dict[Loss, str]]]) -> None:
        for place, losses in lost:
            for loss in self._losses.add(place, losses):
                told = f"{place}: {losses[loss]}"
                logger.warning("%s (%s); the sample is used without it, as all like it will be", told, loss)

    def _how_to_skip(self) -> str:
        return (
            "to leave out the first 3 batches of an epoch, take them (`for _ in itertools.islice(stream, 3)`) and go "
            "on with stream.load_state_dict(stream.state_dict()). It need not go through Accelerator.prepare: its "
            "batches are already those of this rank"
        )

    def _how_to_make(self) -> str:
        return "mmdata.stream(shards, config, rank=rank, world_size=world_size, steps_per_epoch=steps)"

    def _numbered(self, steps: Iterator[StreamStep]) -> Iterator[StreamStep]:
        """The steps of what is left of the epoch, numbered within it."""
        epoch = self._position.epoch
        for number, step in enumerate(islice(steps, self._position.left), self._position.step):
            dropped = [replace(entry, epoch=epoch, step=number) for entry in step.dropped]
            yield replace(step, step=step.step._replace(epoch=epoch, number=number), dropped=dropped)

    def _begin(self, step: StreamStep) -> Work[_Outcome]:
        work = BatchBuilder(self._spec, step.step, step.samples, labels=step.labels).work()
        return work.then(lambda made: _Outcome(made, step.dropped, step.place, step.samples.losses()))
