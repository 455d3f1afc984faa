"""Tables behind a URL, fetched to this machine for the time of a conversion. A file comes whole, or nothing is made.

A request that fails is repeated as those of a loader are. What the tables name, images behind paths, is not fetched.
"""

from __future__ import annotations

import logging
import posixpath
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any
from urllib.parse import unquote

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.open import PARTS_OF_DICT, STATE, part_of
from mmdata.convert.sources.tables import SUFFIXES, choose_part, shown
from mmdata.errors import ConfigError, DataError
from mmdata.storage.attempts import repeated
from mmdata.storage.remote import RemoteFile
from mmdata.storage.urls import PROTOCOLS, FileSystem, display_name, is_followed, is_http

SOURCE_NAME = ".source-"
"""How the names of folders with fetched tables begin, in the hidden folder."""

logger = logging.getLogger("mmdata.fetch")

BESIDE = (STATE, PARTS_OF_DICT)
"""Files that say which Arrow files are a dataset's, beside them."""


@contextmanager
def fetched(url: str, private: Path, config: ConvertConfig) -> Generator[Path]:
    """The tables behind a URL, on this machine until the end of the context.

    Args:
        url: of a table, or, where the server can list it, of a folder of tables.
        private: the hidden folder in which the conversion is made.
        config: `table` and `split` choose among the tables of a folder.

    Returns:
        Path of the table, or of a folder with the tables where they lie in the remote one.

    Raises:
        DataError: no such file, no table, no room for them, or the server cannot be reached.
        ConfigError: another protocol, credentials that are missing, or a source that is no table.
    """
    if not is_followed(url):
        known = ", ".join(PROTOCOLS)
        raise ConfigError(f"'{display_name(url)}': tables are fetched from URLs of {known}; copy it to one of these")
    private.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=SOURCE_NAME, dir=private))
    try:
        tables, is_folder = _tables(url, config)
        for file in tables.values():
            file.begin()
        _check_room(folder, display_name(url), [file.size or 0 for file in tables.values()])
        for number, (name, file) in enumerate(tables.items(), 1):
            place = folder / name
            if not place.resolve().is_relative_to(folder.resolve()):
                raise DataError(f"'{display_name(url)}': lists '{name}', which leads out of the folder")
            logger.info("tables: %d of %d, %s", number, len(tables), name)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.save(place)
        yield folder if is_folder else folder / next(iter(tables))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # it holds the ledger of a conversion that failed
            private.rmdir()


def _tables(url: str, config: ConvertConfig) -> tuple[dict[str, RemoteFile], bool]:
    """The tables to fetch, by their names; and whether they lie in a folder, which the server listed."""
    files, shown_url = FileSystem(url), display_name(url)
    if is_http(url):
        name = unquote(posixpath.basename(url.partition("?")[0].partition("#")[0]))
        _refuse_tars(url, [name])
        if "/" in name or name in ("", ".", "..") or not name.lower().endswith((*SUFFIXES, ".txt")):
            raise ConfigError(
                f"'{shown_url}': not the URL of a table, and a folder cannot be listed over HTTP; give the URL of "
                f"the file, which ends in {', '.join(SUFFIXES[:6])}, …"
            )
        return {name: RemoteFile(files, url, Event())}, False
    whole = url.rstrip("/")
    found: dict[str, Any] = repeated(lambda: files.call("info", whole), shown_url, start=0)
    is_folder = found["type"] == "directory"
    if is_folder:
        root = str(found["name"]).rstrip("/")
        listed: list[str] = repeated(lambda: files.call("find", whole), shown_url, start=0)
        names = _choose(shown_url, sorted(posixpath.relpath(name, root) for name in listed), config)
    else:
        root, name = posixpath.split(found["name"])
        names = [name]
    _refuse_tars(url, names)
    place = f"{url.partition('://')[0]}://{root}"
    return {name: RemoteFile(files, f"{place}/{name}", Event()) for name in names}, is_folder


def _choose(name: str, names: Sequence[str], config: ConvertConfig) -> list[str]:
    """The files of a folder to fetch: its tables, or those of the part or the pattern that the settings name."""
    visible = [one for one in names if not any(part.startswith(".") for part in one.split("/"))]
    if config.table is not None:
        tables = [one for one in visible if fnmatch(one, config.table)]
        if not tables:
            raise DataError(f"source '{name}': no table '{config.table}' in it; there are: {shown(visible)}")
        return tables
    tables = [one for one in visible if one.lower().endswith(SUFFIXES)]
    if not tables:
        _refuse_tars(name, visible)
        raise DataError(f"source '{name}': no table in it; there are: {shown(visible) or 'no files'}")
    if STATE in visible:
        return [one for one in tables if one.endswith(".arrow") or one == STATE]
    if PARTS_OF_DICT in visible:
        parts = _by_part((one for one in tables if one.endswith(".arrow")), lambda one: one.partition("/")[0])
        return [*choose_part(name, parts, config.split), *(one for one in visible if posixpath.basename(one) in BESIDE)]
    if parquet := [one for one in tables if one.endswith(".parquet")]:
        return choose_part(name, _by_part(parquet, lambda one: part_of(PurePosixPath(one))), config.split)
    return tables


def _by_part(names: Iterable[str], part: Callable[[str], str]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(part(name), []).append(name)
    return parts


def _refuse_tars(url: str, names: Sequence[str]) -> None:
    if names and all(".tar" in name or name.endswith(".tgz") for name in names):
        shown_url = display_name(url)
        raise ConfigError(
            f"'{shown_url}': tars behind a URL; `mmdata index '{shown_url}' --out FOLDER` makes an index of them where "
            "they are; copy them to this machine to convert them"
        )


def _check_room(folder: Path, name: str, sizes: Sequence[int]) -> None:
    size, free = sum(sizes), shutil.disk_usage(folder).free
    if size > free:
        raise DataError(
            f"source '{name}': its tables have {size:,} bytes, and the disk of '{folder}' has room for {free:,}; "
            "choose an output on another disk, or convert a part (--split, --table)"
        )
    known = f"{size:,}" if size else "an unknown number of"
    logger.info("tables: fetching %d, %s bytes, of %s", len(sizes), known, name)
