"""Counts the cores for the workers of a rank. Imports only the standard library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

NumWorkers = int | Literal["auto"]
"""The type of `data.loading.num_workers`; "auto" is all usable cores of the rank."""


def most_workers(num_workers: NumWorkers) -> int:
    """The number of workers that a setting stands for."""
    return usable_cores() if num_workers == "auto" else num_workers


def usable_cores(environment: Mapping[str, str] | None = None, *, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores for the workers of one rank, at least 1.

    They are the cores that this process may run on, within the container's quota, divided by the number of ranks of
    this host (LOCAL_WORLD_SIZE, set by torchrun).
    """
    quota = cpu_quota(cgroup)
    cores = num_cores() if quota is None else min(num_cores(), max(1, int(quota)))
    ranks = (os.environ if environment is None else environment).get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(ranks) if ranks.isdecimal() else 1))


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the container's quota (cgroup v2 or v1) allows; None without a quota."""
    try:
        words = (root / "cpu.max").read_text().split()
    except OSError:
        try:
            words = [(root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    return None if words[0] in ("max", "-1") else int(words[0]) / int(words[1])
