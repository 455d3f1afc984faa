"""From settings to a mixture: which datasets, which groups. Reads no image."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.data_config import DataConfig, GroupsConfig, sources
from mmdata.errors import ConfigError, DataError
from mmdata.files import check_regular
from mmdata.plan import Groups, IndexRows, Mixture, Source, Stream
from mmdata.shards import Index


def build_mixture(data: DataConfig, index: Index, rows: IndexRows) -> Mixture:
    """The mixture that a section `data` describes.

    Raises:
        ConfigError: groups by label, and the corpus has none; or of a file that is not of this corpus.
        DataError: a file of groups is damaged.
    """
    listed = sources(data)
    spans = [
        Source(place.first_shard, place.last_shard, source.repeat or 1.0)
        for source, place in zip(listed, index.sources, strict=True)
    ]
    if listed[0].weight is None:
        streams = (Stream(tuple(spans)),)
    else:
        streams = tuple(Stream((span,), source.weight or 1) for source, span in zip(listed, spans, strict=True))
    groups = build_groups(data.groups, index) if data.groups else None
    return Mixture(streams, groups, rows.hashes if data.unique else None)


def needs_hashes(data: DataConfig) -> bool:
    """Whether batches carry hashes: they are asked for, or rows that are no negatives of each other may meet."""
    again = any((source.repeat or 1.0) != 1.0 or source.weight is not None for source in sources(data))
    return data.hashes or data.unique or again or (data.groups is not None and data.groups.candidates is not None)


def build_groups(settings: GroupsConfig, index: Index) -> Groups:
    """The groups of the rows: the corpus's labels, or those of a file."""
    size, candidates = settings.size or 1, settings.candidates or 0
    if settings.by != "label":
        of_rows = read_groups(Path(settings.by), index)
        digest = hashlib.sha256(of_rows.tobytes()).hexdigest()[:16]
        return Groups(of_rows, size, candidates, f"file {digest}")
    if not index.manifest.has_labels:
        raise ConfigError(
            "data.groups by label: no row of the corpus has a label; convert it with --label-column, or set by to a "
            "file of groups, which `mmdata neighbours` makes"
        )
    return Groups(index.column("label"), size, candidates, "label")


def read_groups(path: Path, index: Index) -> NDArray[np.int64]:
    """The group of each row, from a file: int64 (len(index),). Read whole: a mapped file that is cut ends the process.

    Either a .npy file, or an Arrow IPC file with a column `group` and the fingerprint of the index it was made for.

    Raises:
        ConfigError: there is no such file, or it is of another corpus.
        DataError: it holds something else.
    """
    ours = path.suffix != ".npy"
    remade = "make it anew with `mmdata neighbours`" if ours else "save the group of each row as int64, -1 for none"
    try:
        check_regular(path, "file of groups")
        if not ours:  # np.load would take zip archives too, and advise unpickling what is neither
            with path.open("rb") as file:
                of_rows, made_for = np.lib.format.read_array(file, allow_pickle=False), index.fingerprint
        else:
            table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
            of_rows = table.column("group").combine_chunks().to_numpy(zero_copy_only=False)
            made_for = (table.schema.metadata or {}).get(b"index", b"").decode()
    except FileNotFoundError:
        raise ConfigError(f"data.groups.by '{path}': no such file; {remade}, or set by to label") from None
    except (ValueError, KeyError, EOFError, pa.ArrowException) as error:
        raise DataError(f"file of groups '{path}': cannot be read: {error}; {remade}") from error
    if of_rows.dtype != np.int64 or of_rows.ndim != 1:
        raise DataError(
            f"file of groups '{path}': expected int64 (rows,), got {of_rows.dtype} {of_rows.shape}; {remade}"
        )
    if len(of_rows) != len(index) or made_for != index.fingerprint:
        other = " of other content" if ours else ""
        raise ConfigError(
            f"data.groups.by '{path}': made for another corpus: {len(of_rows)} rows, and data.shards has "
            f"{len(index)}{other}; {remade}"
        )
    return of_rows
