"""Says what lies at a path, for messages where something else was expected. It looks at names and first bytes only."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from enum import Enum
from itertools import islice
from pathlib import Path

from mmdata.errors import DataError, nearest

PRIVATE_NAME = ".mmdata-convert"
"""The hidden folder in which `mmdata convert` makes a conversion. Published, it is gone."""
PARTS = TRAIN, VAL = "train", "val"
"""Folders of a conversion that sets samples aside for validation."""
HEAD_BYTES = 512
MOST_ENTRIES = 1_000
"""Names of a folder among which that of a missing path may be."""
CHECKPOINTS = "checkpoints"
"""In the folder of a run: the folder of its checkpoints."""
CHECKPOINT_NAME = re.compile(r"step-(\d{10,})")
"""Names of the folders of checkpoints."""
NO_RUN = "no such run; `mmdata train CONFIG` makes one, the folder runs/NAME for NAME.yaml"
"""What a message says of a path where a run is expected and nothing is."""


class Kind(str, Enum):
    """What lies at a path, in words."""

    SHARDS = "a folder of shards"
    TARS = "a folder of tars"
    RUN = "the folder of a run"
    CHECKPOINTS = "a folder of checkpoints"
    FOLDER = "a folder"
    EMPTY = "an empty file"
    TAR = "a tar"
    TABLE = "a table"
    ZIP = "a zip"
    CHECKPOINT = "a checkpoint"
    WEIGHTS = "a file of weights"
    CONFIG = "a YAML file"
    PYTHON = "a Python file"
    JSON = "a JSON file"
    IMAGE = "an image"
    BINARY = "a binary file"
    TEXT = "a text file"
    ABSENT = "no file and no folder"

    @property
    def is_corpus(self) -> bool:
        """Whether it may hold samples, as shards or as images with captions."""
        return self in (Kind.SHARDS, Kind.TARS, Kind.TAR, Kind.TABLE, Kind.ZIP, Kind.FOLDER)


_BY_SUFFIX = {
    **dict.fromkeys((".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"), Kind.TABLE),
    **dict.fromkeys((".tar", ".tgz"), Kind.TAR),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".safetensors"), Kind.WEIGHTS),
    **dict.fromkeys((".yaml", ".yml"), Kind.CONFIG),
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"), Kind.IMAGE),
    **dict.fromkeys((".avif", ".heic", ".heif", ".jxl"), Kind.IMAGE),
    ".zip": Kind.ZIP,
    ".py": Kind.PYTHON,
    ".json": Kind.JSON,
}


def recognize(path: Path) -> Kind:
    """What lies at a path; never raises for a path that cannot be read."""
    try:
        if path.is_dir():
            return _recognize_folder(path)
        if not path.is_file():
            return Kind.ABSENT
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return Kind.ABSENT
    if not head:
        return Kind.EMPTY
    if head[257:262] == b"ustar":
        return Kind.TAR
    if path.suffix.lower() in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix.lower()]
    return Kind.BINARY if re.search(rb"[\0-\x08\x0e-\x1a]", head) else Kind.TEXT


def near(missing: str | Path) -> str:
    """The end of a message for a path where nothing is: "; did you mean 'shards/photos'?", or ""."""
    path = Path(missing)
    with suppress(OSError), os.scandir(path.parent) as entries:
        names = [entry.name for entry in islice(entries, MOST_ENTRIES) if not entry.name.startswith(".")]
        if (name := nearest(path.name, names)) is not None:
            return f"; did you mean '{path.with_name(name)}'?"
    return ""


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 if the first four bytes of a file say that its text is in one of them, else None."""
    if head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        return "UTF-32"
    has_mark = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    has_zeros = len(head) >= 4 and 0 in head[:2] and head[2:4] != b"\0\0"
    return "UTF-16" if has_mark or has_zeros else None


def find_run(path: Path) -> Path | None:
    """The folder of the run that a path is, or is a part of: its config.yaml, its checkpoints, a file of these."""
    for folder in (path, *path.parents[:3]):
        if (folder / "config.yaml").is_file() and recognize(folder) is Kind.RUN:
            return folder
    return None


def refuse_unfinished(folder: Path) -> None:
    """Raise DataError if a conversion into a folder, or into its `train` and `val`, has not ended."""
    for place in (folder, *(folder / part for part in PARTS)):
        if (place / PRIVATE_NAME).is_dir() and not (place / "__mmdata__/manifest.json").is_file():
            raise unfinished(str(folder))


def unfinished(folder: str) -> DataError:
    """The error of whoever opens a folder, by its path or URL, with a conversion that has not ended."""
    return DataError(
        f"folder '{folder}': a conversion into it was stopped or refused, or still runs; run the same `mmdata convert` "
        "command again: it continues where that ended, or says why nothing was published"
    )


def _recognize_folder(folder: Path) -> Kind:
    if (folder / "__mmdata__").is_dir() or (folder / "manifest.json").is_file():
        return Kind.SHARDS
    if (folder / CHECKPOINTS).is_dir() or (folder / "metrics.jsonl").is_file():
        return Kind.RUN
    if (folder / ".metadata").is_file() and (folder / "run.pt").is_file():
        return Kind.CHECKPOINT
    if any(folder.glob("step-*/run.pt")):
        return Kind.CHECKPOINTS
    return Kind.TARS if any(folder.glob("*.tar")) else Kind.FOLDER
