"""run.json: when, where and with which code a run was trained, and for how long; one entry for each start.

An entry is written at the start and again at each checkpoint, so a kill loses the time since the last checkpoint only,
as it loses the updates.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mmdata.errors import DataError
from mmdata.files import write_whole

SESSIONS = "run.json"
GIT_TIMEOUT_S = 5.0


class SessionLog:
    """The entry of this start. On ranks other than the first (`speaks` False) every method does nothing.

    Args:
        folder: the run's folder.
        step: updates that earlier starts have made. Entries of starts that left no update behind are dropped.
        ranks: number of ranks of this start.
        device: of this rank.
        speaks: False on all ranks but the first.

    Raises:
        DataError: run.json of an earlier start is not JSON.
    """

    def __init__(self, folder: Path, *, step: int, ranks: int, device: torch.device, speaks: bool) -> None:
        self._path, self._speaks = folder / SESSIONS, speaks
        if not speaks:
            return
        self._earlier = [session for session in read_sessions(self._path) if session["first_step"] < step]
        self._started = time.monotonic()
        self._session: dict[str, Any] = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "first_step": step,
            "ranks": ranks,
            **_code(),
            **_machine(device),
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.write(step)

    def write(self, step: int) -> None:
        """Write the file, with `step` updates made and the seconds since the start."""
        if not self._speaks:
            return
        session = {**self._session, "step": step, "wall_s": round(time.monotonic() - self._started, 1)}
        content = json.dumps({"sessions": [*self._earlier, session]}, indent=2, ensure_ascii=False) + "\n"
        write_whole(self._path, content.encode())


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """The entries of a run.json, oldest first; none without the file.

    Raises:
        DataError: the file was not written by `SessionLog`.
    """
    if not path.is_file():
        return []
    try:
        sessions = json.loads(path.read_text(encoding="utf-8"))["sessions"]
        return [{"first_step": int(session["first_step"]), **session} for session in sessions]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"'{path}': not the record of a run that `mmdata train` writes ({error!r}); remove the file"
        ) from error


def _code() -> dict[str, str | None]:
    """Versions, and the git commits of mmdata's checkout, if it is one, and of the working folder."""
    package = Path(__file__).parents[2]
    try:
        installed = version("mmdata")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        installed = None
    return {
        "mmdata": installed,
        "mmdata_commit": git_commit(package, tracked="__init__.py"),
        "commit": git_commit(Path.cwd()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@cache
def git_commit(folder: Path, *, tracked: str | None = None) -> str | None:
    """The commit of a folder, with "-dirty" if files differ from it; None if it is in no git repository.

    Args:
        folder: in a working tree.
        tracked: a file in the folder; None is returned if git does not track the file. A package that is installed into
            an environment within somebody's repository is not of that repository's commit.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", os.fspath(folder), *arguments],
                capture_output=True,
                text=True,
                timeout=GIT_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):  # no git, no repository, or one too large to look through
            return None
        return done.stdout.strip()

    if tracked is not None and git("ls-files", "--error-unmatch", tracked) is None:
        return None
    return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None


def _machine(device: torch.device) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else []
    return {"system": platform.platform(), "cpu": cpu_name(), "cores": cores, "gpus": gpus}


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; its architecture where the system does not tell the name."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()
