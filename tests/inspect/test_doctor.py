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

from mmdata.inspect.doctor import (
    TORCH_PAIR,
    Check,
    environment,
    examine,
    gpu,
    open_files,
    shard_cache,
    shared_memory,
    torch_pair,
)


@pytest.fixture
def broken_torchvision(tmp_path: Path) -> Path:
    """The real torchvision less its compiled library: what a process sees when that library cannot be loaded."""
    package = Path(importlib.util.find_spec("torchvision").submodule_search_locations[0])
    shutil.copytree(package, tmp_path / "torchvision", ignore=shutil.ignore_patterns("*.so", "models", "datasets"))
    for part in ("models", "datasets"):
        (tmp_path / "torchvision" / part).symlink_to(package / part)
    return tmp_path


def before(folder: Path) -> str:
    """A PYTHONPATH that begins with a folder."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def test_doctor_passes_on_this_machine():
    assert [check for check in examine() if check.status == "fail"] == []


def checks_of(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    """Have the doctor find these."""
    monkeypatch.setattr("mmdata.inspect.doctor.examine", lambda: list(checks))


BROKEN = Check("image decoder", "fail", "JPEG: [none]", "`pip install -U simplejpeg pillow`")
NOTED = Check("GPU", "ok", "none: training runs on the CPU, over gloo")
SLOW = Check("open files", "warn", "limit 256", "`ulimit -n 65536` before starting")


def test_doctor_with_verbose_adds_the_environment(command: Any):
    status, output, _ = command("doctor", "-v")
    assert status == 0, output
    assert re.search(r"^PyTorch version: \d", output, re.MULTILINE)
    assert re.search(r"^ok    torch and torchvision: torch \d+\.\d+", output, re.MULTILINE)


def test_doctor_prints_all_findings_and_the_remedies(command: Any, monkeypatch: pytest.MonkeyPatch):
    checks_of(monkeypatch, BROKEN, NOTED, SLOW)
    assert command("doctor") == (
        1,
        "fail  image decoder: JPEG: [none]\n"
        "      `pip install -U simplejpeg pillow`\n"
        "ok    GPU: none: training runs on the CPU, over gloo\n"
        "warn  open files: limit 256\n"
        "      `ulimit -n 65536` before starting\n",
        "",
    )
    checks_of(monkeypatch, NOTED, SLOW)
    assert command("doctor")[0] == 0  # it works


def test_doctor_survives_torchvision_that_cannot_be_imported(broken_torchvision: Path):
    # torchvision itself says this, at import, when it cannot load its library
    done = subprocess.run(
        [sys.executable, "-m", "mmdata", "doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400", "PYTHONPATH": before(broken_torchvision)},
    )
    assert done.returncode == 1
    pair = r"fail +torch and torchvision: torch .* beside torchvision .*"
    assert re.search(rf"{pair}: operator torchvision::nms does not exist\n +install both from one index", done.stdout)
    assert "Traceback" not in done.stderr


def test_doctor_names_the_jpeg_decoder_that_cannot_be_loaded(tmp_path: Path):
    (tmp_path / "simplejpeg.py").write_text("raise ImportError('libturbojpeg.so: cannot open')")
    done = subprocess.run(
        [sys.executable, "-m", "mmdata", "doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400", "PYTHONPATH": before(tmp_path)},
    )
    assert done.returncode == 1
    assert re.search(
        r"fail +image decoder: JPEG: libturbojpeg.so: cannot open\n +`pip install -U simplejpeg pillow`", done.stdout
    )


def test_torch_pair_names_builds_of_one_pair(monkeypatch: pytest.MonkeyPatch):
    check = torch_pair()
    assert check.status == "ok"
    assert re.fullmatch(r"torch \d+\.\d+\.\d+(\+\w+)? beside torchvision \d+\.\d+\.\d+(\+\w+)?", check.found)
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["numpy", "torch (==1.2.3)"])
    check = torch_pair()
    assert check.status == "fail"
    assert re.fullmatch(r"torch .* beside torchvision .*: this torchvision needs torch ==1\.2\.3", check.found)
    assert check.remedy.startswith("install both from one index in one command: ")


def test_open_files_warns_of_a_low_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        check = open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (check.status, check.found) == ("warn", "limit 512")
    assert re.match(r"`ulimit -n \d+` before starting", check.remedy)


def test_open_files_warns_of_a_low_hard_limit():
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from mmdata.inspect.doctor import open_files
print(open_files())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        "status='warn', found='hard limit 256', remedy='as root `ulimit -n 65536`, for a container `--u" in done.stdout
    )


@pytest.mark.parametrize(
    ("num_bytes", "status", "found"),
    [(64 * 2**20, "warn", "/dev/shm holds 0.1 GiB"), (2**31, "ok", "/dev/shm holds 2.0 GiB")],
)
def test_shared_memory_warns_of_a_small_one(num_bytes: int, status: str, found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=num_bytes))
    check = shared_memory()
    assert (check.status, check.found) == (status, found)
    assert check.remedy.startswith("start the container with `--shm-size=2g`: NCCL" if status == "warn" else "")


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


def test_shard_cache_warns_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    check = shard_cache(tmp_path / "file")
    assert (check.status, check.found) == ("warn", f"'{tmp_path}/file' cannot be written")
    assert check.remedy == "for shards behind URLs set data.loading.cache_dir"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_shard_cache_warns_of_a_read_only_folder(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert shard_cache(tmp_path / "c").found == f"'{tmp_path}' cannot be written"


def test_gpu_with_a_driver_that_torch_cannot_use_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert gpu() == Check("GPU", "fail", "a driver is there, but torch (CUDA None) cannot use it", TORCH_PAIR)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert gpu() == Check("GPU", "ok", "none: training runs on the CPU, over gloo")


def test_environment_is_that_of_torch():
    assert re.search(r"^PyTorch version: \d", environment(), re.MULTILINE)
