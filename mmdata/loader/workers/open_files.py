"""Open files: how many a loader needs, checked before it begins, so that no run fails in mid-epoch for want of them."""

from __future__ import annotations

import os
import resource

from mmdata.config import DataConfig
from mmdata.cores import most_workers
from mmdata.errors import ConfigError
from mmdata.shards.store import MAX_OPEN

OTHERS = 32
"""Files that are open for a moment: columns being read, shards being fetched, sockets, logs."""
HELD_BATCHES = 3
"""Batches besides the prefetched ones that hold buffers: in use, just dropped, and between two epochs."""
RAISED = 4096
"""A soft limit that is too low is raised to this, if the hard limit allows it: for other loaders and the program."""


def files_needed(data: DataConfig, num_shards: int) -> int:
    """Files that a loader has open at the same time in one process, at most. Mapped columns need none.

    Example:
        2 threads, prefetch 2, 1,000 shards: 64 shards stay open, each thread may still read one that was closed, and 32
        others: 98. With a worker process 6 batches (2 prefetched, 4 more) have 2 shared buffers each: 110.
    """
    joined = MAX_OPEN * sum(one.shards is not None for one in data.join)
    shards = min(num_shards, MAX_OPEN) + joined + most_workers(data.loading.num_workers)
    in_processes = 2 * (data.loading.prefetch_batches + data.loading.num_processes + HELD_BATCHES)
    buffers = 0 if data.loading.worker_type == "thread" else in_processes
    return shards + buffers + OTHERS


def ensure_files(needed: int) -> None:
    """Ensure that this process can open `needed` more files; raises its soft limit if that is too low.

    Raises:
        ConfigError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/dev/fd")) - 1  # `listdir` itself opens one
    total = open_now + needed
    if _allows(soft, total):
        return
    if not _allows(hard, total):
        raise ConfigError(
            f"this process may open {hard} files, {open_now} are open, and a loader needs up to {needed} more (shards, "
            f"buffers, sockets): let it open {RAISED} (as root `ulimit -n {RAISED}`, for a container "
            f"`--ulimit nofile={RAISED}`), or set data.loading.num_workers or data.loading.prefetch_batches to less"
        )
    raised = max(total, RAISED)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised if _allows(hard, raised) else hard, hard))


def _allows(limit: int, files: int) -> bool:
    return limit == resource.RLIM_INFINITY or files <= limit
