"""Folders of shards as earlier versions of mmdata wrote them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from mmdata.shards import Manifest
from mmdata.shards.manifest_writer import write_manifest


def beside(folder: Path) -> Path:
    """The folder with index, manifest and ledger beside the tars."""
    for path in (folder / "__mmdata__").iterdir():
        path.rename(folder / path.name)
    (folder / "__mmdata__").rmdir()
    return folder


def version_2(folder: Path) -> Path:
    """The folder without what version 3 of the schema added: the fast hash, and the checksum of manifest.json."""
    inner, manifest = folder / "__mmdata__", Manifest.read(folder)
    entries = list(manifest)
    for number, entry in enumerate(entries):
        batch = pa.ipc.open_file((inner / entry.index).read_bytes()).get_batch(0).drop_columns(["image_xxh3"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        data = sink.getvalue().to_pybytes()
        (inner / entry.index).write_bytes(data)
        entries[number] = replace(entry, index_sha256=hashlib.sha256(data).hexdigest())
    (inner / "manifest.json").unlink()
    again = write_manifest(
        folder, entries, tokenizer=manifest.tokenizer, location=manifest.location, accounts=manifest.accounts
    )
    (inner / "manifest.json").write_bytes(replace(again, schema=2).to_json())
    return folder
