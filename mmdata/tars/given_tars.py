"""The tars that `mmdata verify` is given: tars, folders of tars, brace patterns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mmdata.errors import ConfigError, DataError
from mmdata.safe_read import path_of_url
from mmdata.tars.braces import expand_braces

TAR_ENDS = (".tar", ".tar.gz", ".tgz")
"""Ends of the names that are taken for tars in a folder."""


def given_tars(given: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The paths of the tars, in the order given; those of a folder are sorted by name. None of them is opened.

    Raises:
        DataError: there is no such file, a folder has no tar, or a tar is named twice.
        ConfigError: a URL or a command, or what `expand_braces` raises.
    """
    paths = [path for one in given for name in expand_braces(os.fspath(one)) for path in _tars_at(name)]
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise DataError(f"'{path}': named twice; name each tar once")
        seen.add(real)
    return paths


def _tars_at(name: str) -> list[Path]:
    name = path_of_url(name) or name
    if "://" in name or name.startswith("pipe:"):
        raise ConfigError(f"'{name}': only tars on this machine are read; fetch them first")
    path = Path(name)
    if not os.path.lexists(path):
        raise DataError(f"'{path}': no such file or folder")
    if not path.is_dir():
        return [path]
    names = sorted(one for one in os.listdir(path) if one.endswith(TAR_ENDS) and not one.startswith("."))
    if not names:
        raise DataError(f"folder '{path}': no .tar in it")
    return [path / one for one in names]
