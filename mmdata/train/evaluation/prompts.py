"""Class names and templates of a zero-shot classification task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mmdata.errors import DataError

CLASSES_EXAMPLE = '{"classes": ["dog", "cat"], "templates": ["a photo of a {}"]}'
"""What a file of classes holds, for messages."""
SHIPPED = {"imagenet": Path(__file__).parent / "classes" / "imagenet.json"}
"""Files that have a name: OpenAI's names of ImageNet's 1,000 classes, and 80 templates (see LICENSE beside them)."""


def _with_place(template: str) -> str:
    if "{}" not in template:
        raise ValueError(f"template '{template}' has no {{}} where the class name goes")
    return template


def _shipped_templates(templates: object) -> object:
    if not isinstance(templates, str):
        return templates
    if templates not in SHIPPED:
        raise ValueError(f"'{templates}' is no shipped list ({', '.join(SHIPPED)}): write a list, [\"{templates}\"]")
    return read_classes(templates).templates


class Classes(BaseModel):
    """A classification task in words: what a file of classes holds. Label 0 is the first class."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: list[str] = Field(min_length=1)
    templates: Annotated[
        list[Annotated[str, AfterValidator(_with_place)]], Field(min_length=1), BeforeValidator(_shipped_templates)
    ] = ["{}"]

    @property
    def prompts(self) -> list[str]:
        """Each class in each template, class after class."""
        return [template.replace("{}", name) for name in self.classes for template in self.templates]


def read_classes(source: Path | str) -> Classes:
    """Read class names and templates.

    Args:
        source: the file, or "imagenet": the shipped one.

    Raises:
        DataError: no such file, another format, or a template without {}.
    """
    path = SHIPPED.get(str(source), Path(source))
    if not path.is_file():
        raise DataError(
            f"classes '{path}': no such file; it is JSON such as {CLASSES_EXAMPLE}; known by name: "
            f"{', '.join(SHIPPED)}; in Python a list of names will do"
        )
    try:
        return Classes.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise DataError(
            f"classes '{path}': {where}: {first['msg']}; expected JSON such as {CLASSES_EXAMPLE}"
        ) from error
