"""Opens a source of rows: a table of paths and captions, a folder of images and caption files, or tars.

What a file or folder holds decides, and not its name alone. A folder may have parts (train, validation, …). Known are
COCO's annotations, and Hugging Face's forms: Parquet files of the hub, an imagefolder, and what `save_to_disk` wrote.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, cast

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.coco import CAPTIONS, IMAGE, KEY, SEGMENTATION, CocoTable
from mmdata.convert.sources.files import (
    PARTS,
    check_file,
    corpus_folder,
    exists,
    folders_in,
    is_file,
    is_folder,
    names_in,
)
from mmdata.convert.sources.folder import IMAGE_SUFFIXES, FolderSource, NeedsTable, tables_beside
from mmdata.convert.sources.json_tables import stream_entries
from mmdata.convert.sources.open_table import find_tables, fingerprint
from mmdata.convert.sources.rows import Source, SourceKind, refuse_strangers
from mmdata.convert.sources.table_source import TableSource
from mmdata.convert.sources.tables import COMPRESSED_SUFFIXES, choose_part
from mmdata.convert.sources.tars import PackedSource, is_packed
from mmdata.errors import ConfigError, DataError
from mmdata.recognize import refuse_unfinished

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Names of the table of an imagefolder; its paths are relative to the folder that it is in."""
STATE, PARTS_OF_DICT = "state.json", "dataset_dict.json"
"""Files in a Dataset and in a DatasetDict that `datasets` wrote with `save_to_disk`."""
BESIDE_IMAGES = "_annotations.coco.json"
"""File in the folder of the images of each part, as Roboflow exports COCO's form."""
_COCO_NAME = re.compile(r"(captions|instances|person_keypoints)_(.+)\.json")
_COCO_KEYS = frozenset(("info", "licenses", "images", "categories", "type", "annotations"))


def open_source(path: Path, config: ConvertConfig) -> Source:
    """Open a corpus: a table, a folder or a .zip of images, a folder of Parquet files, a tar, or a folder of tars.

    Args:
        path: the folder, or the file.
        config: the settings about tables, columns and parts are used.

    Raises:
        DataError: no such path, an unreadable table, a damaged tar, an empty corpus, several parts and no `split`.
        ConfigError: no such column, or a setting that does not belong to this kind of source.
    """
    if not exists(path):
        raise DataError(f"source '{path}': no such file or folder")
    path = corpus_folder(path)
    if not is_folder(path):
        check_file(path, "source")
    refuse_unfinished(path)
    if config.table is not None and is_file(path) and not path.match(config.table):
        raise ConfigError(f"table '{config.table}': '{path}' is a file itself; give its folder, or leave --table out")
    if config.table is None and is_packed(path):
        refuse_strangers(path, config, SourceKind.TARS)
        if config.split is not None:
            raise ConfigError(f"split '{config.split}': '{path}' holds tars, all of one part; give those of the part")
        return PackedSource(path, config)
    if not is_folder(path):
        return _open_tables(path.parent, [path], config)
    if config.table is not None:
        return _open_tables(path, find_tables(path, config.table), config)
    return _open_folder(path, config)


def _open_folder(path: Path, config: ConvertConfig) -> Source:
    of_part = config.model_copy(update={"split": None})
    parts = coco_parts(path) if config.format is None else {}
    if parts and (coco := open_coco(choose_part(path, parts, config.split), of_part)):
        return coco
    if tables := find_tables_of_folder(path, config.split):
        folder = tables[0].parent if tables[0].name in METADATA else path
        return TableSource.open(folder, tables, of_part)
    tables = tables_beside(os.fspath(path))
    if config.split is not None and config.split not in folders_in(path) and len(tables) == 1:
        return _open_tables((path / tables[0]).parent, [path / tables[0]], config)
    try:
        source = FolderSource(path, config)
    except NeedsTable as error:
        return _only_table(path, error, config)
    refuse_strangers(path, config, SourceKind.FOLDER)
    return source


