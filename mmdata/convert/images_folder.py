"""Finds the folder that the paths of a table are relative to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mmdata.convert.tables import shown
from mmdata.errors import ConfigError


def find_images(folder: Path, images: str, paths: Sequence[str]) -> tuple[str, str]:
    """The folder that a table's paths are relative to, and its name if it was found and not named.

    Args:
        folder: of the table.
        images: as the settings give it: relative to `folder`, to the folder above it, or to the current one.
        paths: the first of the table. If none exists in `folder`, a sub-folder that has one is taken; COCO's
            annotations/ have their images in folders beside annotations/.

    Raises:
        ConfigError: there is no such folder, or several sub-folders have the paths.
    """
    if images != ".":
        for start in (folder, folder.parent, Path()):
            if (start / images).is_dir():
                return os.path.realpath(start / images), ""
        raise ConfigError(f"images '{images}': no such folder in '{folder}', nor above it, nor in the current folder")
    if not paths or _has_any(folder, paths):
        return os.path.realpath(folder), ""
    near = [*_folders(folder), *(_folders(folder.parent) if folder.name == "annotations" else ())]
    found = [one for one in near if _has_any(one, paths)]
    if len(found) > 1:
        raise ConfigError(
            f"table in '{folder}': its images are in several folders: {shown([one.name for one in found])}; "
            "name the one that the paths are relative to with --images"
        )
    return os.path.realpath(found[0] if found else folder), found[0].name if found else ""


def _folders(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))


def _has_any(folder: Path, paths: Sequence[str]) -> bool:
    """Whether one of the paths is a file in the folder; what is no path is none."""
    return any(".." not in path.split("/") and os.path.isfile(os.path.join(folder, path)) for path in paths)
