"""Where the joins of an index lie: beside it, or in the loader's cache if the index's folder cannot be written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mmdata.hashing import hash64
from mmdata.index.index import Index
from mmdata.storage.cache import default_folder
from mmdata.storage.folder import JOINS_NAME
from mmdata.tables.stored import Store
from mmdata.tables.table import Table


def store_of(index: Index, cache_dir: str | Path | None, *, replaces: bool = False) -> Store:
    """Keeps the joins of an index; those of several folders lie beside the first.

    Args:
        index: of the rows.
        cache_dir: of the loader; None: the user's.
        replaces: see `Store`.
    """
    folders = [source.folder for source in index.sources]
    # The cache is one for many indexes, and a folder keeps its joins when it is moved: only there the place is named.
    cached = (default_folder() if cache_dir is None else Path(cache_dir)) / JOINS_NAME / _hash(folders[0].identity)
    beside = folders[0].joins
    return Store([cached] if beside is None else [beside, cached], replaces=replaces)


def name_of_join(table: Table, index: Index, datasets: Sequence[str] = ()) -> str:
    """Name of the file of a join: the same however the table's content changes, so that a change is found.

    Args:
        table: that is joined.
        index: with which.
        datasets: to which the table's parts belong; empty: the table is for all.
    """
    others = [source.folder.identity for source in index.sources[1:]]
    of = ([os.path.abspath(word) for word in table.words], table.key, others, *datasets)
    return name_of_words(table.words[0], of)


def name_of_words(path: str, of: Sequence[object]) -> str:
    """A file name that begins as a path ends, and differs for each value of `of`, JSON."""
    stem = re.sub(r"[^\w-]+", "_", Path(path).stem)[:40].strip("_") or "table"
    return f"{stem}-{_hash(*of)}"


def _hash(*values: object) -> str:
    return f"{hash64(json.dumps(values).encode()) % 2**64:016x}"
