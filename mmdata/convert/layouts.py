"""What a folder of a corpus is: Hugging Face's Parquet files or imagefolder, and its parts (train, validation, …)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mmdata.convert.folder import IMAGE_SUFFIXES
from mmdata.convert.tables import choose_part

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Names of the table of an imagefolder; its paths are relative to the folder that it is in."""


def find_tables_of_folder(folder: Path, split: str | None) -> list[Path]:
    """The tables of an imagefolder, or of a folder of Parquet files as the Hugging Face hub has them; else none.

    Raises:
        DataError: there are several parts, and `split` is None or none of them.
    """
    for name in METADATA:
        if (folder / name).is_file():
            return [folder / name]
    listing = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    parts = {
        name: [folder / name / table] for name in listing for table in METADATA if (folder / name / table).is_file()
    }
    if parts:
        return choose_part(folder, parts, split)
    if any(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in listing):
        return []
    found: dict[str, list[Path]] = {}
    for depth in ("*.parquet", "*/*.parquet", "*/*/*.parquet"):
        for path in sorted(folder.glob(depth)):
            found.setdefault(_part_of(path.relative_to(folder)), []).append(path)
    return choose_part(folder, found, split) if found else []


def _part_of(path: Path) -> str:
    """The part that a Parquet file belongs to.

    data/train-00000-of-00002.parquet and default/train/0000.parquet are of "train" and "default/train".
    """
    folders = [folder for folder in path.parts[:-1] if folder != "data"]
    if numbered := re.fullmatch(r"(.+?)-\d+-of-\d+(-.*)?", path.stem):
        return "/".join([*folders, numbered[1]])
    if re.fullmatch(r"(part-?)?\d+.*", path.stem):
        return "/".join(folders) or "all"
    return "/".join([*folders, path.stem])
