"""Checks whether this machine can run mmdata. Each finding has a status and, for a fault, a remedy.

The checks also work on a broken installation: this file imports only the standard library at its head.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmdata.inspect import machine
from mmdata.inspect.builds import TORCH_PAIR, build_of, check_torchvision
from mmdata.inspect.machine import Check, in_one_line

__all__ = ["Check", "check_torchvision", "examine"]


def examine() -> list[Check]:
    """All checks, in the order in which a reader should mend faults."""
    checks: list[Callable[[], Check | list[Check]]] = [
        _python, _torch, _torchvision, _packages, _decoders, machine.cores, machine.threads, machine.tokenizer_threads,
        machine.memory, machine.descriptors, machine.shared_memory, machine.cache, _gpu, _hub
    ]  # fmt: skip
    found: list[Check] = []
    for check in checks:
        result = check()
        found += result if isinstance(result, list) else [result]
    return found


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 14):
        return Check("Python", "warn", version, "tested with 3.10 to 3.13; use one of these if something is odd")
    return Check("Python", "ok", version)


def _torch() -> Check:
    build = build_of("torch")
    if build is None:
        return Check("torch", "fail", "not installed", TORCH_PAIR)
    try:
        importlib.import_module("torch")
    except Exception as error:  # a broken wheel raises anything: OSError for a missing library, RuntimeError, …
        return Check("torch", "fail", f"{build}: {in_one_line(error)}", TORCH_PAIR)
    return Check("torch", "ok", str(build))


def _torchvision() -> Check:
    build = build_of("torchvision")
    try:
        check_torchvision()
        importlib.import_module("torchvision")
    except Exception as error:
        found, _, remedy = in_one_line(error).partition("; ")
        return Check("torchvision", "fail", found, remedy or TORCH_PAIR)
    torch = build_of("torch")
    if build and torch and torch.cuda and not build.cuda:
        return Check("torchvision", "warn", f"{build} beside a CUDA torch: no operators on the GPU", TORCH_PAIR)
    return Check("torchvision", "ok", str(build))


def _packages() -> list[Check]:
    """Compare installed versions with the requirements in mmdata's own metadata."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires("mmdata") or []]
    except importlib.metadata.PackageNotFoundError:
        return [Check("mmdata", "warn", "runs from a folder, not installed", "`pip install -e .` in the checkout")]
    checks: list[Check] = []
    for requirement in requirements:
        extra = re.search(r'extra == "([\w-]+)"|extra == \'([\w-]+)\'', str(requirement.marker or ""))
        group = (extra[1] or extra[2]) if extra else None
        if requirement.name in ("torch", "torchvision", "mmdata") or group in ("all", "dev"):
            continue
        checks.append(_package(requirement, group))
    return checks


def _package(requirement: Any, extra: str | None) -> Check:
    name = f"{requirement.name} [{extra}]" if extra else requirement.name
    remedy = (
        f"`pip install 'mmdata[{extra}]'`" if extra else f"`pip install '{requirement.name}{requirement.specifier}'`"
    )
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "info" if extra else "fail", "not installed", remedy + (" to use it" if extra else ""))
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, "warn" if extra else "fail", f"{version}, needs {requirement.specifier}", remedy)
    return Check(name, "ok", version)


def _decoders() -> Check:
    """Decode a JPEG with the loader's decoder, and look at Pillow's codecs."""
    try:
        from PIL import Image, features

        from mmdata.errors import BadSample
        from mmdata.images.decode import decode
        from mmdata.images.pillow import decoder_of

        buffer = io.BytesIO()
        Image.new("RGB", (16, 16)).save(buffer, "JPEG")
        decode(buffer.getvalue(), format="JPEG")
    except Exception as error:
        return Check("image decoders", "fail", f"JPEG: {in_one_line(error)}", "`pip install -U simplejpeg pillow`")
    absent = [name.upper() for name in ("webp", "avif") if not features.check(name)]
    if absent:
        return Check(
            "image decoders", "warn", f"no {', '.join(absent)}: such rows are quarantined", "`pip install -U pillow`"
        )
    try:
        decoder_of("HEIF")
        further = ", HEIF"
    except BadSample:
        further = ""
    return Check("image decoders", "ok", f"JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF{further}")


def _gpu() -> Check:
    try:
        import torch
    except Exception as error:
        return Check("GPU", "fail", f"torch cannot be imported: {in_one_line(error)}", TORCH_PAIR)
    if not torch.cuda.is_available():
        if Path("/dev/nvidiactl").exists():
            remedy = (
                TORCH_PAIR
                if torch.version.cuda is None
                else "compare the driver's CUDA release in `nvidia-smi` with torch's"
            )
            return Check(
                "GPU", "fail", f"a driver is there, but torch (CUDA {torch.version.cuda}) cannot use it", remedy
            )
        return Check("GPU", "info", "none: training runs on the CPU, over gloo")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    if not torch.distributed.is_nccl_available():
        return Check(
            "GPU", "warn", f"{found}, no NCCL", "this torch was built without NCCL: several GPUs cannot train together"
        )
    return Check("GPU", "ok", f"{found}, NCCL")


def _hub() -> Check:
    name = next(
        (
            n
            for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
            if os.environ.get(n, "").upper() in ("1", "TRUE", "YES", "ON")
        ),
        None,
    )
    if name:
        return Check(
            "Hugging Face hub",
            "info",
            f"{name} is set: only local folders and the cache are used",
            f"unset {name} to download by name",
        )
    return Check(
        "Hugging Face hub", "info", "reached only when a tokenizer or tower is given by name; folders need no network"
    )
