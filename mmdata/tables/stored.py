"""Arrays that were made once and are kept in files, each bound to what it was made of.

A file is written whole or not at all, by one process at a time; the others wait for it. A file that is damaged is made
anew: the CRC-32 of each array in it is compared when it is read.
"""

from __future__ import annotations

import fcntl
import json
import logging
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.atomic import explain, write_whole
from mmdata.errors import DataError
from mmdata.safe_read import open_regular

logger = logging.getLogger("mmdata")

Arrays = Mapping[str, NDArray[Any]]
Keep = Callable[[str, Callable[[], Arrays]], Arrays]
"""Gives arrays by a name: those that are kept, or those that the function makes now, and keeps them."""
MadeOf = dict[str, Any]
"""What arrays were made of: JSON."""

_MADE_OF = "made_of"  # the member with the JSON
_DAMAGED = (OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError, MemoryError, zipfile.BadZipFile)


def make_anew(name: str, make: Callable[[], Arrays]) -> Arrays:
    """A `Keep` that keeps nothing."""
    return make()


class Stored(NamedTuple):
    """Arrays, and what they were made of.

    Attributes:
        path: of the file; None if no folder can be written.
    """

    made_of: MadeOf
    arrays: Arrays
    path: Path | None


class Store:
    """Files of arrays (.npz) in the first of several folders that can be written.

    Args:
        folders: where files are looked for, in order; made when needed.
        replaces: whether files that do not fit any more may be replaced without a question; for the caller's `fits`.
    """

    def __init__(self, folders: Sequence[Path], *, replaces: bool = False) -> None:
        self.folders = list(folders)
        self.replaces = replaces

    def get(self, name: str, fits: Callable[[MadeOf], bool], make: Callable[[], tuple[MadeOf, Arrays]]) -> Stored:
        """The arrays of a name: those of a file that fits, else those that are made now, and kept.

        Args:
            name: of the file, without its end.
            fits: whether arrays that were made of this are the wanted ones.
            make: makes them; called by one process of a machine at a time.
        """
        if (found := self._find(name, fits)) is not None:
            return found
        with self._making(name) as folder:
            if (found := self._find(name, fits)) is not None:  # another process has made it while this one waited
                return found
            if folder is None:
                logger.warning(
                    "'%s' and data.loading.cache_dir cannot be written: what is joined is not kept, and is made anew "
                    "at each start",
                    self.folders[0],
                )
            made_of, arrays = make()
            made_of = json.loads(json.dumps(made_of))
            return Stored(made_of, arrays, folder and _save(folder / f"{name}.npz", made_of, arrays))

    def _find(self, name: str, fits: Callable[[MadeOf], bool]) -> Stored | None:
        """The first file that fits; what `fits` raises is raised if no other file fits."""
        refused: DataError | None = None
        for found in self._read(name):
            try:
                if fits(found.made_of):
                    return found
            except DataError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return None

    def _read(self, name: str) -> Iterator[Stored]:
        for path in (folder / f"{name}.npz" for folder in self.folders):
            try:
                with open(open_regular(path), "rb") as file, np.load(file, allow_pickle=False) as content:
                    arrays = {one: content[one] for one in content.files}
                made_of = json.loads(arrays.pop(_MADE_OF).tobytes())
            except (FileNotFoundError, NotADirectoryError):
                continue
            except _DAMAGED as error:
                logger.warning("'%s' cannot be read (%s) and is made anew", path, error)
                continue
            yield Stored(made_of, arrays, path)

    @contextmanager
    def _making(self, name: str) -> Generator[Path | None, None, None]:
        """The folder to write, held against other processes that make the same file; None if none can be written."""
        for folder in self.folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = (folder / f".{name}.lock").open("ab")
            except OSError:
                continue
            with file:
                try:
                    _lock(file, name)
                except OSError:  # a file system without locks, where two processes would write the same file
                    continue
                yield folder
                return
        yield None


def _lock(file: BinaryIO, name: str) -> None:
    """Lock a file, and say so if another process holds it; the kernel releases the lock when a process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("another process makes '%s': waiting for it", name)
        fcntl.flock(file, fcntl.LOCK_EX)


def _save(path: Path, made_of: MadeOf, arrays: Arrays) -> Path | None:
    """Write a file; where that fails the arrays are used all the same, and made again by the next process."""
    content: dict[str, Any] = {_MADE_OF: np.frombuffer(json.dumps(made_of).encode(), np.uint8), **arrays}
    try:
        write_whole(path, lambda file: np.savez(file, **content))
    except OSError as error:
        logger.warning("%s; until then it is made anew at each start", explain(error))
        return None
    return path
