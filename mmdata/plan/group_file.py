"""Reads a file of groups, which says the group of each row; `mmdata neighbours` writes such files."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.atomic import write_whole
from mmdata.errors import ConfigError, DataError
from mmdata.safe_read import check_regular
from mmdata.shards import Index


def read_groups(path: Path, index: Index) -> NDArray[np.int64]:
    """The group of each row, int64 (len(index),), from a .npy file or an Arrow IPC file.

    The Arrow file has a column `group`, and the fingerprint of the index it was made for in its metadata.

    Raises:
        ConfigError: the file does not exist, or was made for another corpus.
        DataError: the file has other content.
    """
    # Both kinds are read whole: if a mapped file is cut while it is in use, the kernel ends the process (SIGBUS).
    is_arrow = path.suffix != ".npy"
    remade = "make it anew with `mmdata neighbours`" if is_arrow else "save the group of each row as int64, -1 for none"
    try:
        check_regular(path, "file of groups")
        if not is_arrow:  # np.load would accept zip archives too, and suggest unpickling any other file
            with path.open("rb") as file:
                of_rows, made_for = np.lib.format.read_array(file, allow_pickle=False), index.fingerprint
        else:
            table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
            of_rows = table.column("group").combine_chunks().to_numpy(zero_copy_only=False)
            made_for = (table.schema.metadata or {}).get(b"index", b"").decode()
    except FileNotFoundError:
        raise ConfigError(f"data.groups.source '{path}': no such file; {remade}, or set source to label") from None
    except (ValueError, KeyError, EOFError, pa.ArrowException) as error:
        raise DataError(f"file of groups '{path}': cannot be read: {error}; {remade}") from error
    if of_rows.dtype != np.int64 or of_rows.ndim != 1:
        raise DataError(
            f"file of groups '{path}': expected int64 (rows,), got {of_rows.dtype} {of_rows.shape}; {remade}"
        )
    if len(of_rows) != len(index) or made_for != index.fingerprint:
        other = " of other content" if is_arrow else ""
        raise ConfigError(
            f"data.groups.source '{path}': made for another corpus: {len(of_rows)} rows, and data.shards has "
            f"{len(index)}{other}; {remade}"
        )
    return of_rows


def write_groups(path: Path, groups: NDArray[np.int64], index: Index, made_of: dict[str, str | int]) -> None:
    """Write what `read_groups` reads: an Arrow file with a column `group`.

    Args:
        path: the file.
        groups: int64 (len(index),), -1 for a row without a group.
        index: whose rows are grouped; its fingerprint goes into the metadata.
        made_of: further metadata.
    """
    schema = pa.schema(
        {"group": pa.int64()},
        metadata={"index": index.fingerprint, **{key: str(value) for key, value in made_of.items()}},
    )
    table = pa.table({"group": groups}, schema=schema)

    def write(file: BinaryIO) -> None:
        with pa.ipc.new_file(file, schema) as writer:
            writer.write_table(table)

    write_whole(path, write)
