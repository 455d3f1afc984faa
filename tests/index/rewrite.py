"""The files of an index, and an index rewritten as a faulty writer would: hashes and manifest agree with it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmdata.hashing import fast_hash
from mmdata.index import Manifest, ShardEntry
from mmdata.index.columns import SCHEMA
from mmdata.index.encode import encode
from mmdata.index.staging import STAGING_NAME
from mmdata.index.writer import ManifestWriter

EMPTY = encode([]).data
"""Columns of no row."""

Shard = tuple[ShardEntry, bytes]


def shards_of(folder: Path) -> list[Shard]:
    """The shards of a folder, as `write_manifest` takes them."""
    manifest = Manifest.read(folder)
    return [(entry, bytes(manifest.columns(number).data)) for number, entry in enumerate(manifest)]


def rewrite(folder: Path, shards: Sequence[Shard], **settings: Any) -> Manifest:
    """Write the index of a folder anew."""
    tokenizer = Manifest.read(folder).tokenizer
    (folder / "__mmdata__/manifest.json").unlink()
    return write_manifest(folder, shards, **{"tokenizer": tokenizer, **settings})


def changed(shard: Shard, change: Callable[[dict[str, Any]], list[Any]]) -> Shard:
    """A shard with other columns, which `change` makes of those it has."""
    entry, data = shard
    batch = pa.ipc.read_record_batch(pa.py_buffer(data), SCHEMA)
    arrays = change(dict(zip(batch.schema.names, batch.columns, strict=True)))
    return of_columns(replace(entry, rows=len(arrays[0])), pa.record_batch(arrays, schema=SCHEMA).serialize())


def of_columns(entry: ShardEntry, columns: Any) -> Shard:
    """A shard with these columns."""
    data = bytes(columns)
    digests = {"index_sha256": hashlib.sha256(data).hexdigest(), "index_xxh3": fast_hash(data)}
    return replace(entry, index_bytes=len(data), **digests), data


def listed(*entries: ShardEntry) -> list[Shard]:
    """Shards of which only the manifest is looked at."""
    return [of_columns(entry, EMPTY) for entry in entries]


def write_manifest(folder: Path, shards: Iterable[Shard], **settings: Any) -> Manifest:
    """Write the index of a folder."""
    writer = ManifestWriter(folder)
    for entry, columns in shards:
        writer.add(entry, columns)
    return writer.close(**settings)


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder; without what a run that failed has kept for the next one."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name != ".mmdata.lock" and STAGING_NAME not in p.parts
    }


def published(folder: Path) -> dict[str, bytes]:
    """The files of the index of a folder."""
    return {path.name: path.read_bytes() for path in (folder / "__mmdata__").iterdir()}
