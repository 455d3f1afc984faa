"""Class names and templates of a zero-shot classification task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from mmdata.errors import DataError

CLASSES_EXAMPLE = '{"classes": ["dog", "cat"], "templates": ["a photo of a {}"]}'
"""What a file of classes holds, for messages."""


def _with_place(template: str) -> str:
    if "{}" not in template:
        raise ValueError(f"template '{template}' has no {{}} where the class name goes")
    return template


class Classes(BaseModel):
    """A classification task in words: what a file of classes holds. Label 0 is the first class."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: list[str] = Field(min_length=1)
    templates: list[Annotated[str, AfterValidator(_with_place)]] = Field(default=["{}"], min_length=1)


def read_classes(path: Path) -> Classes:
    """Read class names and templates.

    Raises:
        DataError: no such file, another format, or a template without {}.
    """
    if not path.is_file():
        raise DataError(f"classes '{path}': no such file; it is JSON such as {CLASSES_EXAMPLE}")
    try:
        return Classes.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise DataError(
            f"classes '{path}': {where}: {first['msg']}; expected JSON such as {CLASSES_EXAMPLE}"
        ) from error
