"""Logs Pillow's warnings with the name of the sample, once for each kind of warning in a process.

Pillow warns through `warnings`, and in one place through `logging`; neither names the image. Both are redirected, but
only for warnings from Pillow in threads that are inside `name_warnings`.
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

from mmdata.forked import new_lock

logger = logging.getLogger("mmdata")

_PILLOW = os.path.dirname(PIL.__file__) + os.sep


class _Sample(threading.local):
    name: Callable[[], str] | None = None


_sample = _Sample()
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
    if warnings.showwarning is _show:
        return
    with _lock:
        if warnings.showwarning is not _show:  # the first time, or after a library replaced the hook
            _show_before = warnings.showwarning
            warnings.showwarning = _show
            log = logging.getLogger("PIL.TiffImagePlugin")
            if _keep not in log.filters:
                log.addFilter(_keep)


def _show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any) -> None:
    """Replaces `warnings.showwarning`."""
    if _sample.name is None or not filename.startswith(_PILLOW):
        _show_before(message, category, filename, lineno, *rest, **more)
    else:
        _tell(str(message), (filename, lineno), _sample.name)


def _keep(record: logging.LogRecord) -> bool:
    """Filters Pillow's logger."""
    if _sample.name is None or record.levelno < logging.WARNING:
        return True
    _tell(record.getMessage(), (record.pathname, record.lineno), _sample.name)
    return False


def _tell(message: str, place: tuple[str, int], name: Callable[[], str]) -> None:
    with _lock:
        if place in _told:
            return
        _told.add(place)
    said = " ".join(message.split())
    logger.warning("%s: Pillow warns: %s (said once, for the first image like it)", name(), said)
