"""One run trains in a folder at a time: a second start would write into the first one's checkpoints and log.

The kernel gives a lock back when its process ends, however it ends: a run that was killed is resumed at once.
"""

from __future__ import annotations

import errno
import logging
from contextlib import ExitStack
from pathlib import Path

from mmdata.errors import ConfigError
from mmdata.files import HeldElsewhere, lock

logger = logging.getLogger("mmdata")

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What file systems answer that have no flock."""
_held: dict[Path, ExitStack] = {}
"""Folders of this process. A notebook may make a second trainer for a folder: it has one process at a time."""


def hold(folder: Path) -> None:
    """Hold a run's folder, which is made if it is missing, until `release` or the end of this process.

    Raises:
        ConfigError: another process trains there.
        OSError: the folder cannot be written.
    """
    place = folder.resolve()
    if place in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    stack = ExitStack()
    try:
        stack.enter_context(lock(place, signed=True))
    except HeldElsewhere as error:
        by = f", {error.by}" if error.by else ""
        raise ConfigError(
            f"train.output '{folder}': another process trains there{by}; wait until it has ended, end it "
            "(after a kill of torchrun its ranks may still be at work), or give another train.output"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "train.output '%s': this file system has no locks (%s): nothing refuses a second run there, so start one "
            "at a time",
            folder,
            error.strerror,
        )
    _held[place] = stack


def release(folder: Path) -> None:
    """Let another process train in the folder."""
    if stack := _held.pop(folder.resolve(), None):
        stack.close()
