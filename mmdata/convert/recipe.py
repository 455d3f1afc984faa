"""Settings of a conversion. A recipe is a YAML file of these; flags of `mmdata convert` override it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from mmdata.config.settings import Location, Positive, Settings, Share
from mmdata.config.strict_yaml import parse, read_yaml
from mmdata.errors import ConfigError
from mmdata.shipped import shipped

RESERVED = frozenset({"captions", "caption", "label"})
"""Names that a sample's JSON already uses."""


class ConvertConfig(Settings):
    """What becomes a sample, and how samples are packed. Nothing here changes with the machine that runs it."""

    table: str | None = None
    """Table(s) of a corpus given as a folder, relative to it; a pattern such as "part-*.parquet" takes several."""
    images: str = "."
    """Folder the table's paths are relative to, itself relative to the corpus's folder; nothing above it is read."""
    image_column: str | None = None
    """Column with paths; None takes the first of the usual names."""
    caption_columns: list[str] | None = None
    """Columns with a caption, or a list of them, each; None takes the first of the usual names."""
    label_column: str | None = None
    """Column with class numbers or names; None takes one of the usual names where there is one, "" takes none."""
    quotes: bool = True
    """Whether fields of a CSV or TSV may be quoted; False reads every quotation mark as text."""
    keep: tuple[str, ...] = ()
    """Further columns to store in each sample's JSON; "path" is the image's path."""
    keep_duplicates: bool = False
    """Whether images whose bytes were seen before are written again."""
    resize: Positive | None = None
    """Shorter side, in pixels, to which larger images are shrunk and encoded as JPEG; None stores all as they are."""
    quality: Annotated[int, Field(strict=True, ge=1, le=100)] = 95
    """JPEG quality of the images that are shrunk."""
    min_side: Positive = 2
    """Smallest height or width, in pixels."""
    max_aspect: Annotated[float, Field(ge=1.0)] = 20.0
    """Largest ratio of the longer to the shorter side."""
    max_pixels: Positive = 178_956_970
    """Most pixels an image may have; more are refused from its header."""
    max_image_bytes: Positive = 268_435_456
    """Largest image file."""
    max_bad_share: Share = 0.05
    """Nothing is published when more than this share of the rows is quarantined (duplicates are not counted)."""
    shard_rows: Positive = 10_000
    """Most samples of a shard."""
    shard_bytes: Positive = 1_000_000_000
    """Most bytes of a shard, unless a single sample is larger."""
    tokenizer: Location | None = None
    """Tokenizer that counts caption lengths for the index: a folder, or a Hugging Face name."""
    train_tokenizer: Annotated[int, Field(strict=True, ge=300)] | None = None
    """Entries of a tokenizer to train on the corpus's captions, into the output's folder "tokenizer"."""
    max_length: Positive = 77
    """Text length in tokens that a trained tokenizer records."""

    @model_validator(mode="after")
    def _check(self) -> ConvertConfig:
        if self.tokenizer and self.train_tokenizer:
            raise ValueError("give one of tokenizer and train_tokenizer, not both")
        if "quality" in self.model_fields_set and self.resize is None:
            raise ValueError("quality is that of images that are shrunk: give resize as well")
        if self.caption_columns == []:
            raise ValueError("caption_columns must name a column")
        taken = sorted(RESERVED.intersection(self.keep))
        if taken:
            raise ValueError(f"keep cannot hold {taken}: a sample's JSON uses these names itself")
        return self


def load_recipe(name: str | None, overrides: dict[str, Any] | None = None) -> ConvertConfig:
    """Read a recipe.

    Args:
        name: a corpus of datasets/ ("emoji"), the path of a YAML file, or None for the defaults.
        overrides: settings that replace the recipe's.

    Raises:
        ConfigError: no such recipe, an unknown key, a value out of range.
    """
    content = read_yaml(_find(name)) if name else {}
    return parse(ConvertConfig, {**content, **(overrides or {})}, origin=f"recipe '{name}'" if name else "settings")


def _find(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    known = sorted(found.parent.name for found in shipped("datasets").glob("*/recipe.yaml"))
    if name not in known:
        raise ConfigError(f"recipe '{name}': no such file, and datasets/ has only: {', '.join(known) or 'none'}")
    return shipped("datasets", name, "recipe.yaml")
