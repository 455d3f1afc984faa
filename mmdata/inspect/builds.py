"""Checks whether the installed torch and torchvision fit each other, without importing them.

It reads two version files and the packages' metadata, so that it works where the import crashes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

TORCH_PAIR = (
    "install both from one index in one command: `pip install --force-reinstall torch torchvision` for CUDA, or the "
    "same with `--index-url https://download.pytorch.org/whl/cpu` for CPU only"
)


@dataclass(frozen=True)
class Build:
    """Build of a wheel: its version without the local part, and its CUDA version; None for CPU only."""

    version: str
    cuda: str | None

    def __str__(self) -> str:
        return f"{self.version} ({f'CUDA {self.cuda}' if self.cuda else 'CPU only'})"


def check_torchvision() -> None:
    """Raise a clear error if torch and torchvision do not fit: importing torchvision would raise an obscure one.

    Raises:
        ImportError: one of the two is missing, or they were built for different releases or devices.
    """
    torch, torchvision = build_of("torch"), build_of("torchvision")
    if torch is None or torchvision is None:
        raise ImportError(f"{'torch' if torch is None else 'torchvision'} is not installed; {TORCH_PAIR}")
    problem = mismatch(torch, torchvision, torchvision_needs())
    if problem:
        raise ImportError(problem)


def mismatch(torch: Build, torchvision: Build, needs: str) -> str | None:
    """Why two builds cannot be imported together, with the remedy; None if they can.

    Args:
        torch: the installed torch.
        torchvision: the installed torchvision.
        needs: the torch versions that this torchvision declares, e.g. "==2.9.0"; "" if unknown.

    Example:
        torch 2.9.0 (CPU only) and torchvision 0.24.0 (CUDA 12.8): torchvision's library links against CUDA libraries
        that this torch does not bring, so none of its operators is registered.
    """
    from packaging.specifiers import SpecifierSet

    pair = f"torch {torch} beside torchvision {torchvision}"
    if needs and not SpecifierSet(needs, prereleases=True).contains(torch.version):
        return f"{pair}: this torchvision needs torch {needs}; {TORCH_PAIR}"
    if torchvision.cuda and torch.cuda is None:
        return f"{pair}: importing it fails with 'operator torchvision::nms does not exist'; {TORCH_PAIR}"
    if torchvision.cuda and torch.cuda and torchvision.cuda.split(".")[0] != torch.cuda.split(".")[0]:
        return f"{pair}: built for different CUDA releases; {TORCH_PAIR}"
    return None


def build_of(package: str) -> Build | None:
    """The build of torch or torchvision, read from its version.py; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0], "version.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    full = re.search(r"^__version__ = '([^'+]+)(?:\+(\w+))?'", text, re.MULTILINE)
    if full is None:
        return None
    stated = re.search(r"^cuda\b[^=\n]*= '([\d.]+)'", text, re.MULTILINE)
    # torchvision states its CUDA release only in the local part of the version: "+cu128" is 12.8.
    local = re.fullmatch(r"cu(\d+)(\d)", full[2] or "")
    return Build(full[1], stated[1] if stated else f"{local[1]}.{local[2]}" if local else None)


def torchvision_needs() -> str:
    """The torch versions that the installed torchvision declares, e.g. "==2.9.0"; "" if it declares none."""
    from packaging.requirements import Requirement

    try:
        requirements = importlib.metadata.requires("torchvision") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((str(r.specifier) for r in map(Requirement, requirements) if r.name == "torch"), "")
