"""Finds and opens the tables of a corpus; the error for another file says what it is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from mmdata.config.convert import ConvertConfig, TableFormat
from mmdata.convert.sources.arrow import ARROW_MAGIC, ArrowFile, ParquetTable
from mmdata.convert.sources.delimited import DelimitedTable
from mmdata.convert.sources.files import check_file, in_zip, is_file, open_file, size_and_time
from mmdata.convert.sources.json_tables import JsonLinesTable, JsonTable, parse_json
from mmdata.convert.sources.tables import (
    COMPRESSED_SUFFIXES,
    FORMATS,
    SourceTable,
    compression_of,
    name_inside,
    naming_damage,
    open_bytes,
)
from mmdata.errors import ConfigError, DataError, excerpt

COMPRESSED_TARS = (".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
ARCHIVES = (".gz", ".zst", ".bz2", ".xz", ".zip", ".rar", ".7z")
PARQUET_MAGIC = b"PAR1"
HEAD_BYTES = 2**16
"""First bytes of a file that tell its format."""
BLOCK_BYTES = 2**20
LINES_SEEN = 10
"""Lines among which one must be an object in JSON Lines."""


@dataclass(frozen=True)
class FilePrint:
    """Identity of a table's content."""

    path: Path
    bytes: int
    sha256: str
    modified_ns: int

    def has_changed(self) -> bool:
        """Whether the file has another size, or was written to, since it was read."""
        return size_and_time(self.path) != (self.bytes, self.modified_ns)


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
    if is_file(literal):
        return [literal]
    start = Path(literal.anchor) if os.path.isabs(pattern) else folder
    try:
        # Not glob.glob: its ** follows links, and a link to a folder above it would give each table many times.
        found = sorted(path for path in start.glob(os.fspath(literal.relative_to(start))) if is_file(path))
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


def open_table(path: Path, config: ConvertConfig) -> SourceTable:
    """Open a table by its format: the one in the settings, else that of its first bytes and its name.

    Raises:
        DataError: unknown format, not a regular file, another encoding, no header, a duplicate column name, a Parquet
            or Arrow file that is cut short, JSON without a table in it.
    """
    check_file(path, "table")
    kind = config.format or find_format(path, config)
    if kind in ("parquet", "arrow") and (compression := "a zip" if in_zip(path) else compression_of(path)):
        raise DataError(
            f"table '{path}': {kind} in {compression}, and only text is read from a stream; unpack it first"
        )
    if kind in ("csv", "tsv"):
        return DelimitedTable(path, config, usual="," if kind == "csv" else "\t")
    if kind == "jsonl":
        return JsonLinesTable(path, config.encoding)
    if kind == "json":
        return JsonTable(path, config.encoding)
    if kind == "parquet":
        return ParquetTable(path)
    if kind == "arrow":
        return ArrowFile(path)
    raise DataError(f"table '{path}': {_what_it_is(path)}; known: .csv .tsv .txt .jsonl .json .parquet .arrow")


def find_format(path: Path, config: ConvertConfig) -> TableFormat | None:
    """The format of a table, from its first bytes where they tell, else from its name; None if it is no table.

    A .json that holds a JSON object a line is JSON Lines, a .jsonl that begins with "[" is a JSON document, and a .txt
    with one delimiter in all its first lines is a CSV.
    """
    suffix = Path(name_inside(path)).suffix.lower()
    with naming_damage(path), open_bytes(path) as file:
        head = file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf")
    if head.startswith(PARQUET_MAGIC):
        return "parquet"
    if head.startswith(ARROW_MAGIC):
        return "arrow"
    if suffix in (".json", ".jsonl", ".ndjson", ".txt") and head.lstrip()[:1] in (b"[", b"{"):
        return _json_format(head, usual="json" if suffix == ".json" else "jsonl")
    if suffix == ".txt":
        return "csv" if len(DelimitedTable(path, config).columns) > 1 else None
    return FORMATS.get(suffix)


def _json_format(head: bytes, *, usual: TableFormat) -> TableFormat:
    """Whether the first bytes of a JSON file are those of JSON Lines or of one document."""
    if head.lstrip()[:1] == b"[":
        return "json"
    lines = [line for line in head.split(b"\n")[:LINES_SEEN] if line.strip()]
    objects = sum(_is_object(line) for line in lines)
    if objects > 1 or (objects and usual == "jsonl"):
        return "jsonl"
    return "json" if lines[0].strip() == b"{" else usual  # a line that does not end in HEAD_BYTES is of either


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line.decode("utf-8", "replace")), dict)
    except (ValueError, RecursionError):
        return False


def _what_it_is(path: Path) -> str:
    """Says what a file that is not a table is, and what to do with it."""
    name = path.name.lower()
    if name.endswith(COMPRESSED_TARS):
        return (
            f"a compressed tar, which is not read; unpack it to a plain .tar first (gunzip '{path.name}', or zstd -d)"
        )
    if name.endswith(COMPRESSED_SUFFIXES) and compression_of(path):
        return "a packed file whose name does not say what is in it, as one in .csv.gz does; say it, as in format=csv"
    if name.endswith(COMPRESSED_SUFFIXES):
        return "called a packed file, and its first bytes are not those of one; fetch it again, or rename it"
    if name.endswith(ARCHIVES):
        return "a packed file, which is not read; unpack it, and give the table or folder that comes out"
    if name.endswith(".txt"):
        return "a text file whose lines have no fields; name what separates them, as in delimiter=tab format=csv"
    if name.endswith(".tar"):
        return "shards, which need no table; leave --table out, or `mmdata index` makes an index for tars"
    return f"unknown kind {excerpt(path.suffix)}"


def fingerprint(path: Path) -> FilePrint:
    """Hash a table's file."""
    digest, size = hashlib.sha256(), 0
    modified_ns = size_and_time(path)[1]
    with open_file(path) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FilePrint(path, size, digest.hexdigest(), modified_ns)
