"""Which settings belong to which kind of source. One that is given for another kind is an error, and never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from mmdata.convert.recipe import ConvertConfig
from mmdata.errors import ConfigError


class Kind(Enum):
    """Kinds of source; the value is the name for people."""

    DELIMITED = "a CSV or TSV table"
    JSON = "a JSON table"
    ARROW = "a Parquet or Arrow table"
    FOLDER = "a folder of images, read without a table"
    BOXES = "annotations of boxes"
    TARS = "WebDataset tars"
    ROWS = "rows of a program"


_TABLES = (Kind.DELIMITED, Kind.JSON, Kind.ARROW)
_ROWS = (*_TABLES, Kind.ROWS)
_BELONG: Mapping[str, tuple[Kind, ...]] = MappingProxyType(
    {
        "delimiter": (Kind.DELIMITED,),
        "quotes": (Kind.DELIMITED,),
        "columns": (Kind.DELIMITED,),
        "encoding": (Kind.DELIMITED, Kind.JSON),
        "table": (*_TABLES, Kind.FOLDER, Kind.TARS, Kind.BOXES),
        "format": _TABLES,
        "images": (*_ROWS, Kind.BOXES),
        "image_column": (*_ROWS, Kind.TARS),
        "caption_columns": (*_ROWS, Kind.TARS),
        "label_column": (*_ROWS, Kind.TARS),
        "hash_column": _ROWS,
        "blur_boxes": _TABLES,
        "contact": _ROWS,
        "connections": _ROWS,
        "connections_per_host": _ROWS,
        "ignore_opt_outs": _ROWS,
        "allow_private_addresses": _ROWS,
    }
)
"""Kinds of source of each setting that does not belong to all."""
_FLAGS: Mapping[str, str] = MappingProxyType({"quotes": "no-quotes", "caption_columns": "caption-column"})
"""Flags that are not called as their setting is."""


def refuse_strangers(path: Path, config: ConvertConfig, kind: Kind) -> None:
    """Raise ConfigError if the settings hold one that does not belong to this kind of source."""
    wrong: dict[str, list[str]] = {}
    for name, kinds in _BELONG.items():
        if kind not in kinds and getattr(config, name) != ConvertConfig.model_fields[name].default:
            wrong.setdefault(_of(kinds), []).append("--" + _FLAGS.get(name, name).replace("_", "-"))
    if not wrong:
        return
    said = "; ".join(f"{', '.join(flags)} {purpose}" for purpose, flags in wrong.items())
    advice = ", or give a table as the source" if kind is Kind.FOLDER else ""
    raise ConfigError(f"source '{path}': it is {kind.value}; {said}; leave out what is not for it{advice}")


def _of(kinds: tuple[Kind, ...]) -> str:
    """Says what flags are for, as "only for a CSV or TSV table"."""
    named = ["a table"] if set(_TABLES) <= set(kinds) else [one.value for one in kinds if one in _TABLES]
    return "only for " + " or ".join([*named, *(one.value for one in kinds if one not in _ROWS)])
