"""Which settings belong to which kind of source. One that is given for another kind is an error, and never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from mmdata.config.convert import ConvertConfig
from mmdata.errors import ConfigError


class SourceKind(Enum):
    """Kinds of source; the value is the name for people."""

    DELIMITED = "a CSV or TSV table"
    JSON = "a JSON table"
    ARROW = "a Parquet or Arrow table"
    FOLDER = "a folder of images, read without a table"
    BOXES = "annotations of boxes"
    TARS = "WebDataset tars"
    ROWS = "rows of a program"


_TABLES = (SourceKind.DELIMITED, SourceKind.JSON, SourceKind.ARROW)
_ROWS = (*_TABLES, SourceKind.ROWS)
_BELONG: Mapping[str, tuple[SourceKind, ...]] = MappingProxyType(
    {
        "delimiter": (SourceKind.DELIMITED,),
        "quotes": (SourceKind.DELIMITED,),
        "columns": (SourceKind.DELIMITED,),
        "encoding": (SourceKind.DELIMITED, SourceKind.JSON),
        "table": (*_TABLES, SourceKind.FOLDER, SourceKind.TARS, SourceKind.BOXES),
        "format": _TABLES,
        "images": (*_ROWS, SourceKind.BOXES),
        "image_column": (*_ROWS, SourceKind.TARS),
        "caption_columns": (*_ROWS, SourceKind.TARS),
        "label_column": (*_ROWS, SourceKind.TARS),
        "hash_column": _ROWS,
        "blur_boxes": _TABLES,
        "contact": _ROWS,
        "connections_per_host": _ROWS,
        "ignore_opt_outs": _ROWS,
        "allow_private_addresses": _ROWS,
    }
)
"""Kinds of source of each setting that does not belong to all."""


def refuse_strangers(path: Path, config: ConvertConfig, kind: SourceKind) -> None:
    """Raise ConfigError if the settings hold one that does not belong to this kind of source."""
    wrong: dict[str, list[str]] = {}
    for name, kinds in _BELONG.items():
        if kind not in kinds and getattr(config, name) != ConvertConfig.model_fields[name].default:
            wrong.setdefault(_of(kinds), []).append(name)
    if not wrong:
        return
    said = "; ".join(f"{', '.join(names)} {purpose}" for purpose, names in wrong.items())
    advice = ", or give a table as the source" if kind is SourceKind.FOLDER else ""
    raise ConfigError(f"source '{path}': it is {kind.value}; {said}; leave out what is not for it{advice}")


def _of(kinds: tuple[SourceKind, ...]) -> str:
    """Says what settings are for, as "only for a CSV or TSV table"."""
    named = ["a table"] if set(_TABLES) <= set(kinds) else [one.value for one in kinds if one in _TABLES]
    return "only for " + " or ".join([*named, *(one.value for one in kinds if one not in _ROWS)])
