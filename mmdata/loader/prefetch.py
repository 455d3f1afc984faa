"""Prefetches the shards that coming batches need. What is in a batch does not depend on it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np

from mmdata.index import Index, ShardStore
from mmdata.loader.workers.interrupt_safe import Stop
from mmdata.plan import Step
from mmdata.storage.cache import GB

logger = logging.getLogger("mmdata")

FETCHERS = 4
"""Shards fetched concurrently."""
LOOK_AGAIN = 64
"""Steps after which a shard is looked for again, since the cache may have removed it."""
MAX_ROWS = 2**20
"""Rows in the steps that are planned but not taken yet, at most: 16 bytes each."""


class ShardPrefetcher:
    """Gives steps in their order; one thread runs ahead through the steps, and others fetch the shards they need.

    Shards that are fetched and not used yet take at most half of the cache: the other half is for shards in use. A
    shard that cannot be fetched is only logged: the worker that needs the shard tries again, and raises the error.

    Args:
        steps: of one epoch; iterated in another thread.
        index: of the shards.
        store: brings them into the cache.
    """

    def __init__(self, steps: Iterator[Step], index: Index, store: ShardStore) -> None:
        self._steps = steps
        self._index = index
        self._store = store
        self._max_unused_bytes = min(cache.max_bytes for cache in index.caches) // 2
        # Entered itself, not through `_changed`: an interrupt within `Condition.__enter__`, which is Python, could
        # leave the lock held. Only the threads of this object wait for it; an interrupt reaches the main thread alone.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._owner = os.getpid()
        self._stop = Stop()
        self._error: Exception | None = None  # what the plan raised
        self._ready: SimpleQueue[Step | None] = SimpleQueue()  # None: there are no more steps
        self._ready_rows = 0
        self._taken_steps = 0
        self._unused: dict[int, int] = {}  # shard -> bytes, requested, while no step that needs it was taken
        self._last_seen: dict[int, int] = {}  # shard -> number of the last step for which the cache was asked for it
        self._wanted: SimpleQueue[int | None] = SimpleQueue()
        # Daemons: a program that ends must not wait for a server that does not answer.
        threads = [threading.Thread(target=self._plan_ahead, name="mmdata-ahead", daemon=True)]
        threads += [threading.Thread(target=self._fetch, name="mmdata-fetch", daemon=True) for _ in range(FETCHERS)]
        try:
            for thread in threads:
                thread.start()
        except BaseException:  # an interrupt: the caller gets no object with which it could end the threads that run
            self.close()
            raise

    def __iter__(self) -> Iterator[Step]:
        """The steps, in their order; raises what the plan raises."""
        while (step := self._ready.get()) is not None:
            with self._lock:
                self._taken_steps += 1
                self._ready_rows -= len(step.rows)
                for shard in self._shards(step):
                    self._unused.pop(shard, None)
                self._changed.notify_all()
            yield step
        if self._error:
            raise self._error

    def close(self) -> None:
        """Request no more shards, and abandon those that are being fetched."""
        if self._owner != os.getpid():  # a forked child has none of the threads, one of which may hold the lock
            return
        self._stop.set()
        with self._lock:
            self._changed.notify_all()

    def _shards(self, step: Step) -> list[int]:
        return np.unique(self._index.locate(step.rows[step.rows >= 0])[0]).tolist()

    def _plan_ahead(self) -> None:
        """Queue the steps, and request the shards of each."""
        try:
            for number, step in enumerate(self._steps):
                with self._lock:
                    self._changed.wait_for(lambda: self._stop.is_set() or self._ready_rows < MAX_ROWS)
                    self._ready_rows += len(step.rows)
                # The step first: a worker that takes it fetches its shard without waiting for room in the cache.
                self._ready.put(step)
                for shard in self._shards(step):
                    self._request(shard, number)
                if self._stop.is_set():
                    return
        except Exception as error:
            self._error = error
        finally:
            self._ready.put(None)
            for _ in range(FETCHERS):
                self._wanted.put(None)

    def _request(self, shard: int, number: int) -> None:
        """Have a shard that step `number` needs fetched, once the unused shards leave room for it."""
        if number - self._last_seen.get(shard, -LOOK_AGAIN) < LOOK_AGAIN:
            return
        self._last_seen[shard] = number
        if self._store.is_here(shard):
            return
        size = self._index.listed(shard).bytes
        with self._lock:
            self._changed.wait_for(
                lambda: (
                    self._stop.is_set()
                    or number < self._taken_steps  # a worker waits for this shard already
                    or not self._unused  # a shard larger than the room would otherwise wait for ever
                    or sum(self._unused.values()) + size <= self._max_unused_bytes
                )
            )
            if number >= self._taken_steps:
                self._unused[shard] = size
        self._wanted.put(shard)

    def _fetch(self) -> None:
        while (shard := self._wanted.get()) is not None:
            try:
                self._store.fetch(shard, self._stop)
            except Exception as error:
                logger.debug("shard %d was not prefetched: %s", shard, error)


def warn_of_small_cache(index: Index, window_rows: int) -> None:
    """Warn if the shards of a window and those of the next window do not fit into the cache together."""
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
