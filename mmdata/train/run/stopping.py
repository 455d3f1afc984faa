"""Signals that stop a run: each is recorded, and all ranks stop between the same two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from typing_extensions import Self

from mmdata.train.ranks.lockstep import gather

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Records SIGTERM, SIGINT and SIGHUP (a lost terminal) while entered; a second SIGINT kills the process.

    Signals that were ignored before (nohup) stay ignored.

    Example:
        with StopSignals() as stop:
            for batch in batches:
                ...
                if stop.agreed():  # on every rank
                    break

    Args:
        group: ranks that must agree; a gloo group, since a GPU would be waited for. None: this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.received = 0
        """Number of the first signal that this process got; 0: none."""
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread set handlers
        for number in SIGNALS:
            # A signal that nohup or the shell of a background job ignores stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: a library in C had set it, and Python cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def agreed(self) -> int:
        """The signal that any rank got, or 0; the same on every rank. A collective."""
        return max(gather(self.received, self._group))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if number == signal.SIGINT:
            # The default action works even while Python cannot run a handler: in a long kernel or a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
