"""Folders of shards as earlier versions of mmdata wrote them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from mmdata.index import Manifest
from mmdata.index.manifest_writer import write_manifest


def beside(folder: Path) -> Path:
    """The folder with index, manifest and ledger beside the tars."""
    for path in (folder / "__mmdata__").iterdir():
        path.rename(folder / path.name)
    (folder / "__mmdata__").rmdir()
    return folder


def version_2(folder: Path) -> Path:
    """The folder without what version 3 of the schema added: fast hashes, and the checksum of manifest.json."""
    inner, manifest = folder / "__mmdata__", Manifest.read(folder)
    entries = list(manifest)
    for number, entry in enumerate(entries):
        digest = drop_column(inner / entry.index, "image_xxh3")
        entries[number] = replace(entry, index_sha256=digest)
    (inner / "manifest.json").unlink()
    again = write_manifest(
        folder, entries, tokenizer=manifest.tokenizer, location=manifest.location, accounts=manifest.accounts
    )
    pages = [replace(page, sha256=drop_column(inner / page.file, "index_xxh3")) for page in again.pages]
    (inner / "manifest.json").write_bytes(replace(again, schema=2, pages=pages).to_json())
    return folder


def drop_column(path: Path, name: str) -> str:
    """Rewrite an Arrow file without a column; returns its SHA-256."""
    batch = pa.ipc.open_file(path.read_bytes()).get_batch(0).drop_columns([name])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data = sink.getvalue().to_pybytes()
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()
