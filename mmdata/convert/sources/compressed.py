"""Text that may be compressed with gzip or zstd, read as a stream. The first bytes tell, and not the name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from mmdata.convert.sources.files import in_zip, open_file
from mmdata.errors import DataError

SUFFIXES = (".gz", ".zst")
"""Ends of the names of compressed tables, as captions.csv.gz."""
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def compression_of(path: Path) -> str | None:
    """ "gzip" or "zstd"; None for a file that is not compressed."""
    with open_file(path) as file:
        head = file.read(4)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def open_bytes(path: Path) -> BinaryIO:
    """A file for reading, decompressed. Reading raises OSError where it is cut or damaged; see `naming_damage`."""
    compression = compression_of(path)
    if compression is None:
        return open_file(path)
    return cast(BinaryIO, pa.input_stream(open_file(path) if in_zip(path) else str(path), compression=compression))


def name_inside(path: Path) -> str:
    """The name of a file without the end that says how it is compressed."""
    inside = path.name[: -len(path.suffix)] if path.suffix.lower() in SUFFIXES else path.name
    return inside if compression_of(path) else path.name


@contextmanager
def naming_damage(path: Path) -> Generator[None]:
    """Raise DataError in place of the OSError for a compressed file that is cut or damaged."""
    try:
        yield
    except OSError as error:
        if error.errno is not None or (compression := compression_of(path)) is None:
            raise
        raise DataError(
            f"table '{path}': not whole {compression} data ({error}); fetch it again, or unpack what there is"
        ) from error
