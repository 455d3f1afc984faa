"""Logs Pillow's warnings with the name of the sample, once for each kind of warning in a process.

Pillow warns through `warnings`, which does not name the image. They are redirected, but only for warnings from Pillow
in threads that are inside `name_warnings`.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import PIL

from mmdata.processes import new_lock

logger = logging.getLogger("mmdata")

_PILLOW = os.path.dirname(PIL.__file__) + os.sep


class _CurrentSample(threading.local):
    name: Callable[[], str] | None = None


_sample = _CurrentSample()
_lock = new_lock()
_told: set[tuple[str, int]] = set()  # places in Pillow's code that have warned
_show_before: Callable[..., Any] = warnings.showwarning


@contextmanager
def name_warnings(name: Callable[[], str]) -> Generator[None, None, None]:
    """Context in which this thread's warnings from Pillow are logged with the name of a sample.

    Args:
        name: gives the name of the sample with its shard or file; called only for a warning.
    """
    _take_over()
    before, _sample.name = _sample.name, name
    try:
        yield
    finally:
        _sample.name = before


def sample_name(shard: str, key: str) -> str:
    """How messages name a sample of a shard."""
    return f"shard '{shard}', sample '{key}'"


def _take_over() -> None:
    global _show_before
    with _lock:
        if warnings.showwarning is not _show:  # the first time, or after a library replaced the hook
            _show_before, warnings.showwarning = warnings.showwarning, _show


def _show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any) -> None:
    """Replaces `warnings.showwarning`."""
    if _sample.name is None or not filename.startswith(_PILLOW):
        _show_before(message, category, filename, lineno, *rest, **more)
        return
    with _lock:
        is_new = (filename, lineno) not in _told
        _told.add((filename, lineno))
    if is_new:
        said = " ".join(str(message).split())
        logger.warning("%s: Pillow warns: %s (said once, for the first image like it)", _sample.name(), said)
