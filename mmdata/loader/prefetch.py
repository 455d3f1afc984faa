"""Prefetches the shards that coming batches need. What is in a batch does not depend on it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from itertools import count
from queue import SimpleQueue

import numpy as np

from mmdata.index import Index, ShardStore
from mmdata.loader.workers.threads import Stop
from mmdata.plan import Step

logger = logging.getLogger("mmdata")

FETCHERS = 4
"""Shards fetched concurrently."""
LOOK_AGAIN = 64
"""Steps after which a shard is looked for again, since the cache may have removed it."""
STEPS_AHEAD = 64
"""Steps that are planned ahead with each step that is taken, at most."""
MAX_ROWS = 2**20
"""Rows in the steps that are planned but not taken yet, at most: 16 bytes each."""


class ShardPrefetcher:
    """Gives steps in their order, and runs ahead of them; threads fetch the shards that they need.

    Shards that are fetched and not used yet take at most half of the cache: the other half is for shards in use. A
    shard that cannot be fetched is only logged: the worker that needs the shard tries again, and raises the error.

    Args:
        steps: of one epoch.
        index: of the shards.
        store: brings them into the cache.
    """

    def __init__(self, steps: Iterator[Step], index: Index, store: ShardStore) -> None:
        self._steps: Iterator[tuple[int, Step]] = enumerate(steps)
        self._index, self._store = index, store
        self._max_unused_bytes = min(cache.max_bytes for cache in index.caches) // 2
        self._error: Exception | None = None  # what the plan raised
        self._planned: deque[Step] = deque()
        self._planned_rows = 0
        self._to_request: deque[tuple[int, int]] = deque()  # step and shard, until there is room
        self._unused: dict[int, int] = {}  # shard -> bytes, requested, while no step that needs it was taken
        self._last_seen: dict[int, int] = {}  # shard -> number of the last step for which the cache is asked for it
        self._wanted: SimpleQueue[int | None] = SimpleQueue()  # None: a thread is to end
        self._stop = Stop()
        # Daemons: a program that ends must not wait for a server that does not answer.
        threads = [threading.Thread(target=self._fetch, name="mmdata-fetch", daemon=True) for _ in range(FETCHERS)]
        try:
            for thread in threads:
                thread.start()
        except BaseException:  # an interrupt: the caller gets no object with which it could end the threads that run
            self.close()
            raise

    def __iter__(self) -> Iterator[Step]:
        """The steps, in their order; raises what the plan raises."""
        for taken in count():
            self._plan_ahead()
            self._request(taken)
            if not self._planned:
                break
            step = self._planned.popleft()
            self._planned_rows -= len(step.rows)
            for shard in self._shards(step):
                self._unused.pop(shard, None)
            yield step
        if self._error:
            raise self._error

    def close(self) -> None:
        """Request no more shards, and abandon those that are being fetched."""
        self._stop.set()
        for _ in range(FETCHERS):
            self._wanted.put(None)

    def _shards(self, step: Step) -> list[int]:
        return np.unique(self._index.locate(step.rows[step.rows >= 0])[0]).tolist()

    def _plan_ahead(self) -> None:
        """Plan further steps, and list their shards."""
        for _ in range(STEPS_AHEAD):
            if self._error or self._planned_rows >= MAX_ROWS:
                return
            try:
                if (planned := next(self._steps, None)) is None:
                    return
            except Exception as error:
                self._error = error
                return
            number, step = planned
            self._planned.append(step)
            self._planned_rows += len(step.rows)
            for shard in self._shards(step):
                if number - self._last_seen.get(shard, -LOOK_AGAIN) >= LOOK_AGAIN:
                    self._last_seen[shard] = number
                    self._to_request.append((number, shard))

    def _request(self, taken: int) -> None:
        """Have listed shards fetched that are not in the cache, while the unused ones leave room; `taken`: steps."""
        while self._to_request:
            number, shard = self._to_request[0]
            if not self._store.is_here(shard):
                size = self._index.listed(shard).bytes
                if number >= taken:  # else a worker waits for it already
                    # A shard larger than the room would otherwise wait for ever.
                    if self._unused and sum(self._unused.values()) + size > self._max_unused_bytes:
                        return
                    self._unused[shard] = size
                self._wanted.put(shard)
            self._to_request.popleft()

    def _fetch(self) -> None:
        while (shard := self._wanted.get()) is not None:
            try:
                self._store.fetch(shard, self._stop)
            except Exception as error:
                logger.debug("shard %d was not prefetched: %s", shard, error)
