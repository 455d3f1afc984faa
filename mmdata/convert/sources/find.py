"""Tells files and folders of annotated images by what is in them, and opens them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.belonging import SourceKind, refuse_strangers
from mmdata.convert.sources.coco import CocoSource
from mmdata.convert.sources.files import folders_in, is_file, is_folder, names_in
from mmdata.convert.sources.json_stream import stream_entries
from mmdata.convert.sources.open_table import find_tables
from mmdata.convert.sources.rows import Source
from mmdata.convert.sources.tables import choose_part
from mmdata.errors import ConfigError, DataError

Form = Literal["boxes", "captions"]
"""COCO's."""

BESIDE_IMAGES = "_annotations.coco.json"
"""File in the folder of the images of each part, as Roboflow exports COCO's form."""
_COCO_NAME = re.compile(r"(captions|instances|person_keypoints)_(.+)\.json")
_COCO_ORDER = ("instances", "person_keypoints", "captions")
_COCO_KEYS = frozenset(("info", "licenses", "images", "categories", "type", "annotations"))


def open_annotated(path: Path, config: ConvertConfig) -> Source | None:
    """Open a corpus whose images have boxes; None for any other source.

    Args:
        path: a file of annotations, or a folder of COCO.
        config: `table` names files of one part in a folder, `split` a part.

    Raises:
        DataError: damaged files, or several parts and no `split`.
        ConfigError: no such part, settings that are not for such a source, or no captions.
    """
    if config.format is not None:  # whoever names a table's format has a table
        return None
    if not is_folder(path):
        return _open_files([path], config)
    if config.table is not None:
        return _open_files(find_tables(path, config.table), config)
    if parts := coco_parts(path):
        return _open_files(choose_part(path, parts, config.split), config.model_copy(update={"split": None}))
    return None


def _open_files(paths: Sequence[Path], config: ConvertConfig) -> Source | None:
    """Open files that hold boxes, several of COCO's form as one; None if none of them does, and they are tables."""
    forms = [_form_of(path) for path in paths]
    if "boxes" not in forms:
        return None
    if others := [path for path, form in zip(paths, forms, strict=True) if form not in ("boxes", "captions")]:
        raise ConfigError(
            f"table '{config.table}': '{others[0]}' has neither boxes nor captions of COCO's form, as others "
            "have; name those of one kind and one part, such as --table 'annotations/*_val2017.json'"
        )
    refuse_strangers(paths[0], config, SourceKind.BOXES)
    if config.split is not None:
        raise ConfigError(
            f"split '{config.split}': '{paths[0]}' is of one part; give the folder above annotations/ to choose a part"
        )
    return CocoSource(_in_order(paths), config)


def coco_parts(folder: Path) -> dict[str, list[Path]]:
    """The files of each part that has boxes: in a folder or its annotations/, or one in the folder of each part."""
    for place in (folder, folder / "annotations"):
        parts: dict[str, list[Path]] = {}
        named = (_COCO_NAME.fullmatch(name) for name in names_in(place))
        for kind, part in sorted((name[1], name[2]) for name in named if name):
            parts.setdefault(part, []).append(place / f"{kind}_{part}.json")
        # The name alone may be that of the text of an image: instances_1.json beside instances_1.jpg.
        if found := {part: paths for part, paths in sorted(parts.items()) if "boxes" in map(_form_of, paths[::-1])}:
            return found
    beside = [folder / BESIDE_IMAGES, *(folder / name / BESIDE_IMAGES for name in folders_in(folder))]
    return {path.parent.name: [path] for path in beside if is_file(path)}


def _in_order(paths: Sequence[Path]) -> list[Path]:
    """COCO's files, instances first: what they say of a box comes before what the others add."""

    def place(path: Path) -> int:
        name = _COCO_NAME.fullmatch(path.name)
        return _COCO_ORDER.index(name[1]) if name else 0

    return sorted(paths, key=place)


def _form_of(path: Path) -> Form | None:
    """What a file holds, from its first entries; None for a table, and for a file that is not JSON."""
    if path.suffix.lower() != ".json":
        return None
    try:
        for entry in stream_entries(path):
            if entry.key not in _COCO_KEYS:
                return None
            if not entry.number or entry.key not in ("images", "annotations"):
                continue
            value = cast("dict[str, Any]", entry.value if isinstance(entry.value, dict) else {})
            if entry.key == "annotations":
                return "captions" if "caption" in value else "boxes" if "bbox" in value else None
            if entry.number == 1 and ("id" not in value or "sentences" in value):  # a table, or Karpathy's
                return None
    except DataError:
        return None  # the reader of tables names what is wrong
    return None
