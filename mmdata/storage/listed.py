"""What a list of shards says of one of them: its name, size and hashes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmdata.errors import DataError

MANIFEST_NAME = "manifest.json"
INNER_NAME = "__mmdata__"
"""The sub-folder; not hidden, as many HTTP servers refuse hidden names and `cp OUT/*` leaves them out."""
INNER = f"{INNER_NAME}/"

_PLAIN_NAME = re.compile(r"[^/\\\0:]+")


@dataclass(frozen=True)
class ListedShard:
    """The manifest's entry of one shard, without its histogram.

    Attributes:
        name: file name of the tar, in the manifest's `location`.
        bytes, sha256: of the tar.
        rows: samples in the index.
        index, index_sha256: file name, in the folder of manifest.json, and hash of the shard's index file.
        index_xxh3: `fast_hash` of the index file.
        captions: captions of all rows: one or more a row, or 0 in a corpus of labels only.
        labels: rows that have a label.
    """

    name: str
    bytes: int
    sha256: str
    rows: int
    index: str
    index_sha256: str
    index_xxh3: int
    captions: int
    labels: int


def check_plain_name(name: str, where: str) -> None:
    """Raise DataError if a shard's name is no file name, or could lead out of its folder."""
    if not _PLAIN_NAME.fullmatch(name) or name.startswith("."):
        raise DataError(f"{where}: '{name}' is not a plain file name; commands and paths are never followed")
