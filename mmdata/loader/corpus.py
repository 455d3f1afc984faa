"""The corpus that a section `data` names: index, tokenizer and negative captions, opened once.

How many files a loader needs is checked before it begins, so that no run fails in mid-epoch for want of them.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmdata.config import DataConfig
from mmdata.config.corpus import sources
from mmdata.errors import ConfigError, excerpt
from mmdata.index import Index
from mmdata.index.store import MAX_OPEN
from mmdata.loader.entries.negatives import NegativeCaptions
from mmdata.plan import CaptionSources, Plan
from mmdata.plan.captions import caption_sources
from mmdata.processes import most_workers, worker_processes
from mmdata.storage import ShardCache
from mmdata.storage.cache import GB
from mmdata.tables.joined import Joined
from mmdata.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("mmdata")

OTHERS = 32
"""Files that are open for a moment: columns being read, shards being fetched, sockets, logs."""
HELD_BATCHES = 3
"""Batches besides the prefetched ones that hold buffers: in use, just dropped, and between two epochs."""
RAISED = 4096
"""A soft limit that is too low is raised to this, if the hard limit allows it: for other loaders and the program."""
WINDOWS = 2
"""Windows whose shards stay open: that of the batches in use, and the next one, into which prefetching reaches."""


@dataclass(frozen=True)
class Corpus:
    """The open data of a section `data`, from which plan and batches are made."""

    index: Index
    tokenizer: Tokenizer | None
    joined: Joined
    negatives: NegativeCaptions | None = None
    captions: CaptionSources | None = None


def open_corpus(data: DataConfig) -> Corpus:
    """Open the corpus of a section `data`.

    Raises:
        ConfigError: the tokenizer does not exist, the negative captions are of another corpus, or this process may
            not open as many files as a loader needs.
        DataError: the shards have no index, or the file of negative captions is damaged.
    """
    tokenizer = load_tokenizer(data)
    index = open_index(data)
    joined = Joined.from_config(data, index)
    negatives = None
    if data.negative_captions is not None and tokenizer is not None:
        path = Path(data.negative_captions)
        negatives = NegativeCaptions(path, index, tokenizer, template=data.caption_template)
    return Corpus(index, tokenizer, joined, negatives, caption_sources(data, index, joined))


def open_index(data: DataConfig) -> Index:
    """Open the index of a section `data`, with a cache for shards behind URLs.

    Raises:
        ConfigError: this process may not open as many files as a loader needs.
        DataError: the shards have no index.
    """
    if data.members:
        raise ConfigError(
            "data.members is for a stream (mmdata.stream): an index knows its members; leave it out, and give "
            "--caption to `mmdata index`"
        )
    cache = ShardCache(data.loading.cache_dir, max_bytes=int(data.loading.cache_gb * GB))
    index = Index.open([source.shards for source in sources(data)], cache=cache)
    index.check_images(of="data.shards: ")
    _warn_of_small_cache(index, data.shuffle_window_rows)
    # A batch mixes the rows of a window, and prefetching reaches into the next window: with fewer rows held, each batch
    # would open the columns of its shards anew.
    index.held_rows = max(index.held_rows, 4 * data.shuffle_window_rows)
    _check_class_names(data, index)
    ensure_files(files_needed(data, index.num_shards))
    return index


def _warn_of_small_cache(index: Index, window_rows: int) -> None:
    """Warn if the shards of a window and those of the next window do not fit into the cache together."""
    for cache in index.caches:
        corpus = index.bytes
        window = corpus * min(1.0, window_rows / max(len(index), 1))
        if corpus > cache.max_bytes < 2 * window:
            rows = int(len(index) * cache.max_bytes / corpus / 2)
            logger.warning(
                "a window of %d rows has %.3g GB of shards, and the cache '%s' holds %.3g GB: shards are fetched again "
                "and again. Set data.loading.cache_gb to %.2g, or data.shuffle_window_rows to %d (less mixed)",
                window_rows,
                window / GB,
                cache.folder,
                cache.max_bytes / GB,
                2.1 * window / GB,
                rows,
            )


def _check_class_names(data: DataConfig, index: Index) -> None:
    """Refuse a mixture whose datasets give a label to different classes, if the labels are what it is for.

    Raises:
        ConfigError: names both classes.
    """
    needed = data.tokenizer is None or (data.groups is not None and data.groups.source == "label")
    known = [(part.folder, names) for part in index.manifests if (names := (part.accounts or {}).get("classes"))]
    for folder, names in known[1:]:
        pairs = enumerate(zip(known[0][1], names, strict=False))
        if (differing := next((pair for pair in pairs if pair[1][0] != pair[1][1]), None)) is None:
            continue
        label, (first, other) = differing
        said = f"label {label} is {excerpt(first)} in '{known[0][0]}' and {excerpt(other)} in '{folder}'"
        if needed:
            raise ConfigError(f"{said}: convert both sources together, so that their classes are numbered alike")
        logger.warning("%s: the labels of batches mix them", said)
        return


def files_needed(data: DataConfig, num_shards: int) -> int:
    """Files that a loader must be able to open in one process. Columns are read, and closed at once.

    Example:
        2 threads, prefetch 2, 1,000 shards: 64 shards stay open, each thread may still read one that was closed, and 32
        others: 98. With a worker process 6 batches (2 prefetched, 4 more) have 2 files each: 110.
        `most_shards` says how many more shards stay open where this process may open more files.
    """
    joined = MAX_OPEN * sum(one.shards is not None for one in data.join)
    shards = min(num_shards, MAX_OPEN) + joined + most_workers(data.loading.num_workers)
    processes = data.loading.num_processes
    if processes == "auto":
        processes = worker_processes(data.loading.num_workers)
    buffers = 2 * (data.loading.prefetch_batches + processes + HELD_BATCHES) if processes else 0
    return shards + buffers + OTHERS


def most_shards(data: DataConfig, plan: Plan) -> int:
    """Shards that a loader keeps open: those of two windows, if all its files are at most half of what may be opened.

    A batch mixes the rows of a window: with fewer shards open, each batch would open nearly all of them anew. The other
    half is for other loaders and the program. `files_needed` is what a loader has in any case.

    Example:
        Windows of 2^20 rows, 1,000 shards of 10,000 rows: 105 shards hold a window, so 212 stay open.
    """
    rows = np.sort(np.diff(plan.rows.places))
    rows = rows[rows > 0]
    # At most: the smallest shards first, and of each lane and dataset the one that completes its window.
    of_window = int(np.searchsorted(rows.cumsum(), plan.window_rows)) + plan.num_lanes * len(plan.mixture.shares)
    return most_of_windows(data, of_window, len(rows))


def most_of_windows(data: DataConfig, of_window: int, num_shards: int) -> int:
    """See `most_shards`, where a window has the rows of so many of the shards."""
    wanted = min(WINDOWS * of_window, num_shards)
    joined = [one.shards for one in data.join if one.shards is not None]
    others = files_needed(data, 0) - MAX_OPEN * len(joined)
    allowed = _room(2 * (others + wanted * (1 + len(joined)))) // 2
    return max(MAX_OPEN, min(wanted, (allowed - others) // (1 + len(joined))))


def _room(needed: int) -> int:
    """Files that this process can still open; raises its soft limit if that is below `needed`."""
    try:
        import resource
    except ImportError:  # Windows sets a process no such limit
        return needed
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    open_now = _open_now()
    if open_now + needed > soft:
        soft = min(max(open_now + needed, RAISED), hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    return min(needed, soft - open_now)


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
