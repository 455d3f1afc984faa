"""How often this process has forked: a child sees what its parent has mapped, also what others write there later."""

from __future__ import annotations

import os
import threading


class Forks:
    """Counts forks, from the moment it is made.

    Attributes:
        count: of forks that have happened or are just about to.
        lock: while a thread holds it, no other one forks.
    """

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before, after_in_parent=self.lock.release, after_in_child=self.lock.release
            )

    def _before(self) -> None:
        self.lock.acquire()
        self.count += 1


forks = Forks()
"""Of this process."""
