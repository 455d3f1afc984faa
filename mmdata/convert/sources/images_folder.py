"""Finds the folder that the paths of a table are relative to."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from mmdata.convert.sources.files import corpus_folder, is_file, is_folder, is_hidden, names_in
from mmdata.convert.sources.tables import shown
from mmdata.errors import ConfigError, DataError

logger = logging.getLogger("mmdata")


def find_images(folder: Path, images: str, paths: Sequence[str]) -> tuple[str, str]:
    """The folder that a table's paths are relative to, and its name if it was found and not named.

    Args:
        folder: of the table.
        images: as the settings give it: relative to `folder`, to the folder above it, or to the current one.
        paths: the first of the table. If none exists in `folder`, a sub-folder that has one is taken; COCO's
            annotations/ have their images in folders beside annotations/. A .zip is a folder here.

    Raises:
        ConfigError: there is no such folder, or several sub-folders have the paths.
    """
    if images != ".":
        for start in (folder, folder.parent, Path()):
            if is_folder(named := start / images):
                inner = corpus_folder(named)  # of a .zip that holds one folder, whose name the paths may lack
                return os.path.realpath(inner if _has_any(inner, paths) else named), ""
        raise ConfigError(f"images '{images}': no such folder in '{folder}', nor above it, nor in the current folder")
    paths = [path for path in paths if "://" not in path]
    if not paths or _has_any(folder, paths):
        return os.path.realpath(folder), ""
    near = _folders(folder) | (_folders(folder.parent) if folder.name == "annotations" else {})
    found = [name for name, place in near.items() if _has_any(place, paths)]
    if len(found) > 1:
        raise ConfigError(
            f"table in '{folder}': its images are in several folders: {shown(found)}; "
            "name the one that the paths are relative to with --images"
        )
    return (os.path.realpath(near[found[0]]), found[0]) if found else (os.path.realpath(folder), "")


def _folders(folder: Path) -> dict[str, Path]:
    """The folders in a folder by name; of a .zip the one that it holds, if it holds nothing else.

    A .zip that cannot be read is no folder: nobody has named it.
    """
    found: dict[str, Path] = {}
    for name in names_in(folder):
        try:
            if not is_hidden(name) and is_folder(folder / name):
                found[name] = corpus_folder(folder / name)
        except (DataError, OSError) as error:
            logger.warning("no images are looked for in '%s': %s", folder / name, error)
    return found


def _has_any(folder: Path, paths: Sequence[str]) -> bool:
    """Whether one of the paths is a file in the folder; what is no path is none."""
    return any(".." not in path.split("/") and "\0" not in path and is_file(folder / path) for path in paths)
