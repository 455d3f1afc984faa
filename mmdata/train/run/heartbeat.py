"""Positions of all ranks, exchanged through the ranks' store: rank 0 reads those of all, the others that of rank 0.

A thread exchanges them, since the store may not answer: it may live in a process that is stopped.
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
from mmdata.train.run.presence import Hub, Spoke

_ORDER = ("starting", "waiting for data", "waiting for the other ranks")
"""Activities in the order in which a step goes through them; all others come after these."""
_PREFIXES = itertools.count()
"""Numbers the runs of a process: each has keys of its own in the store."""


@dataclass(frozen=True)
class RankPosition:
    """How far a rank is.

    Attributes:
        step: updates it has made.
        doing: what it does, in words.
        for_s: seconds since it began to do that, by its own clock.
        ended: the error that it ended with; "" while it runs.
    """

    step: int
    doing: str
    for_s: float = 0.0
    ended: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, {self.doing}"

    def order(self) -> tuple[int, int]:
        """Rises along a run: the other ranks wait for the one with the lowest."""
        return self.step, _ORDER.index(self.doing) if self.doing in _ORDER else len(_ORDER)


class OwnPosition:
    """The position of this rank, set by the loop at each stage of a step."""

    def __init__(self) -> None:
        self._step, self._doing, self._since, self.ended = 0, "starting", time.monotonic(), ""

    def move(self, step: int, doing: str) -> None:
        """Set the position and restart its clock; the same position again also counts as progress."""
        self._step, self._doing, self._since = step, doing, time.monotonic()

    def now(self) -> RankPosition:
        """The position now."""
        return RankPosition(self._step, self._doing, time.monotonic() - self._since, self.ended)


class Heartbeats:
    """The last known positions of other ranks, and which of them are gone.

    Attributes:
        presence: of the other ranks.

    Args:
        own: this rank's position, sent at each interval.
        group: gloo; its ranks all construct one. A collective.
        interval_s: between two exchanges.
    """

    def __init__(self, own: OwnPosition, group: dist.ProcessGroup, *, interval_s: float) -> None:
        self.interval_s = interval_s
        self.verdict = ""
        """The message with which all ranks end the run; "" while it goes on."""
        self.ask_all = collectives.rank() == 0
        self._own = own
        # A clone has a connection of its own: the main thread may block the default one in a call.
        store = distributed_c10d._get_default_store().clone()  # pyright: ignore[reportPrivateUsage]
        self._store = distributed_c10d.PrefixStore(f"mmdata/heartbeats/{next(_PREFIXES)}", store)
        self._ticks = itertools.count()
        self._known: dict[int, tuple[int, RankPosition, float]] = {}  # tick, position, when that tick was read
        self._told = set[int]()  # ranks that have read the verdict
        self._lock = threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        self.presence = Hub(self._last_seen) if collectives.rank() == 0 else Spoke(collectives.rank(), self._last_seen)
        self._send()
        if isinstance(self.presence, Hub):
            self._store.set("verdict", "")
            self._store.set("presence", self.presence.address)
        gather(None, group)  # now every rank has written its key: a get of a missing key would wait
        self._receive(range(collectives.world_size()))
        if isinstance(self.presence, Spoke):
            self.presence.connect(self._store.get("presence").decode())
        self._thread = threading.Thread(target=self._exchange, daemon=True, name="mmdata-heartbeats")
        self._thread.start()

    def known(self) -> dict[int, tuple[RankPosition, float]]:
        """The last known position of other ranks, and seconds since their last heartbeat."""
        now = time.monotonic()
        with self._lock:
            known = dict(self._known)
        asked = known if self.ask_all else {0: known[0]} if 0 in known else {}
        return {rank: (position, now - heard) for rank, (_, position, heard) in asked.items()}

    def untold(self, patience_s: float) -> bool:
        """Whether a rank that was heard of in the last `patience_s` has not read the verdict, as far as is known."""
        return any(rank not in self._told and ago_s <= patience_s for rank, (_, ago_s) in self.known().items())

    def exchange_soon(self) -> None:
        """Exchange now, without waiting for the interval to end."""
        self._wake.set()

    def close(self) -> None:
        """Send a last time, and leave the other ranks; waits a second at most."""
        last = self._own.now()
        self.presence.leave(f"{last}: {last.ended}" if last.ended else "")
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=1.0)

    def _last_seen(self, rank: int) -> str:
        with self._lock:
            return str(self._known[rank][1]) if rank in self._known else "the start"

    def _exchange(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.is_set()
            try:
                self._send()
                if not stopping:
                    self._receive(range(collectives.world_size()) if self.ask_all else (0,))
            except RuntimeError:
                pass  # the store does not answer: `known` shows how old the last heartbeats are
            self._wake.wait(self.interval_s)
            self._wake.clear()

    def _send(self) -> None:
        beat = [next(self._ticks), asdict(self._own.now()), bool(self.verdict)]
        self._store.set(str(collectives.rank()), json.dumps(beat))
        if self.verdict and collectives.rank() == 0:
            self._store.set("verdict", self.verdict)

    def _receive(self, ranks: range | tuple[int, ...]) -> None:
        self.verdict = self.verdict or self._store.get("verdict").decode()
        for rank in ranks:
            if rank == collectives.rank():
                continue
            tick, position, told = json.loads(self._store.get(str(rank)))
            if told:
                self._told.add(rank)
            with self._lock:
                if rank not in self._known or self._known[rank][0] != tick:
                    self._known[rank] = tick, RankPosition(**position), time.monotonic()
