"""Where and with which code a run is trained: machine, versions and git commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mmdata.train.ranks import collectives

GIT_TIMEOUT_S = 5.0


def provenance(device: torch.device) -> dict[str, Any]:
    """Ranks, versions, the git commit of the working folder, and the machine.

    Args:
        device: of this rank.
    """
    try:
        installed = version("mmdata")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        installed = None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else []
    return {
        "ranks": collectives.world_size(),
        "mmdata": installed,
        "commit": git_commit(Path.cwd()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus,
    }


def git_commit(folder: Path) -> str | None:
    """The commit of a folder, with "-dirty" if files differ from it; None if it is in no git repository."""
    words = ["git", "-C", os.fspath(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or one too large to look through
        return None
    return done.stdout.strip() or None


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; its architecture where the system does not tell the name."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()
