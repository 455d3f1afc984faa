"""Open files: how many a loader needs, looked at before it begins, so that no run ends for it in mid-epoch."""

from __future__ import annotations

import os
import resource

from mmdata.config import DataConfig
from mmdata.cores import most_workers
from mmdata.errors import ConfigError
from mmdata.shards.store import MAX_OPEN

OTHERS = 32
"""Files open for a moment: columns that are being read, shards that are being fetched, sockets, logs."""
HELD_BATCHES = 3
"""In use, dropped a moment ago, and between two epochs. Several processes may have one more ahead each."""
RAISED = 4096
"""A soft limit that is too low is raised so far, where the hard one allows it: for other loaders, and the program."""


def files_needed(data: DataConfig, num_shards: int) -> int:
    """Files that a loader holds open at once in one process, at most. Mapped columns hold none.

    Example:
        2 threads, prefetch 2, over 1,000 shards: 64 stay open, each thread may still read one that was put out, and 32
        others: 98. In a worker process each of 2 batches ahead and 4 more has 2 buffers without a name: 110.
    """
    shards = min(num_shards, MAX_OPEN) + most_workers(data.loading.num_workers)
    in_processes = 2 * (data.loading.prefetch_batches + data.loading.num_processes + HELD_BATCHES)
    buffers = 0 if data.loading.worker_type == "thread" else in_processes
    return shards + buffers + OTHERS


def ensure_files(needed: int) -> None:
    """Let this process open so many files more; its soft limit is raised where it is lower.

    Raises:
        ConfigError: the hard limit is lower too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = len(os.listdir("/dev/fd")) - 1  # to list them is to open one
    total = there + needed
    if _allows(soft, total):
        return
    if not _allows(hard, total):
        raise ConfigError(
            f"this process may open {hard} files, {there} are open, and a loader needs up to {needed} more (shards, "
            f"buffers, sockets): let it open {RAISED} (as root `ulimit -n {RAISED}`, for a container "
            f"`--ulimit nofile={RAISED}`), or set data.loading.num_workers or data.loading.prefetch_batches to less"
        )
    raised = max(total, RAISED)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised if _allows(hard, raised) else hard, hard))


def _allows(limit: int, files: int) -> bool:
    return limit == resource.RLIM_INFINITY or files <= limit
