"""What a folder of a corpus is, and its parts (train, validation, …).

Hugging Face's forms are known: Parquet files of the hub, an imagefolder, a dataset that `save_to_disk` wrote.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePath

from mmdata.convert.sources.files import PARTS, corpus_folder, folders_in, is_file, is_folder, names_in
from mmdata.convert.sources.find import coco_parts
from mmdata.convert.sources.folder import IMAGE_SUFFIXES
from mmdata.convert.sources.tables import choose_part
from mmdata.errors import DataError

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Names of the table of an imagefolder; its paths are relative to the folder that it is in."""
STATE, PARTS_OF_DICT = "state.json", "dataset_dict.json"
"""Files in a Dataset and in a DatasetDict that `datasets` wrote with `save_to_disk`."""


def find_tables_of_folder(folder: Path, split: str | None) -> list[Path]:
    """The tables of an imagefolder, of a dataset on disk, or of a folder of Parquet files as of the hub; else none.

    Raises:
        DataError: there are several parts, and `split` is None or none of them.
    """
    for name in METADATA:
        if is_file(folder / name):
            return [folder / name]
    parts = _parts_of_tables(folder)
    tables = choose_part(folder, parts, split) if parts else []
    if parts and not tables:
        raise DataError(f"dataset '{folder}': its part '{split or next(iter(parts))}' has no rows; the corpus is empty")
    return tables


def find_parts(folder: Path) -> list[str]:
    """Names of the parts of a folder that `split` chooses from; none of a file, and of a folder that is one part."""
    folder = corpus_folder(folder)
    if not is_folder(folder) or any(is_file(folder / name) for name in METADATA):
        return []
    names = [name for name in names_in(folder) if name.lower() in PARTS and is_folder(folder / name)]
    return list(coco_parts(folder)) or list(_parts_of_tables(folder)) or names


def _parts_of_tables(folder: Path) -> dict[str, list[Path]]:
    """The tables of each part of an imagefolder, of a dataset on disk or of a folder as of the hub; else empty."""
    if saved := _saved_parts(folder):
        return saved
    listing = [name for name in names_in(folder) if not name.startswith(".")]
    below = [name for name in folders_in(folder) if not name.startswith(".")]
    parts = {name: [folder / name / table] for name in below for table in METADATA if is_file(folder / name / table)}
    if parts:
        return parts
    if any(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in listing):
        return {}
    found: dict[str, list[Path]] = {}
    for depth in ("*.parquet", "*/*.parquet", "*/*/*.parquet"):
        for path in sorted(folder.glob(depth)):
            found.setdefault(part_of(path.relative_to(folder)), []).append(path)
    return found


def _saved_parts(folder: Path) -> dict[str, list[Path]]:
    """The Arrow files of each part of a Dataset or DatasetDict on disk; empty for other folders."""
    try:
        if (folder / PARTS_OF_DICT).is_file():
            names = json.loads((folder / PARTS_OF_DICT).read_bytes())["splits"]
            return {name: _arrow_files(folder / name)[1] for name in names}
        if (folder / STATE).is_file() and any(folder.glob("*.arrow")):
            return dict([_arrow_files(folder)])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"dataset '{folder}': not whole, as save_to_disk writes it ({type(error).__name__}: {error}); write it "
            'again, or as Parquet with to_parquet("train.parquet")'
        ) from error
    return {}


def _arrow_files(folder: Path) -> tuple[str, list[Path]]:
    """Name and files of a Dataset on disk. The caches of `map` lie in its folder too, and state.json lists none."""
    state = json.loads((folder / STATE).read_bytes())
    return state["_split"] or "all", [folder / os.path.basename(file["filename"]) for file in state["_data_files"]]


def part_of(path: PurePath) -> str:
    """The part that a Parquet file belongs to.

    data/train-00000-of-00002.parquet and default/train/0000.parquet are of "train" and "default/train".
    """
    folders = [folder for folder in path.parts[:-1] if folder != "data"]
    if numbered := re.fullmatch(r"(.+?)-\d+-of-\d+(-.*)?", path.stem):
        return "/".join([*folders, numbered[1]])
    if re.fullmatch(r"(part-?)?\d+.*", path.stem):
        return "/".join(folders) or "all"
    return "/".join([*folders, path.stem])
