"""Finds and opens the tables of a corpus; the error for another file says what it is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from mmdata.convert.parquet import ParquetTable
from mmdata.convert.tables import DelimitedTable, JsonLinesTable, Table
from mmdata.errors import ConfigError, DataError, excerpt
from mmdata.safe_read import check_regular

COMPRESSED_TARS = (".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
ARCHIVES = (".gz", ".zst", ".bz2", ".xz", ".zip", ".rar", ".7z")


@dataclass(frozen=True)
class FilePrint:
    """Identity of a table's content; `lines` is an upper bound of its rows that needs no parsing."""

    name: str
    bytes: int
    sha256: str
    lines: int


def find_tables(folder: Path, pattern: str) -> list[Path]:
    """The tables that match a pattern, sorted by name.

    Args:
        folder: of the corpus.
        pattern: path of a table, or a pattern for several; relative to `folder`, or absolute.

    Raises:
        DataError: no table matches.
        ConfigError: an empty or invalid pattern.
    """
    if not pattern:
        raise ConfigError("table '': empty; name a table in the source, or leave --table out")
    literal = folder / pattern  # an absolute pattern stays as it is
    if literal.is_file():
        return [literal]
    start = Path(literal.anchor) if os.path.isabs(pattern) else folder
    try:
        relative = os.fspath(literal.relative_to(start)) if os.path.isabs(pattern) else pattern
        found = sorted(table for table in start.glob(relative) if table.is_file())
    except (ValueError, IndexError, NotImplementedError) as error:
        raise ConfigError(f"table {excerpt(pattern)}: not a path or a pattern of paths: {error}") from error
    if found:
        return found
    advice = ""
    if literal.exists():
        advice = "; that is no regular file"
    elif Path(pattern).is_file():
        advice = f"; it is relative to the source: '{pattern}' of the current folder needs an absolute path"
    raise DataError(f"source '{folder}': no table '{pattern}' in it{advice}")


def open_table(path: Path, *, quotes: bool = True) -> Table:
    """Open a table by its extension.

    Raises:
        DataError: unknown extension, not a regular file, not UTF-8, no header, a duplicate column name, a Parquet file
            that is cut short, JSON that is not JSON Lines.
    """
    kind = path.suffix.lower()
    check_regular(path, "table")
    if kind in (".csv", ".tsv"):
        return DelimitedTable(path, delimiter="," if kind == ".csv" else "\t", quotes=quotes)
    if kind in (".jsonl", ".ndjson"):
        return JsonLinesTable(path)
    if kind in (".parquet", ".pq"):
        return ParquetTable(path)
    raise DataError(f"table '{path}': {_what_it_is(path)}; known: .csv .tsv .jsonl .parquet")


def _what_it_is(path: Path) -> str:
    """Says what a file that is not a table is, and what to do with it."""
    name = path.name.lower()
    if name.endswith(COMPRESSED_TARS):
        return (
            f"a compressed tar, which is not read; unpack it to a plain .tar first (gunzip '{path.name}', or zstd -d)"
        )
    if name.endswith(ARCHIVES):
        return "a packed file, which is not read; unpack it, and give the table or folder that comes out"
    if name.endswith(".json"):
        return (
            "one JSON document, which is not read; write its rows as JSON Lines, one object a line "
            "(docs/convert.md has a program for COCO)"
        )
    if name.endswith(".tar"):
        return "shards, which need no table; leave --table out, or `mmdata index` makes an index for tars"
    return f"unknown kind {excerpt(path.suffix)}"


def fingerprint(path: Path) -> FilePrint:
    """Hash a table's file and count its lines."""
    digest, size, lines = hashlib.sha256(), 0, 1
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size += len(block)
            lines += max(block.count(b"\n"), block.count(b"\r"))  # either may end a line, and both together
    return FilePrint(path.name, size, digest.hexdigest(), lines)
