"""Side files: columns aligned to the rows of an index, written once and bound to what they were made of.

A side file is a line of JSON, which says what the columns were made of and the XXH3 of all that follows, and an Arrow
stream. It lies beside the index, or in the loader's cache where the index's folder cannot be written. `mmdata index`
keeps what it has read of a tar in such a file.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from mmdata.errors import ConfigError, DataError
from mmdata.files import lock, write_whole
from mmdata.hashing import hash64
from mmdata.index.index import Index
from mmdata.index.store import read_part
from mmdata.storage.cache import default_folder
from mmdata.storage.folder import JOINS_NAME

logger = logging.getLogger("mmdata")

COMMAND = "mmdata join CONFIG"
"""Writes the side files that a config needs."""
_ALIGNMENT = 64  # of Arrow's buffers, which are used where they lie in the file


class SideFile(NamedTuple):
    """Columns that were read.

    Attributes:
        columns: a pyarrow.Table.
        fingerprint: equal for equal columns, whatever files they were made of.
        path: of the file.
    """

    columns: Any
    fingerprint: str
    path: Path

    def array(self, name: str) -> Any:
        """A column as one Arrow array."""
        column = self.columns.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class SideFiles:
    """The side files of an index; those of an index of several folders lie beside the first.

    Args:
        index: whose rows the columns are aligned to.
        cache_dir: of the loader; None: the user's.
        writes: whether files are made anew; else they are only read.
    """

    def __init__(self, index: Index, cache_dir: str | Path | None = None, *, writes: bool = False) -> None:
        first = index.sources[0].folder
        # The cache is one for many indexes, and a folder keeps its side files when it is moved: only there it is named.
        cache = (default_folder() if cache_dir is None else Path(cache_dir)) / JOINS_NAME / digest_of(first.identity)
        self._folders = [cache] if first.joins is None else [first.joins, cache]
        self._index, self._writes = index.fingerprint, writes
        self._done: set[str] = set()

    def get(self, name: str, made_of: Mapping[str, Any], make: Callable[[], Any], *, what: str) -> SideFile:
        """The columns of a name: those that are made now, or those of the file.

        Args:
            name: of the file, without its end.
            made_of: what the columns are made of beside the index, JSON.
            make: gives them, a pyarrow.Table with a row for each row of the index.
            what: they are, for messages.

        Raises:
            ConfigError: there is no such file, it is damaged, or it was made of something else; or, when it is made, no
                folder can be written.
        """
        if self._writes and name not in self._done:
            self._write(f"{name}.arrow", made_of, make(), what)
            self._done.add(name)
        made_of = json.loads(json.dumps({**made_of, "index": self._index}))
        why = "it does not exist"
        for path in (folder / f"{name}.arrow" for folder in self._folders):
            try:
                return _read(path, made_of)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (DataError, OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
                why = str(error)
        path = self._folders[0] / f"{name}.arrow"
        raise ConfigError(f"{what} is not joined with the index ('{path}': {why}); run `{COMMAND}`")

    def made(self, name: str, made_of: Mapping[str, Any], make: Callable[[], Any], *, what: str) -> Any:
        """The columns, as `get`; those that are not there are made now, and kept where a folder can be written.

        Of several processes one makes them, and the others wait.

        Returns:
            a pyarrow.Table.
        """
        if self._writes:
            return self.get(name, made_of, make, what=what).columns
        with suppress(ConfigError):
            return self.get(name, made_of, make, what=what).columns
        with ExitStack() as held:
            for folder in self._folders:
                with suppress(OSError):
                    folder.mkdir(parents=True, exist_ok=True)
                    held.enter_context(lock(folder, wait=True))
                    break
            with suppress(ConfigError):  # made by another process meanwhile
                return self.get(name, made_of, make, what=what).columns
            logger.info("%s: not known yet; made now and kept, as `%s` does it beforehand", what, COMMAND)
            columns = make()
            try:
                self._write(f"{name}.arrow", made_of, columns, what)
            except ConfigError as error:
                logger.warning("%s, and what is made now is not kept", error)
            return columns

    def _write(self, name: str, made_of: Mapping[str, Any], columns: Any, what: str) -> None:
        failed: OSError | None = None
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_columns(folder / name, {"made_of": {**made_of, "index": self._index}}, columns.combine_chunks())
                return
            except OSError as error:
                failed = error
        raise ConfigError(
            f"{what}: neither the folder of the index nor the loader's cache can be written ({failed}): set "
            "data.loading.cache_dir to a folder that can be"
        )


def _read(path: Path, made_of: Mapping[str, Any]) -> SideFile:
    head, columns = read_columns(path)
    if head["made_of"] != made_of:
        raise ValueError("it was made of another table or index, or of one that changed since")
    return SideFile(columns, head["xxh3"], path)


def write_columns(path: Path, head: Mapping[str, Any], columns: Any) -> None:
    """Write a line of JSON and the columns of a table or record batch of Arrow into a file, whole or not at all."""
    body = pa.BufferOutputStream()
    with pa.ipc.new_stream(body, columns.schema) as stream:
        stream.write(columns)
    data: Any = body.getvalue()
    content = json.dumps({**head, "xxh3": xxhash.xxh3_128_hexdigest(data)}).encode()
    line = xxhash.xxh3_64_hexdigest(content).encode() + content
    line = line.ljust(-(-(len(line) + 1) // _ALIGNMENT) * _ALIGNMENT - 1) + b"\n"
    write_whole(path, lambda file: (file.write(line), file.write(data)))


def read_columns(path: Path) -> tuple[dict[str, Any], Any]:
    """The line of JSON, and the table, of a file that `write_columns` has written.

    Raises:
        FileNotFoundError: there is none.
        ValueError, pa.ArrowException: it is damaged.
    """
    data = read_part(path, "side file", 0, path.stat().st_size)
    newline = re.search(b"\n", data)
    line = bytes(data[: newline.end()]) if newline else b""
    digest, content = line[:16], line[16:].rstrip()
    if digest != xxhash.xxh3_64_hexdigest(content).encode():
        raise ValueError("it is damaged")
    head, body = json.loads(content), data[len(line) :]
    if head["xxh3"] != xxhash.xxh3_128_hexdigest(body):
        raise ValueError("it is damaged")
    return head, pa.ipc.open_stream(pa.py_buffer(body)).read_all()


def digest_of(*values: object) -> str:
    """16 hexadecimal digits that differ for other values, JSON."""
    return f"{hash64(json.dumps(values).encode()) % 2**64:016x}"


def side_name(path: str, *made_of: object) -> str:
    """A file name that begins as a path ends, and differs for each value of `made_of`, JSON."""
    stem = re.sub(r"[^\w-]+", "_", Path(path).stem)[:40].strip("_") or "table"
    return f"{stem}-{digest_of(*made_of)}"
