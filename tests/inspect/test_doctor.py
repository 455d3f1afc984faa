"""The doctor names what is wrong, also on an installation that cannot import torchvision."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmdata.inspect.builds import Build, build_of, check_torchvision, mismatch
from mmdata.inspect.doctor import examine
from mmdata.inspect.machine import Check


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


FINE = Check("Python", "ok", "3.11.7")
NOTED = Check("GPU", "info", "none: training runs on the CPU, over gloo", "buy one")
SLOW = Check("threads", "warn", "OMP_NUM_THREADS=[64], and there are 2 cores", "unset OMP_NUM_THREADS")
BROKEN = Check("numpy", "fail", "1.0, needs >=2", "`pip install 'numpy>=2'`")


def test_doctor_with_verbose_prints_a_table_of_all_findings(command: Any):
    status, output, _ = command("doctor", "-v")
    assert status == 0, output
    assert re.search(r"^ok +torchvision +\d+\.\d+", output, re.MULTILINE)
    assert re.search(r"^info +Hugging Face hub ", output, re.MULTILINE)


def test_doctor_says_in_one_line_that_everything_fits(command: Any, monkeypatch: pytest.MonkeyPatch):
    checks_of(monkeypatch, FINE, NOTED)
    assert command("doctor") == (0, "everything fits (2 checks; `mmdata doctor -v` shows them)\n", "")


def test_doctor_says_only_what_needs_doing(command: Any, monkeypatch: pytest.MonkeyPatch):
    checks_of(monkeypatch, FINE, BROKEN, NOTED, SLOW)
    assert command("doctor") == (
        1,
        "fail  numpy: 1.0, needs >=2\n"
        "      `pip install 'numpy>=2'`\n"
        "warn  threads: OMP_NUM_THREADS=[64], and there are 2 cores\n"
        "      unset OMP_NUM_THREADS\n"
        "\n4 checks: 1 failed (does not work), 1 warnings (works, with a loss)\n",
        "",
    )
    checks_of(monkeypatch, FINE, SLOW)
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
    assert re.search(
        r"fail +torchvision: operator torchvision::nms does not exist\n +install both from one index", done.stdout
    )
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
        r"fail +image decoders: JPEG: libturbojpeg.so: cannot open\n +`pip install -U simplejpeg pillow`", done.stdout
    )


CPU_29, CUDA_29 = Build("2.9.0", None), Build("2.9.0", "12.8")
CPU_24, CUDA_24 = Build("0.24.0", None), Build("0.24.0", "12.8")
NMS = (
    r"torch 2\.9\.0 \(CPU only\) beside torchvision 0\.24\.0 \(CUDA 12\.8\): importing it fails with "
    r"'operator torchvision::nms does not exist'; install both from one index in one command"
)


@pytest.mark.parametrize(
    ("torch", "torchvision", "needs", "message"),
    [
        (CPU_29, CUDA_24, "==2.9.0", NMS),
        (Build("2.9.1", "12.8"), CUDA_24, "==2.9.0", r"this torchvision needs torch ==2\.9\.0; install both"),
        (Build("2.15.0", "13.2"), CUDA_24, ">=2.9", r"built for different CUDA releases; install both"),
    ],
)
def test_mismatch_explains(torch: Build, torchvision: Build, needs: str, message: str):
    assert re.search(message, mismatch(torch, torchvision, needs) or "")


@pytest.mark.parametrize(
    ("torch", "torchvision", "needs"),
    [
        (CUDA_29, CUDA_24, "==2.9.0"),
        (CPU_29, CPU_24, "==2.9.0"),
        (Build("2.15.0", "13.2"), Build("0.29.2", "13.0"), ">=2.14.0"),
        (CUDA_29, CPU_24, ""),
    ],
)
def test_mismatch_accepts_pairs_that_import(torch: Build, torchvision: Build, needs: str):
    assert mismatch(torch, torchvision, needs) is None


def test_check_torchvision_accepts_this_machine():
    check_torchvision()


def test_check_torchvision_names_a_foreign_pair(broken_torchvision: Path):
    version = broken_torchvision / "torchvision" / "version.py"
    version.write_text("__version__ = '0.29.2+cu92'\ngit_version = 'x'\n")
    script = """
from mmdata.inspect.builds import check_torchvision
try:
    check_torchvision()
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": before(broken_torchvision)},
    )
    assert re.search(
        r"^torch .* beside torchvision 0\.29\.2 \(CUDA 9\.2\): .*; install both from one index", done.stdout
    )


def test_build_of_reads_versions_without_importing():
    script = """
import sys
from mmdata.inspect.builds import build_of
print(build_of('torchvision'), 'torchvision' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+ \((CPU only|CUDA \d+\.\d+)\) False\n", done.stdout)
    assert build_of("no_such_package") is None
