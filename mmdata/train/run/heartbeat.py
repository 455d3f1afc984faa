"""Where each rank of a run is: told through the ranks' store; rank 0 hears of all, the others of rank 0.

A thread of its own talks, since the store may not answer: it may live in a process that is stopped.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather

_ORDER = ("starting", "waiting for data", "waiting for the other ranks")
"""What comes first in a step; all else comes after, in no order."""
_PREFIXES = itertools.count()


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        step: updates it has made.
        doing: in words.
        for_s: seconds it has been there, by its own clock.
        ended: the error that it ended with; "" while it runs.
    """

    step: int
    doing: str
    for_s: float = 0.0
    ended: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, {self.doing}"

    def order(self) -> tuple[int, int]:
        """Rises along a run: the rank of the lowest is the one that the others wait for."""
        return self.step, _ORDER.index(self.doing) if self.doing in _ORDER else len(_ORDER)


class OwnPosition:
    """The place of this rank, as the loop sets it; cheap."""

    def __init__(self) -> None:
        self._step, self._doing, self._since, self.ended = 0, "starting", time.monotonic(), ""

    def move(self, step: int, doing: str) -> None:
        """Be somewhere else, or there again: either is a sign of life."""
        self._step, self._doing, self._since = step, doing, time.monotonic()

    def place(self) -> Place:
        """Where it is now."""
        return Place(self._step, self._doing, time.monotonic() - self._since, self.ended)


class Heartbeats:
    """What this rank knows of the others.

    Args:
        here: this rank's place, told at each interval.
        group: gloo; its ranks all construct one. A collective.
        interval_s: between two exchanges.
    """

    def __init__(self, here: OwnPosition, group: dist.ProcessGroup, *, interval_s: float) -> None:
        self.interval_s = interval_s
        self.verdict = ""
        """Why the run ends, in words that all ranks say."""
        self.ask_all = collectives.rank() == 0
        self._here = here
        # A clone is a connection of its own: the main thread's may be waiting in a call.
        store = distributed_c10d._get_default_store().clone()  # pyright: ignore[reportPrivateUsage]
        self._store = distributed_c10d.PrefixStore(f"mmdata/places/{next(_PREFIXES)}", store)
        self._ticks = itertools.count()
        self._known: dict[int, tuple[int, Place, float]] = {}  # tick, place, when it was first heard
        self._lock = threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._tell()
        if collectives.rank() == 0:
            self._store.set("verdict", "")
        gather(None, group)  # from here on every key is there
        self._hear(range(collectives.world_size()))
        self._thread = threading.Thread(target=self._talk, daemon=True, name="mmdata-places")
        self._thread.start()

    def known(self) -> dict[int, tuple[Place, float]]:
        """The last known place of other ranks, and seconds since they were heard of."""
        now = time.monotonic()
        with self._lock:
            known = dict(self._known)
        asked = known if self.ask_all else {0: known[0]} if 0 in known else {}
        return {rank: (place, now - heard) for rank, (_, place, heard) in asked.items()}

    def exchange_soon(self) -> None:
        """Tell and hear now, in place of after the interval."""
        self._wake.set()

    def close(self) -> None:
        """Tell a last time; waits no longer than a second."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=1.0)

    def _talk(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.is_set()
            try:
                self._tell()
                if not stopping:
                    self._hear(range(collectives.world_size()) if self.ask_all else (0,))
            except RuntimeError:
                pass  # no news of anybody: whoever judges sees how old the last ones are
            self._wake.wait(self.interval_s)
            self._wake.clear()

    def _tell(self) -> None:
        self._store.set(str(collectives.rank()), json.dumps([next(self._ticks), asdict(self._here.place())]))
        if self.verdict and collectives.rank() == 0:
            self._store.set("verdict", self.verdict)

    def _hear(self, ranks: range | tuple[int, ...]) -> None:
        self.verdict = self.verdict or self._store.get("verdict").decode()
        for rank in ranks:
            if rank == collectives.rank():
                continue
            tick, place = json.loads(self._store.get(str(rank)))
            with self._lock:
                if rank not in self._known or self._known[rank][0] != tick:
                    self._known[rank] = tick, Place(**place), time.monotonic()
