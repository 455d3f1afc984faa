"""Which ranks are gone: each has a connection to rank 0, which the kernel closes when the process ends.

A process that is stopped, or whose interpreter's lock is taken for long, keeps its connection: silence says nothing
here. Only the end of a process counts, and a host whose kernel does not answer for `CUT_OFF_S`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("mmdata")

CUT_OFF_S = 45
"""A host that answers no probe of the network for this long is gone."""
CONNECT_S = 10.0
"""Longest time to connect to rank 0."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LONGEST = 64 * 1024
"""Bytes of a message; a connection that sends more is closed."""


@dataclass(frozen=True)
class Gone:
    """A rank that takes no further part.

    Attributes:
        words: who, where and why: "rank 1 is gone (killed?), last heard of at step 5, computing".
        ended: it has said so itself, with the error that ended it.
        noticed: on this process's monotonic clock.
    """

    words: str
    ended: bool
    noticed: float = field(default_factory=time.monotonic)


class Presence:
    """The ranks that are gone, as this rank knows.

    Args:
        rank: of this process.
        last_seen: of a rank, where it was when last heard of.
    """

    def __init__(self, rank: int, last_seen: Callable[[int], str]) -> None:
        self.rank = rank
        self._last_seen = last_seen
        self._gone: dict[int, Gone] = {}
        self._left = threading.Event()
        self._sockets: set[socket.socket] = set()
        ours = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (presence := ours()) and presence._drop())

    def gone(self) -> list[Gone]:
        """Ranks that are gone, as noticed; those whose process ended without a word come first."""
        return sorted(self._gone.copy().values(), key=lambda one: (one.ended, one.noticed))

    def leave(self, ended: str) -> None:
        """Tell the others that this rank takes no further part; `ended`: where and with which error, "" without one."""
        raise NotImplementedError

    def _note(self, rank: int, ended: str) -> None:
        if rank not in self._gone and not self._left.is_set():
            lost = f"rank {rank} is gone (killed?), last heard of at {self._last_seen(rank)}"
            gone = Gone(f"rank {rank} ended at {ended}" if ended else lost, bool(ended))
            self._pass_on(rank, gone)
            self._gone[rank] = gone

    def _pass_on(self, rank: int, gone: Gone) -> None:
        """Tell the others, before this rank acts on it."""

    def _close(self) -> None:
        for each in list(self._sockets):
            each.close()

    def _drop(self) -> None:
        """Drop the connections in a forked child, which may outlive this process and must not hold them open."""
        for each in list(self._sockets):
            if each.fileno() >= 0:
                os.close(each.detach())  # close() would wait for the file that a thread of the parent reads


class Hub(Presence):
    """Rank 0's side: it listens, and tells all others who is gone.

    Attributes:
        address: for `Spoke.connect`.
    """

    def __init__(self, last_seen: Callable[[int], str]) -> None:
        super().__init__(0, last_seen)
        master = os.environ.get("MASTER_ADDR", "")
        self._server = _listen(master if master in LOOPBACK else None)
        self._sockets.add(self._server)
        self._token = secrets.token_hex(16)
        hosts = [host for host in (master, socket.gethostname()) if host]
        self.address = json.dumps([hosts, self._server.getsockname()[1], self._token])
        self._ranks: dict[socket.socket, int] = {}  # connections that have shown the token
        self._read: dict[socket.socket, bytes] = {}  # the beginning of a message
        threading.Thread(target=self._serve, daemon=True, name="mmdata-presence").start()

    def leave(self, ended: str) -> None:
        self._tell_all({"rank": 0, "ended": ended})
        self._left.set()  # after it the connections are closed

    def _tell_all(self, message: dict[str, Any]) -> None:
        for each in list(self._ranks):
            _send(each, message)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._left.is_set():
                for key, _ in selector.select(timeout=1.0):
                    ready: Any = key.fileobj
                    if ready is self._server:
                        each = self._accept()
                        if each is not None:
                            selector.register(each, selectors.EVENT_READ)
                    elif not self._hear(ready):
                        selector.unregister(ready)
                        self._sockets.discard(ready)
                        ready.close()
        self._close()

    def _accept(self) -> socket.socket | None:
        try:
            each, _ = self._server.accept()
            _prepare(each)
        except OSError:
            return None
        self._sockets.add(each)
        self._read[each] = b""
        return each

    def _hear(self, each: socket.socket) -> bool:
        """Take what a connection has sent; False where it has ended."""
        try:
            data = each.recv(_LONGEST)
        except OSError:
            data = b""
        *lines, rest = (self._read[each] + data).split(b"\n")
        self._read[each] = rest
        for line in lines:
            message = _parse(line)
            if secrets.compare_digest(str(message.get("token")).encode(), self._token.encode()):
                self._ranks[each] = int(message["rank"])
            elif each in self._ranks and "ended" in message:
                rank = self._ranks.pop(each)
                if message["ended"]:  # else it has done its part
                    self._note(rank, str(message["ended"]))
        known = each in self._ranks
        if data and len(rest) < _LONGEST and (known or not lines):
            return True
        if known:
            self._note(self._ranks.pop(each), "")
        return False

    def _pass_on(self, rank: int, gone: Gone) -> None:
        self._tell_all({"gone": rank, "words": gone.words, "ended": gone.ended})


class Spoke(Presence):
    """The side of every other rank."""

    def connect(self, address: str) -> None:
        """Connect to rank 0 in the background."""
        threading.Thread(target=self._listen, args=(address,), daemon=True, name="mmdata-presence").start()

    def leave(self, ended: str) -> None:
        self._left.set()
        for each in list(self._sockets):
            _send(each, {"ended": ended})

    def _listen(self, address: str) -> None:
        hosts, port, token = json.loads(address)
        connection = _connect(hosts, port)
        if connection is None:
            logger.warning(
                "rank %d cannot connect to rank 0 at %s, port %d: if a rank's process ends, this one learns of it by "
                "the watchdog's time limit only; let ranks connect to each other on all ports",
                self.rank,
                " or ".join(hosts),
                port,
            )
            return
        self._sockets.add(connection)
        _send(connection, {"token": token, "rank": self.rank})
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    message = _parse(line)
                    if "gone" in message:
                        gone = Gone(str(message["words"]), bool(message["ended"]))
                        self._gone.setdefault(int(message["gone"]), gone)
                    elif message.get("ended"):
                        self._note(0, str(message["ended"]))
                    else:
                        return  # rank 0 has done its part
        except (OSError, ValueError):
            pass
        finally:
            self._sockets.discard(connection)
            connection.close()
        self._note(0, "")


def _listen(host: str | None) -> socket.socket:
    """A listening socket on a free port of one address, or of all."""
    if host is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _connect(hosts: list[str], port: int) -> socket.socket | None:
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_S)
            _prepare(connection)
            connection.settimeout(None)
        except OSError:
            continue
        return connection
    return None


def _prepare(connection: socket.socket) -> None:
    """Have the kernel probe the other host while nothing is sent, and give up on what it does not acknowledge."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = CUT_OFF_S // 3
    times = {"TCP_KEEPIDLE": third, "TCP_KEEPINTVL": third, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 1000 * CUT_OFF_S}
    for name, value in times.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # its end is noticed where it is read
        connection.sendall(json.dumps(message).encode() + b"\n")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
