"""Six checks of this machine: what stops mmdata, or makes it lose speed or a GPU unseen. Each fault has a remedy.

They also work on a broken installation: this file imports only the standard library at its head.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TORCH_PAIR = (
    "install both from one index in one command: `pip install --force-reinstall torch torchvision` for CUDA, or the "
    "same with `--index-url https://download.pytorch.org/whl/cpu` for CPU only"
)


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was checked.
        status: ok; warn (works, with a loss); fail (does not work).
        found: the finding, in one line.
        remedy: what to do; "" if nothing is to be done.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def examine() -> list[Check]:
    """All checks, in the order in which a reader should mend faults."""
    return [torch_pair(), image_decoder(), gpu(), open_files(), shared_memory(), shard_cache()]


def environment() -> str:
    """What a report of a bug needs, by torch.utils.collect_env: versions, system, processor, GPUs and drivers."""
    try:
        from torch.utils.collect_env import get_pretty_env_info
    except Exception as error:  # a broken wheel raises anything: OSError for a missing library, RuntimeError, …
        return f"torch cannot be imported: {_in_one_line(error)}"
    return str(get_pretty_env_info())


def torch_pair() -> Check:
    """Whether torch imports, and torchvision, if it is there, asks for this torch and imports beside it."""
    name = "torch and torchvision"
    if importlib.util.find_spec("torchvision") is None and importlib.util.find_spec("torch") is not None:
        return Check(name, "ok", f"torch {_build_of('torch')}, no torchvision")
    found = f"torch {_build_of('torch')} beside torchvision {_build_of('torchvision')}"
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torchvision")
        from packaging.requirements import Requirement

        for needed in map(Requirement, importlib.metadata.requires("torchvision") or []):
            if needed.name == "torch" and not needed.specifier.contains(torch.__version__, prereleases=True):
                return Check(name, "fail", f"{found}: this torchvision needs torch {needed.specifier}", TORCH_PAIR)
    except Exception as error:
        return Check(name, "fail", f"{found}: {_in_one_line(error)}", TORCH_PAIR)
    return Check(name, "ok", found)


def image_decoder() -> Check:
    """Whether the loader's decoder decodes a JPEG."""
    try:
        from PIL import Image

        from mmdata.images.decode import decode

        buffer = io.BytesIO()
        Image.new("RGB", (16, 16)).save(buffer, "JPEG")
        decode(buffer.getvalue(), format="JPEG")
    except Exception as error:
        return Check("image decoder", "fail", f"JPEG: {_in_one_line(error)}", "`pip install -U simplejpeg pillow`")
    return Check("image decoder", "ok", f"simplejpeg {importlib.metadata.version('simplejpeg')}")


def gpu() -> Check:
    """Whether torch sees the GPUs that have a driver: training would run on the CPU unasked."""
    try:
        import torch
    except Exception as error:
        return Check("GPU", "fail", f"torch cannot be imported: {_in_one_line(error)}", TORCH_PAIR)
    built = torch.version.cuda
    if not torch.cuda.is_available():
        if Path("/dev/nvidiactl").exists():
            remedy = "compare the driver's CUDA release in `nvidia-smi` with torch's" if built else TORCH_PAIR
            return Check("GPU", "fail", f"a driver is there, but torch (CUDA {built}) cannot use it", remedy)
        if torch.backends.mps.is_available():
            return Check("GPU", "ok", "Apple's (mps): for one process; ranks of torchrun run on the CPU, over gloo")
        return Check("GPU", "ok", "none: training runs on the CPU, over gloo")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    if not torch.distributed.is_nccl_available():
        remedy = "this torch was built without NCCL: several GPUs cannot train together"
        return Check("GPU", "warn", f"{found}, no NCCL", remedy)
    return Check("GPU", "ok", f"{found}, NCCL")


def open_files() -> Check:
    """Hard limit of open files of this process; a loader raises the soft one."""
    try:
        import resource
    except ImportError:
        return Check("open files", "ok", "no limit on this system")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1024:
        remedy = "as root `ulimit -n 65536`, for a container `--ulimit nofile=65536`: a loader keeps many shards open"
        return Check("open files", "warn", f"hard limit {hard}", remedy)
    return Check("open files", "ok", f"hard limit {hard}" if hard > 0 else "no limit")


def shared_memory() -> Check:
    """Size of /dev/shm."""
    if not Path("/dev/shm").is_dir():
        return Check("shared memory", "ok", "no /dev/shm on this system")
    total = shutil.disk_usage("/dev/shm").total
    found = f"/dev/shm holds {total / 2**30:,.1f} GiB"
    if total < 2**30:
        remedy = "start the container with `--shm-size=2g`: NCCL and torch's DataLoader need it (this loader does not)"
        return Check("shared memory", "warn", found, remedy)
    return Check("shared memory", "ok", found)


def shard_cache(folder: Path | None = None) -> Check:
    """Whether the folder for shards behind URLs (default: the loader's) can be written, and its free space."""
    if folder is None:
        try:
            from mmdata.storage.cache import default_folder
        except Exception as error:
            return Check(
                "shard cache", "fail", _in_one_line(error), "`pip install .` in the checkout brings what is missing"
            )
        folder = default_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = "for shards behind URLs set data.loading.cache_dir"
        return Check("shard cache", "warn", f"'{existing}' cannot be written", remedy)
    free = shutil.disk_usage(existing).free / 10**9
    room = "" if free >= 100 else f"; for shards behind URLs set data.loading.cache_gb to {int(free * 0.9)} or less"
    return Check("shard cache", "ok", f"'{folder}': {free:,.1f} GB free{room}")


def _build_of(package: str) -> str:
    """Version and build, such as 2.14.1+cu130, as version.py says them: importing the package may fail."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return "(not installed)"
    file = Path(spec.submodule_search_locations[0], "version.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    said = re.search(r"^__version__ = '(.+)'$", text, re.MULTILINE)
    return said[1] if said else "(of unknown version)"


def _in_one_line(error: BaseException) -> str:
    """The message of an error in one line; its class name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
