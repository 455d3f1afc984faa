"""Files that are whole or absent. What is published was written aside, synced and renamed; one writer a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mmdata.errors import DataError

LOCK_NAME = ".mmdata.lock"


def write_whole(path: str | os.PathLike[str], data: bytes | memoryview | Callable[[BinaryIO], object]) -> None:
    """Write a file so that a kill at any moment leaves the old one or the new one, never a part.

    The part is written beside the target, under a hidden name that the next write of the same target reuses.

    Args:
        path: the file.
        data: its content, or a function that writes it into an open file.

    Raises:
        OSError: the disk is full or read-only; the old file is untouched, and no part of the new one is left.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.part")
    try:
        with aside.open("wb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a renamed file survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(folder: Path) -> Generator[None, None, None]:
    """Hold `folder` as its only writer; the system releases it with the process, however that ends.

    Raises:
        DataError: another process (or another writer of this one) holds it.
        OSError: the folder cannot be written.
    """
    path = folder / LOCK_NAME
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"folder '{folder}': another process is writing here; wait for it or choose another folder"
            ) from None
        yield
