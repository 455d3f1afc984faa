"""Checks the resources of this process: cores, threads, memory, open files, disk space.

The checks also work on a broken installation: this file imports only the standard library at its head.
"""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmdata.processes import cpu_quota, num_cores, usable_cores


def cores() -> Check:
    """Cores that this process may use."""
    visible, quota = num_cores(), cpu_quota()
    if quota is not None and quota < visible:
        return Check(
            "CPU cores",
            "warn",
            f"{visible} visible, the container may use {quota:g}",
            f"set data.loading.num_workers to at most {max(1, int(quota))}, or to auto",
        )
    return Check("CPU cores", "ok", str(visible))


def threads() -> Check:
    """Environment variables that give each process more threads than there are cores."""
    limit = usable_cores({})
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > limit:
            return Check(
                "threads",
                "warn",
                f"{name}={value}, and there are {limit} cores",
                f"unset {name}, or set it to the cores divided by the processes of this host: more wait for a turn",
            )
    return Check("threads", "ok", f"OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS') or 'not set'}")


def tokenizer_threads() -> Check:
    """Whether the tokenizers library starts a thread for each core in every process."""
    value = os.environ.get("TOKENIZERS_PARALLELISM", "")
    name = "tokenizer threads"
    if value.lower() in ("0", "false", "f", "no", "n", "off"):
        return Check(name, "ok", f"TOKENIZERS_PARALLELISM={value}: none")
    return Check(
        name,
        "warn" if value else "info",
        f"TOKENIZERS_PARALLELISM {'is ' + value if value else 'is not set'}",
        "set it to false before a loop of your own starts: the loader's workers are threads enough, and a "
        "program that forks is safe then" + ("" if value else " (`mmdata train` and its like do so themselves)"),
    )


def memory() -> Check:
    """Memory of the machine, and the container's limit."""
    total, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit()
    if limit is None or limit >= total:
        return Check("memory", "ok", f"{_short(total / 2**30)} GiB")
    return Check(
        "memory",
        "warn" if limit < 4 * 2**30 else "info",
        f"{_short(total / 2**30)} GiB, the container may use {_short(limit / 2**30)} GiB",
        "the kernel's out-of-memory killer ends a process above it: lower data.loading.prefetch_batches or "
        "train.micro_batch_size",
    )


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory limit of the container (cgroup v2 or v1) in bytes; None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() and int(text) < 2**60 else None  # in v1 a huge number means no limit
    return None


def descriptors() -> Check:
    """Limit of open files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1024:
        return Check(
            "open files",
            "warn",
            f"hard limit {hard}",
            "as root `ulimit -n 65536`, for a container `--ulimit nofile=65536`: a loader keeps many shards open",
        )
    if soft < 1024:
        return Check(
            "open files",
            "warn",
            f"limit {soft}",
            f"`ulimit -n {hard if 0 < hard < 65536 else 65536}` before starting: shards stay open while they are read",
        )
    return Check("open files", "ok", f"limit {soft}")


def shared_memory() -> Check:
    """Size of /dev/shm."""
    if not Path("/dev/shm").is_dir():
        return Check("shared memory", "info", "no /dev/shm on this system")
    total = shutil.disk_usage("/dev/shm").total
    found = f"/dev/shm holds {_short(total / 2**30)} GiB"
    if total < 2**30:
        return Check(
            "shared memory",
            "warn",
            found,
            "start the container with `--shm-size=2g`: NCCL and torch's DataLoader need it (this loader does not)",
        )
    return Check("shared memory", "ok", found)


def cache(folder: Path | None = None) -> Check:
    """Whether the folder for shards behind URLs (default: the loader's) can be written, and its free space."""
    if folder is None:
        try:
            from mmdata.storage.cache import default_folder
        except Exception as error:
            return Check("shard cache", "fail", in_one_line(error), "see the packages above")
        folder = default_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = "for shards behind URLs set data.loading.cache_dir"
        return Check("shard cache", "warn", f"'{existing}' cannot be written", remedy)
    free = shutil.disk_usage(existing).free / 10**9
    found = f"'{folder}': {_short(free)} GB free"
    if free < 100:  # the default of data.loading.cache_gb
        return Check(
            "shard cache",
            "info",
            found,
            f"for shards behind URLs set data.loading.cache_gb to {int(free * 0.9)} or less",
        )
    return Check("shard cache", "ok", found)


Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was checked.
        status: ok; info (nothing to do); warn (works, with a loss); fail (does not work).
        found: the finding, in one line.
        remedy: what to do; "" if nothing is to be done.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def _short(number: float) -> str:
    """Three digits, and more only before the decimal point: 7.51 and 1,008."""
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"


def in_one_line(error: BaseException) -> str:
    """The message of an error in one line; its class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
