"""Open files: how many a loader needs, checked before it begins, so that no run fails in mid-epoch for want of them."""

from __future__ import annotations

import os
import resource

import numpy as np

from mmdata.config import DataConfig
from mmdata.cores import most_workers
from mmdata.errors import ConfigError
from mmdata.index.store import MAX_OPEN
from mmdata.plan import Plan
from mmdata.plan.rows import selection_of

OTHERS = 32
"""Files that are open for a moment: columns being read, shards being fetched, sockets, logs."""
HELD_BATCHES = 3
"""Batches besides the prefetched ones that hold buffers: in use, just dropped, and between two epochs."""
RAISED = 4096
"""A soft limit that is too low is raised to this, if the hard limit allows it: for other loaders and the program."""


WINDOWS = 2
"""Windows whose shards stay open: that of the batches in use, and the next one, into which prefetching reaches."""


def files_needed(data: DataConfig, num_shards: int) -> int:
    """Files that a loader must be able to open in one process. Mapped columns need none.

    Example:
        2 threads, prefetch 2, 1,000 shards: 64 shards stay open, each thread may still read one that was closed, and 32
        others: 98. With a worker process 6 batches (2 prefetched, 4 more) have 2 shared buffers each: 110.
        `most_shards` says how many more shards stay open where this process may open more files.
    """
    joined = MAX_OPEN * sum(one.shards is not None for one in data.join)
    shards = min(num_shards, MAX_OPEN) + joined + most_workers(data.loading.num_workers)
    in_processes = 2 * (data.loading.prefetch_batches + data.loading.num_processes + HELD_BATCHES)
    buffers = 0 if data.loading.worker_type == "thread" else in_processes
    return shards + buffers + OTHERS


def most_shards(data: DataConfig, plan: Plan) -> int:
    """Shards that a loader keeps open: those of two windows, if all its files are at most half of what may be opened.

    A batch mixes the rows of a window: with fewer shards open, each batch would open nearly all of them anew. The other
    half is for other loaders and the program. `files_needed` is what a loader has in any case.

    Example:
        Windows of 2^20 rows, 1,000 shards of 10,000 rows: 105 shards hold a window, so 212 stay open.
    """
    selection = selection_of(plan.rows)
    rows = np.sort(np.diff(plan.rows.starts if selection is None else selection.starts))
    rows = rows[rows > 0]
    # At most: the smallest shards first, and of each lane and dataset the one that completes its window.
    of_window = int(np.searchsorted(rows.cumsum(), plan.window_rows)) + plan.num_lanes * len(plan.mixture.shares)
    wanted = min(WINDOWS * of_window, len(rows))
    joined = [one.shards for one in data.join if one.shards is not None]
    others = files_needed(data, 0) - MAX_OPEN * len(joined)
    allowed = _room(2 * (others + wanted * (1 + len(joined)))) // 2
    return max(MAX_OPEN, min(wanted, (allowed - others) // (1 + len(joined))))


def _room(needed: int) -> int:
    """Files that this process can still open; raises its soft limit if that is below `needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = _open_now() + needed
    if not _allows(soft, total):
        soft = max(total, RAISED) if _allows(hard, max(total, RAISED)) else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return needed if _allows(soft, total) else soft - _open_now()


def ensure_files(needed: int) -> None:
    """Ensure that this process can open `needed` more files; raises its soft limit if that is too low.

    Raises:
        ConfigError: the hard limit is too low.
    """
    if (room := _room(needed)) < needed:
        open_now = _open_now()
        raise ConfigError(
            f"this process may open {open_now + room} files, {open_now} are open, and a loader needs up to {needed} "
            f"more (shards, buffers, sockets): let it open {RAISED} (as root `ulimit -n {RAISED}`, for a container "
            f"`--ulimit nofile={RAISED}`), or set data.loading.num_workers or data.loading.prefetch_batches to less"
        )


def _open_now() -> int:
    return len(os.listdir("/dev/fd")) - 1  # `listdir` itself opens one


def _allows(limit: int, files: int) -> bool:
    return limit == resource.RLIM_INFINITY or files <= limit
