"""Messages between two processes over a Unix socket, errors among them."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from mmdata.errors import ConfigError, DataError, LoadError, printable

MAX_FILES = 8
"""File descriptors in one message, at most."""
REMEDY = (
    "raise the limit (`ulimit -n 65536` for files, the container's for memory), "
    "or set data.loading.worker_type to thread"
)
KNOWN_ERRORS = {"ConfigError": ConfigError, "DataError": DataError, "LoadError": LoadError}
LINE_END = "\n"


class Channel:
    """One end of a Unix socket: sends and receives JSON, each message with file descriptors.

    Args:
        end: of a socket pair.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message, from any thread.

        Raises:
            EOFError: the other process has closed its end, or has ended; or this end is closed.
        """
        body = json.dumps(message).encode()
        try:
            # Threads take turns: the parts of two messages must not mix. The descriptors travel with the header, since
            # only that call sends them.
            with self._lock:
                socket.send_fds(self._socket, [len(body).to_bytes(8, "big")], files)
                self._socket.sendall(body)
        except OSError as error:
            if self._is_end(error):
                raise EOFError from error
            raise

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message; one thread only.

        Raises:
            EOFError: the other process has closed its end, or has ended; or this end is closed.
            ConfigError: this process may not open as many files as the message has.
        """
        try:
            header, files, flags, _ = socket.recv_fds(self._socket, 8, MAX_FILES)
            # A stream socket may give less than was asked for, also of the header's 8 bytes.
            body = self._read(int.from_bytes(header + self._read(8 - len(header)), "big"))
        except OSError as error:
            if self._is_end(error):
                raise EOFError from error
            raise
        # At the limit on open files the kernel drops descriptors, and reports it in this flag alone.
        if flags & socket.MSG_CTRUNC:
            raise ConfigError(
                f"data.loading.worker_type process: too many open files in process {os.getpid()}; {REMEDY}"
            )
        return json.loads(body), list(files)

    def wait(self, seconds: float) -> bool:
        """Wait for a message or the end of the other process; returns whether one has come within `seconds`."""
        if self._closed:
            return False
        poll = select.poll()  # `select.select` refuses descriptors from 1024 on
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """Close this end: the other process gets an EOFError."""
        self._socket.close()

    @property
    def _closed(self) -> bool:
        return self._socket.fileno() == -1

    def _is_end(self, error: OSError) -> bool:
        return self._closed or isinstance(error, ConnectionError)

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._socket.recv(min(size, 2**20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class WorkerTraceback(Exception):
    """The traceback of an error in a worker process; it is the `__cause__` of the error that the loader raises."""

    def __init__(self, text: str) -> None:
        super().__init__(f"in the loader's worker process:\n{printable(text, keep=LINE_END)}")


def message_of(error: BaseException) -> dict[str, str]:
    """The message for an error that is being handled."""
    return {"type": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}


def error_of(message: dict[str, str]) -> Exception:
    """The error of a message: of its own type if that is one of `mmdata.errors`, else a `LoadError`."""
    kind, text = message["type"], message["text"]
    error = KNOWN_ERRORS[kind](text) if kind in KNOWN_ERRORS else LoadError(f"{kind}: {text}")
    error.__cause__ = WorkerTraceback(message["traceback"])
    return error