def _open_tables(folder: Path, paths: Sequence[Path], config: ConvertConfig) -> Source:
    """Open tables, or files of COCO's form; whoever names a format has a table."""
    coco = open_coco(paths, config) if config.format is None else None
    return coco or TableSource.open(folder, paths, config)


def _only_table(path: Path, error: NeedsTable, config: ConvertConfig) -> Source:
    """The table in a folder whose images have no captions; raises `error` if the folder has several tables."""
    if len(error.tables) > 1:
        raise error
    (table,) = error.tables
    try:
        return _open_tables(table.parent, [table], config.model_copy(update={"split": None}))
    except (ConfigError, DataError) as unusable:
        raise type(unusable)(f"source '{path}' was read by its only table: {unusable}") from unusable


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


def open_coco(paths: Sequence[Path], config: ConvertConfig) -> TableSource | None:
    """Open files of COCO's form as one; None if none of them is, and they are tables.

    Raises:
        DataError: a damaged file.
        ConfigError: only some are of COCO's form, or a setting that is not for it.
    """
    others = [path for path in paths if not _is_coco(path)]
    if len(others) == len(paths):
        return None
    if others:
        raise ConfigError(
            f"table '{config.table}': '{others[0]}' has neither boxes nor captions of COCO's form, as others "
            "have; name those of one kind and one part, such as --table 'annotations/*_val2017.json'"
        )
    refuse_strangers(paths[0], config, SourceKind.BOXES)
    if config.split is not None:
        raise ConfigError(
            f"split '{config.split}': '{paths[0]}' is of one part; give the folder above annotations/ to choose a part"
        )
    paths = sorted(paths, key=lambda path: path.name.startswith("captions"))  # the place of a row is that of its boxes
    table = CocoTable(paths, config)
    keep = [name for name in config.keep if name != SEGMENTATION]
    columns: dict[str, Any] = {"image_column": IMAGE, "caption_columns": [CAPTIONS], "label_column": ""}
    of_table = config.model_copy(update={**columns, "keep": (*([KEY] if table.has_boxes else ()), *keep)})
    return TableSource(paths[0].parent, [table], [fingerprint(path) for path in paths], of_table)


def coco_parts(folder: Path) -> dict[str, list[Path]]:
    """The files of each part: in a folder or its annotations/, or one in the folder of each part."""
    for place in (folder, folder / "annotations"):
        parts: dict[str, list[Path]] = {}
        named = (_COCO_NAME.fullmatch(name) for name in names_in(place))
        for kind, part in sorted((name[1], name[2]) for name in named if name):
            parts.setdefault(part, []).append(place / f"{kind}_{part}.json")
        # The name alone may be that of the text of an image: instances_1.json beside instances_1.jpg.
        if found := {part: paths for part, paths in sorted(parts.items()) if any(map(_is_coco, paths))}:
            return found
    beside = [folder / BESIDE_IMAGES, *(folder / name / BESIDE_IMAGES for name in folders_in(folder))]
    return {path.parent.name: [path] for path in beside if is_file(path)}


def _is_coco(path: Path) -> bool:
    """Whether the first annotation in a file is a box or a caption of COCO's form; False for what is not JSON."""
    if not path.name.lower().endswith((".json", *(f".json{end}" for end in COMPRESSED_SUFFIXES))):
        return False
    knows_key = False
    try:
        for entry in stream_entries(path):
            knows_key = knows_key or entry.key in _COCO_KEYS
            value = cast("dict[str, Any]", entry.value if isinstance(entry.value, dict) else {})
            is_table = entry.key == "images" and entry.number == 1 and ("id" not in value or "sentences" in value)
            if is_table or not knows_key:
                return False
            if entry.key == "annotations" and entry.number:
                if "caption" in value and "image_id" in value:
                    return "url" not in value  # RedCaps names the image in each entry: a table
                return "bbox" in value
    except DataError:
        return False  # the reader of tables names what is wrong
    return False
