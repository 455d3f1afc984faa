"""A stream: the batches of one rank from shards that have no index, made ahead by worker threads.

The batches are those of the loader in kind (one bucket each, same dtypes, same transforms). Which samples share a
batch follows from the shards and the settings alone; workers change only who makes it and when.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from threading import Event
from time import perf_counter
from typing import Any

from mmdata.batch import Batch
from mmdata.data_config import DataConfig, sources
from mmdata.errors import ConfigError, DataError
from mmdata.loader.assemble import Assembler, Made, worker_threads
from mmdata.loader.ledger import Ledger, LedgerEntry
from mmdata.loader.loader import data_config
from mmdata.loader.stats import Stats
from mmdata.plan import rank_slice
from mmdata.seeding import Purpose, permutation
from mmdata.streaming.compose import Composer, Pass, StreamTask
from mmdata.streaming.samples import Dropped, StreamSample, read_shard
from mmdata.streaming.source import ShardNames, deal, find_shards
from mmdata.transform.pixels import PixelTransform
from mmdata.transform.text import Tokenizer

logger = logging.getLogger("mmdata")

_Outcome = tuple[Made, list[LedgerEntry]]
"""A batch, and the samples that were dropped before it."""


def stream(
    shards: ShardNames | None,
    config: str | os.PathLike[str] | dict[str, Any] | DataConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Stream:
    """The batches of one rank from shards without an index.

    Args:
        shards: a path, a URL, a folder, a brace pattern, or a list of these; .tar, also compressed (gzip, bz2, xz).
            None: the `shards` of the settings, which may be any one of these.
        config: as `Loader.from_config` takes it; a dictionary needs no `shards` where they are given here.
        rank: 0 … world_size-1.
        world_size: processes; shard i goes to rank i mod world_size.

    Raises:
        ConfigError: a setting is unknown, missing or out of range, `pipe:` in a shard's name, fewer shards than ranks,
            or the settings name several datasets.
        DataError: a local shard is not there.
        ValueError: world_size does not divide the global batch size.

    Example:
        for batch in mmdata.stream("https://host/cc3m-{0000..0331}.tar", "configs/x.yaml"):
            step(batch)
    """
    if shards is not None and isinstance(config, dict):
        config = _named(config, shards)
    data = data_config(config)
    rank_slice(data.global_batch_size, rank, world_size)  # raises if they do not fit
    own = deal(find_shards(_single(data) if shards is None else shards), rank, world_size)
    return Stream(own, data, rank=rank, world_size=world_size)


class Stream:
    """The batches of one rank, pass after pass; it has no length and no state to resume from.

    Iterating gives the current epoch, from its start; when it is exhausted the next epoch begins, also without
    `set_epoch`. Every sample of the rank's shards is in a pass once, or in the ledger.

    Args:
        shards: of this rank; see `stream`.
        data: settings.
        rank: 0 … world_size-1.
        world_size: processes, each with a stream over shards of its own.

    Attributes:
        shards: as given.
        stats: sums over the batches yielded.
    """

    def __init__(self, shards: list[str], data: DataConfig, *, rank: int = 0, world_size: int = 1) -> None:
        tokenizer = Tokenizer.load(data.tokenizer, max_length=data.max_length)
        transform = PixelTransform.from_config(data)
        self.shards = shards
        self.stats = Stats()
        self._data = data
        self._ledger = Ledger(data.max_bad_share)
        self._composer = Composer(data, tokenizer, rank=rank, world_size=world_size)
        self._assembler = Assembler(tokenizer, transform, hashes=data.hashes)
        self._epoch = 0
        logger.warning(
            "a stream of %d shards without an index: it cannot promise each sample once over all ranks after an "
            "interruption, exact resume, or equally many steps on each rank; `mmdata index` and mmdata.Loader do",
            len(shards),
        )

    def __len__(self) -> int:
        """A stream has none.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a stream has no length: without an index nobody has counted its samples; `mmdata index` makes one, and "
            "mmdata.Loader has an exact len()"
        )

    def __bool__(self) -> bool:
        """True; without this, `if stream:` would ask for the length."""
        return True

    @property
    def batch_size(self) -> int:
        """Rows of a batch on this rank."""
        return self._composer.batch_size

    @property
    def ledger(self) -> list[LedgerEntry]:
        """The newest 10,000 samples that could not be used.

        Row -1 where that was found before batching, else the row masked in its batch.
        """
        return list(self._ledger.entries)

    @property
    def masked(self) -> Counter[str]:
        """Samples that could not be used, by reason, exact."""
        return self._ledger.own.masked

    def set_epoch(self, epoch: int) -> None:
        """Begin with an epoch."""
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more: got {epoch}")
        self._epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current epoch, from its start.

        Raises:
            DataError: a shard cannot be read or is damaged, no sample in any, or too many that cannot be used.
        """
        epoch, passing = self._epoch, Pass(self._composer, self._epoch)
        stopped = Event()
        with (
            closing(self._samples(epoch, stopped)) as samples,
            closing(passing.tasks(samples)) as tasks,
            closing(self._make_ahead(tasks, stopped)) as batches,
        ):
            for made, dropped in batches:
                self.stats.add(made.stats)
                self._account(dropped, made)
                yield made.batch
        self._account(passing.dropped, None)
        if passing.seen == 0:
            raise DataError(f"stream: no sample in any of {len(self.shards)} shards; the first is '{self.shards[0]}'")
        self._ledger.check()
        self._epoch = epoch + 1

    def _account(self, dropped: list[LedgerEntry], made: Made | None) -> None:
        self.stats.masked += len(dropped)
        bad = [*dropped, *(made.masked if made else [])]
        self._ledger.add(bad, len(bad) + (made.stats.rows if made else 0))

    def _samples(self, epoch: int, stopped: Event) -> Iterator[StreamSample | Dropped]:
        """The samples of a pass: shard after shard, in an order of the epoch's own."""
        data, rank, world_size = self._data, self._composer.rank, self._composer.world_size
        order = range(len(self.shards))
        # With a limit it is always the first shards that count, as it is with an index.
        if data.shuffle and data.limit is None:
            order = permutation(
                len(self.shards), seed=data.seed, epoch=epoch, purpose=Purpose.SHARD_ORDER, position=rank
            ).tolist()
        samples = (sample for i in order for sample in read_shard(self.shards[i]))
        # The ranks' parts of a limit sum up to it.
        limit = None if data.limit is None else (data.limit + world_size - 1 - rank) // world_size
        for sample in islice(samples, limit):
            if stopped.is_set():  # nobody waits for the rest
                return
            yield sample

    def _make_ahead(self, tasks: Iterator[StreamTask], stopped: Event) -> Iterator[_Outcome]:
        """Batches in the order of the tasks; at most num_workers × prefetch are ready or being made.

        One thread reads shards and fills the buffer, so that the order of the samples is that of the shards; the
        workers wait for its tasks in turn.
        """
        num_workers = self._data.num_workers
        if num_workers == 0:
            while (made := self._timed(partial(self._make_next, partial(next, tasks, None)))) is not None:
                yield made
            return
        reader = ThreadPoolExecutor(1, thread_name_prefix="mmdata-reader")
        pool = worker_threads(num_workers)
        ahead: deque[Future[_Outcome | None]] = deque()
        try:
            while True:
                while len(ahead) < num_workers * self._data.prefetch:
                    ahead.append(pool.submit(self._make_next, reader.submit(next, tasks, None).result))
                if (made := self._timed(ahead.popleft().result)) is None:
                    return
                yield made
        finally:
            stopped.set()
            reader.shutdown(wait=True, cancel_futures=True)
            pool.shutdown(wait=True, cancel_futures=True)

    def _make_next(self, next_task: Callable[[], StreamTask | None]) -> _Outcome | None:
        task = next_task()
        if task is None:
            return None
        return self._assembler.make(task.task, task.samples, labels=task.labels), task.dropped

    def _timed(self, wait: Callable[[], _Outcome | None]) -> _Outcome | None:
        started = perf_counter()
        made = wait()
        self.stats.wait_s += perf_counter() - started
        return made


def _single(data: DataConfig) -> str:
    datasets = sources(data)
    if len(datasets) > 1:
        raise ConfigError(
            f"data.shards names {len(datasets)} datasets, and streams mix none: use one mmdata.Loader over indexed "
            "shards, or give the stream's shards themselves, in one list"
        )
    return datasets[0].shards


def _named(config: dict[str, Any], shards: ShardNames) -> dict[str, Any]:
    """The settings with `shards` filled in where it is missing: the section asks for one."""
    if "data" in config:
        return {**config, "data": {"shards": str(shards), **config["data"]}}
    return {"shards": str(shards), **config}
