"""Digests of what lies in the files of a table, column by column, without decoding it.

They are taken of bytes, since a size and a time of modification may stay the same when a file is written anew. Only
the columns that are asked for are read: of Parquet their pages and the footer, which says where all pages lie. The
columns of a text file lie between each other, so it is read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.parquet
import xxhash

from mmdata.safe_read import open_regular

LAYOUT = ""
"""Name of the digest of all that belongs to no column: the footers of Parquet files, or text files as a whole."""
READ_BYTES = 2**22
_END_BYTES = 8  # length of the footer, and PAR1


def digests_of(files: Sequence[Path], names: Sequence[str]) -> dict[str, str]:
    """32 hexadecimal digits (XXH3) for each of some columns, and for `LAYOUT`.

    Args:
        files: of the table, in order: .parquet, or text.
        names: of columns that all Parquet files have.

    Raises:
        OSError, ValueError, ArrowException: a file cannot be read, or is cut.
    """
    found = {name: xxhash.xxh3_128() for name in (LAYOUT, *names)}
    for path in files:
        with open(open_regular(path, "table"), "rb") as file:
            if path.suffix.lower() == ".parquet":
                _add_parquet(path, file, found)
            else:
                size = path.stat().st_size
                found[LAYOUT].update(f"{size} ".encode())
                _add(found[LAYOUT], file, 0, size)
    return {name: digest.hexdigest() for name, digest in found.items()}


def _add_parquet(path: Path, file: BinaryIO, digests: dict[str, Any]) -> None:
    size = path.stat().st_size
    file.seek(size - _END_BYTES)
    footer_bytes = int.from_bytes(file.read(4), "little") + _END_BYTES
    _add(digests[LAYOUT], file, size - footer_bytes, footer_bytes)
    digests[LAYOUT].update(f"{size} ".encode())
    metadata: Any = pyarrow.parquet.read_metadata(path)
    for leaf, name in _leaves(metadata, [name for name in digests if name != LAYOUT]):
        for group in range(metadata.num_row_groups):
            chunk = metadata.row_group(group).column(leaf)
            offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
            begin = min(offset for offset in offsets if offset)
            _add(digests[name], file, begin, chunk.total_compressed_size)


def _leaves(metadata: Any, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Parquet's columns (number, name of the table's column): a list of texts is recaption.list.element there."""
    wanted = set(names)
    for leaf in range(metadata.num_columns):
        path = metadata.schema.column(leaf).path
        yield from ((leaf, name) for name in wanted if path == name or path.startswith(f"{name}."))


def _add(digest: Any, file: BinaryIO, begin: int, size: int) -> None:
    file.seek(begin)
    while size:
        if not (data := file.read(min(size, READ_BYTES))):
            raise ValueError(f"it ends before byte {begin + size:,}")
        digest.update(data)
        size -= len(data)
