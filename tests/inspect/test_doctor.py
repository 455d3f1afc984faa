"""The doctor names what is wrong, also on an installation that cannot import torchvision."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmdata.inspect.doctor import TORCH_PAIR, Check, gpu, open_files, shard_cache, shared_memory, torch_pair


def without_torchvisions_library(folder: Path) -> None:
    """The real torchvision less its compiled library: what a process sees when that library cannot be loaded."""
    package = Path(importlib.util.find_spec("torchvision").submodule_search_locations[0])
    shutil.copytree(package, folder / "torchvision", ignore=shutil.ignore_patterns("*.so", "models", "datasets"))
    for part in ("models", "datasets"):
        (folder / "torchvision" / part).symlink_to(package / part)


def without_libturbojpeg(folder: Path) -> None:
    (folder / "simplejpeg.py").write_text("raise ImportError('libturbojpeg.so: cannot open')")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (
            without_torchvisions_library,  # torchvision itself says this, at import
            r"fail +torch and torchvision: torch .* beside torchvision .*: operator torchvision::nms does not exist\n"
            " +install both from one index",
        ),
        (
            without_libturbojpeg,
            r"fail +image decoder: JPEG: libturbojpeg.so: cannot open\n +`pip install -U simplejpeg pillow`",
        ),
    ],
)
def test_doctor_survives_a_broken_installation(tmp_path: Path, break_it: Any, said: str):
    break_it(tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "mmdata", "doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400", "PYTHONPATH": path},
    )
    assert done.returncode == 1
    assert re.search(said, done.stdout), done.stdout
    assert "Traceback" not in done.stderr


def test_doctor_passes_on_this_machine_and_tells_the_environment(command: Any):
    status, output, _ = command("doctor", "-v")
    assert status == 0, output
    assert re.search(r"^PyTorch version: \d", output, re.MULTILINE)
    assert re.search(r"^ok    torch and torchvision: torch \d+\.\d+", output, re.MULTILINE)


def test_doctor_prints_all_findings_and_the_remedies(command: Any, monkeypatch: pytest.MonkeyPatch):
    broken = Check("image decoder", "fail", "JPEG: [none]", "`pip install -U simplejpeg pillow`")
    noted = Check("GPU", "ok", "none: training runs on the CPU, over gloo")
    slow = Check("open files", "warn", "hard limit 256", "as root `ulimit -n 65536`")
    monkeypatch.setattr("mmdata.inspect.doctor.examine", lambda: [broken, noted, slow])
    assert command("doctor") == (
        1,
        "fail  image decoder: JPEG: [none]\n"
        "      `pip install -U simplejpeg pillow`\n"
        "ok    GPU: none: training runs on the CPU, over gloo\n"
        "warn  open files: hard limit 256\n"
        "      as root `ulimit -n 65536`\n",
        "",
    )
    monkeypatch.setattr("mmdata.inspect.doctor.examine", lambda: [noted, slow])
    assert command("doctor")[0] == 0  # it works


def test_torch_pair_names_builds_of_one_pair(monkeypatch: pytest.MonkeyPatch):
    check = torch_pair()
    assert check.status == "ok"
    assert re.fullmatch(r"torch \d+\.\d+\.\d+(\+\w+)? beside torchvision \d+\.\d+\.\d+(\+\w+)?", check.found)
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["numpy", "torch (==1.2.3)"])
    check = torch_pair()
    assert (check.status, check.remedy) == ("fail", TORCH_PAIR)
    assert re.fullmatch(r"torch .* beside torchvision .*: this torchvision needs torch ==1\.2\.3", check.found)


@pytest.mark.parametrize(
    ("hard", "status", "found"),
    [(256, "warn", "hard limit 256"), (4096, "ok", "hard limit 4096"), (resource.RLIM_INFINITY, "ok", "no limit")],
)
def test_open_files_warns_of_a_low_hard_limit(hard: int, status: str, found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, hard))
    check = open_files()
    assert (check.status, check.found) == (status, found)
    remedy = "as root `ulimit -n 65536`, for a container" if status == "warn" else ""
    assert check.remedy[: len(remedy) or None] == remedy


@pytest.mark.parametrize(
    ("num_bytes", "status", "found"),
    [(64 * 2**20, "warn", "/dev/shm holds 0.1 GiB"), (2**31, "ok", "/dev/shm holds 2.0 GiB")],
)
def test_shared_memory_warns_of_a_small_one(num_bytes: int, status: str, found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=num_bytes))
    check = shared_memory()
    assert (check.status, check.found) == (status, found)
    remedy = "start the container with `--shm-size=2g`: NCCL" if status == "warn" else ""
    assert check.remedy[: len(remedy) or None] == remedy


@pytest.mark.parametrize(
    ("free", "found"),
    [
        (2 * 10**11, "200.0 GB free"),
        (10**10, "10.0 GB free; for shards behind URLs set data.loading.cache_gb to 9 or less"),
    ],
)
def test_shard_cache_says_how_much_room_there_is(
    free: int, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    check = shard_cache(tmp_path / "not" / "yet" / "there")
    assert (check.status, check.found) == ("ok", f"'{tmp_path}/not/yet/there': {found}")
    assert not (tmp_path / "not").exists()


def test_shard_cache_warns_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_bytes(b"")
    check = shard_cache(tmp_path / "file")
    assert (check.status, check.found) == ("warn", f"'{tmp_path}/file' cannot be written")
    assert check.remedy == "for shards behind URLs set data.loading.cache_dir"
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write into read-only folders
    assert shard_cache(tmp_path / "c").found == f"'{tmp_path}' cannot be written"


def test_gpu_with_a_driver_that_torch_cannot_use_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert gpu() == Check("GPU", "fail", "a driver is there, but torch (CUDA None) cannot use it", TORCH_PAIR)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert gpu() == Check("GPU", "ok", "none: training runs on the CPU, over gloo")
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert gpu().found == "Apple's (mps): for one process; ranks of torchrun run on the CPU, over gloo"


def test_torchvision_need_not_be_there(monkeypatch: pytest.MonkeyPatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchvision" else find_spec(name))
    check = torch_pair()
    assert (check.status, check.remedy) == ("ok", "")
    assert re.fullmatch(r"torch \d+\.\d+\.\d+(\+\w+)?, no torchvision", check.found)


def test_open_files_have_no_limit_on_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert open_files() == Check("open files", "ok", "no limit on this system")
