"""Which check is for what `mmdata verify` is given: what has an index is compared with it, however it was named."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmdata.errors import DataError
from mmdata.index.manifest import Manifest
from mmdata.index.pages import INDEX_END, PAGE_PATTERN
from mmdata.index.verify_members import has_members_index
from mmdata.storage.folder import INNER, has_manifest, local_folder
from mmdata.tars.braces import expand_braces
from mmdata.tars.given_tars import TAR_ENDS


@dataclass
class Given:
    """What is given, by the check that is for it.

    Attributes:
        folders: that have an index, with the names of the shards that are given; None: the folder itself is.
        tars: tars and folders of tars without an index.
    """

    folders: dict[str, set[str] | None] = field(default_factory=dict[str, "set[str] | None"])
    tars: list[str] = field(default_factory=list[str])


def sort_given(given: Sequence[str | os.PathLike[str]]) -> Given:
    """Tell folders with an index, and tars of such folders, from the rest.

    A folder with files of an index whose manifest is gone is one with an index: `verify` says what is missing.

    Args:
        given: tars, folders, brace patterns.

    Raises:
        DataError: the manifest beside a tar is damaged; or a tar is given of a folder without images
            (`mmdata index --members-only`), which is checked as a whole.
        ConfigError: see `expand_braces`.
    """
    names = [name for one in given for name in expand_braces(os.fspath(one))]
    sorted_out = Given()
    listed: dict[Path, set[str]] = {}
    for name in names:
        if "://" in name and not name.startswith("file:"):
            sorted_out.folders[name] = None  # refused by the check
            continue
        path = local_folder(name)
        if path.is_dir() or (len(names) == 1 and not path.exists()):
            if has_members_index(name) or not _has_only_tars(path):
                sorted_out.folders[name] = None
            else:
                sorted_out.tars.append(name)
            continue
        folder = path.parent
        if folder not in listed:
            listed[folder] = _listed(folder)
        if path.name not in listed[folder]:
            if has_members_index(folder):
                raise DataError(f"'{path}': its folder has an index of members; check it whole: mmdata verify {folder}")
            sorted_out.tars.append(name)
        elif (shards := sorted_out.folders.setdefault(str(folder), set())) is not None:
            shards.add(path.name)
    return sorted_out


def _has_only_tars(folder: Path) -> bool:
    """Whether a folder has tars, and nothing of an index."""
    if not folder.is_dir() or has_manifest(folder):
        return False
    if not any(name.endswith(TAR_ENDS) for name in os.listdir(folder)):
        return False
    names = os.listdir(folder / INNER) if (folder / INNER).is_dir() else []
    return not any(name.endswith(INDEX_END) or PAGE_PATTERN.fullmatch(name) for name in names)


def _listed(folder: Path) -> set[str]:
    """Names of the shards in a folder that its index lists; none without an index, or if its tars lie elsewhere."""
    if not has_manifest(folder):
        return set()
    manifest = Manifest.read(folder)
    if os.path.realpath(folder / manifest.location) != os.path.realpath(folder):
        return set()
    return {entry.name for entry in manifest}
