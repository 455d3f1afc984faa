"""Shards of coming batches, fetched before a worker asks for them. What is in a batch does not depend on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np

from mmdata.loader.workers.promise import Stop
from mmdata.plan import Step
from mmdata.shards import Index, ShardStore
from mmdata.shards.remote.cache import GB

logger = logging.getLogger("mmdata")

FETCHERS = 4
"""Shards fetched concurrently."""
LOOK_AGAIN = 64
"""Steps after which a shard is looked for again: it may have been removed."""
MAX_ROWS = 2**20
"""Rows of the steps that are taken from the plan before their turn: 16 bytes each."""


def fetch_ahead(steps: Iterator[Step], index: Index, store: ShardStore) -> Iterator[Step]:
    """The steps, in their order, as soon as the plan has them; shards they need are fetched meanwhile.

    Of a corpus on a local disk nothing is fetched, and no thread is started.
    """
    if not index.caches:
        yield from steps
        return
    ahead = ShardPrefetcher(steps, index, store)
    try:
        yield from ahead
    finally:
        ahead.close()


class ShardPrefetcher:
    """Goes through steps in a thread of its own, and fetches their shards in others.

    What is fetched and not used yet takes at most half of the cache: the other half is for what is in use. A shard
    that cannot be fetched is no error here; the worker that needs it asks again, and says what is wrong.

    Args:
        steps: of one epoch; iterated in another thread.
        index: of the shards.
        store: brings them into the cache.
    """

    def __init__(self, steps: Iterator[Step], index: Index, store: ShardStore) -> None:
        self._steps = steps
        self._index = index
        self._store = store
        self._room = min(cache.max_bytes for cache in index.caches) // 2  # bytes
        self._lock = threading.RLock()  # entered itself, not through `_changed`: see `promise`
        self._changed = threading.Condition(self._lock)  # waited for by the threads alone
        self._stop = Stop()
        self._error: Exception | None = None  # what the plan raised
        self._ready: SimpleQueue[Step | None] = SimpleQueue()  # None: there are no more
        self._rows = 0  # of what is ready
        self._taken = 0  # steps
        self._unused: dict[int, int] = {}  # shard -> bytes, asked for, and no step that needs it was taken yet
        self._looked: dict[int, int] = {}  # shard -> number of the step for which it was last looked for
        self._wanted: SimpleQueue[int | None] = SimpleQueue()
        threads = [threading.Thread(target=self._look_ahead, name="mmdata-ahead", daemon=True)]
        # Daemons: a program that ends does not wait for a server that does not answer.
        threads += [threading.Thread(target=self._fetch, name="mmdata-fetch", daemon=True) for _ in range(FETCHERS)]
        try:
            for thread in threads:
                thread.start()
        except BaseException:  # an interrupt: nobody else could end those that run
            self.close()
            raise

    def __iter__(self) -> Iterator[Step]:
        """The steps; what the plan raises is raised in its place."""
        while (step := self._ready.get()) is not None:
            with self._lock:
                self._taken += 1
                self._rows -= len(step.rows)
                for shard in self._shards(step):
                    self._unused.pop(shard, None)
                self._changed.notify_all()
            yield step
        if self._error:
            raise self._error

    def close(self) -> None:
        """Ask for nothing more, and leave what is being fetched."""
        self._stop.set()
        with self._lock:
            self._changed.notify_all()

    def _shards(self, step: Step) -> list[int]:
        return np.unique(self._index.locate(step.rows[step.rows >= 0])[0]).tolist()

    def _look_ahead(self) -> None:
        try:
            for number, step in enumerate(self._steps):
                with self._lock:
                    self._changed.wait_for(lambda: self._stop.is_set() or self._rows < MAX_ROWS)
                    self._rows += len(step.rows)
                self._ready.put(step)
                for shard in self._shards(step):
                    self._ask_for(shard, number)
                if self._stop.is_set():
                    return
        except Exception as error:
            self._error = error
        finally:
            self._ready.put(None)
            for _ in range(FETCHERS):
                self._wanted.put(None)

    def _ask_for(self, shard: int, number: int) -> None:
        """Have a shard that step `number` needs fetched, once there is room ahead for it."""
        if number - self._looked.get(shard, -LOOK_AGAIN) < LOOK_AGAIN:
            return
        self._looked[shard] = number
        if self._store.is_here(shard):
            return
        size = self._index.listed(shard).bytes
        with self._lock:
            self._changed.wait_for(
                lambda: (
                    self._stop.is_set()
                    or number < self._taken  # a worker waits for it already
                    or not self._unused
                    or sum(self._unused.values()) + size <= self._room
                )
            )
            if number >= self._taken:
                self._unused[shard] = size
        self._wanted.put(shard)

    def _fetch(self) -> None:
        while (shard := self._wanted.get()) is not None:
            try:
                self._store.fetch(shard, self._stop)
            except Exception as error:
                logger.debug("shard %d was not fetched ahead: %s", shard, error)


def warn_of_small_cache(index: Index, window_rows: int) -> None:
    """Say so when the shards of a window do not fit into the cache beside those of the next."""
    for cache in index.caches:
        corpus = index.bytes
        window = corpus * min(1.0, window_rows / max(len(index), 1))
        if corpus > cache.max_bytes < 2 * window:
            rows = int(len(index) * cache.max_bytes / corpus / 2)
            logger.warning(
                "a window of %d rows has %.3g GB of shards, and the cache '%s' holds %.3g GB: shards are fetched again "
                "and again. Set data.loading.cache_gb to %.2g, or data.shuffle_window_rows to %d (less mixed)",
                window_rows,
                window / GB,
                cache.folder,
                cache.max_bytes / GB,
                2.1 * window / GB,
                rows,
            )
