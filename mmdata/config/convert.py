"""Settings of a conversion. A recipe is a YAML file of these; the command line of `mmdata convert` replaces them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mmdata.config.settings import NOT_BOOLEAN, Location, Positive, Settings, Share, Template
from mmdata.config.strict_yaml import parse, read_yaml, with_overrides
from mmdata.errors import ConfigError, did_you_mean
from mmdata.files import shipped

RESERVED = frozenset({"captions", "caption", "label"})
"""Names in a sample's JSON with a meaning of their own."""
ALL = "*"
"""In `keep`: all columns of a table, or all keys of the JSON of a sample's files."""

TableFormat = Literal["csv", "tsv", "jsonl", "json", "parquet", "arrow"]
"""Formats of tables; a CSV may have any delimiter."""

TEXT_LENGTH = 77
"""Tokens of a text, as a trained tokenizer records it; CLIP's. `data.max_length` decides when texts are loaded."""

Grouping = Literal["image", "content", "none"]
"""Which rows become one sample with all their captions."""


def _delimiter(value: object) -> object:
    value = "\t" if value in ("tab", "\\t") else value
    if isinstance(value, str) and (len(value) != 1 or value in '"\r\n'):
        raise ValueError(f'must be one character, or "tab": got {value!r}')
    return value


def _encoding(name: str) -> str:
    try:
        "".encode(name)
    except LookupError as error:
        raise ValueError(f"no encoding {name!r} is known; usual ones are utf-8, latin-1, cp1252, utf-16") from error
    return name


def _contact(text: str) -> str:
    if not text.isascii() or not text.isprintable() or not text.strip() or set("()") & set(text):
        raise ValueError(f"must be a URL or a mail address, in ASCII and without parentheses: got {text!r}")
    return text


class ConvertConfig(Settings):
    """The settings of `mmdata convert`: keys of a recipe, and key=value after OUT. They say which rows become samples,
    and how samples are packed; none of them depends on the machine."""

    table: str | None = None
    """Table in SOURCE, or a pattern such as "part-*.parquet" for several. null: the one that is there."""
    split: str | None = None
    """Part of SOURCE to convert, where it has several. train takes train-*.parquet, the folder train/, or the rows
    whose column "split" says train."""
    format: TableFormat | None = None
    """Format of the tables. A CSV may have any delimiter. null: their names and first bytes tell it."""
    delimiter: Annotated[str, BeforeValidator(_delimiter)] | None = None
    """Character between the fields of a CSV, or tab. null: the one of , ; | and tab that splits the first lines into
    equal numbers of fields."""
    encoding: Annotated[str, AfterValidator(_encoding)] = "utf-8"
    """Encoding of text tables, such as latin-1 or utf-16."""
    columns: list[str] | None = None
    """Names of the columns of a CSV without a header line, as [image, caption]. null: its first line is the header."""
    images: str = "."
    """Folder that the table's paths are relative to, itself relative to SOURCE. Nothing above it is read. If the paths
    do not exist there, a folder beside the table in which they do is taken."""
    image_column: str | None = None
    """Column with paths or images, or in tars the extension of the image. null: the first of the usual names."""
    caption_columns: list[str] | None = None
    """Column with captions, or in tars a member or a key in JSON, as json:TEXT. A cell is a string or a list, also a
    list as text. null: the first of the usual names."""
    label_column: str | None = None
    """Column with class numbers or names, or in tars a member or a key in JSON; "" takes none. null: the first of the
    usual names, if any."""
    hash_column: str | None = None
    """Column with the MD5 or SHA-256 of each image's bytes. An image with another hash is left out. An empty cell is
    not compared."""
    blur_boxes: str | None = None
    """Column with boxes to blur in each image, such as DataComp's "face_bboxes". A cell is a list of [left, top, right,
    bottom], in shares of the width and height of the image as displayed, also as JSON text. A row with anything else is
    left out; an empty cell blurs nothing. Images with boxes are stored as JPEG."""
    contact: Annotated[str, AfterValidator(_contact)] | None = None
    """URL or mail address of who runs the conversion, which servers of images see in the User-Agent."""
    connections_per_host: Positive = 2
    """Images behind URLs that are fetched at once from one host. Use more only for a server of your own, or one whose
    owner agrees."""
    ignore_opt_outs: bool = False
    """Takes images behind URLs although their owners opted out, by robots.txt, X-Robots-Tag or TDMRep. The manifest
    says so."""
    allow_private_addresses: bool = False
    """Fetches images behind URLs from this machine and from private networks too."""
    caption_templates: list[Template] | None = None
    """Caption of samples that have a label and no caption, as "a photo of a {}."; {} becomes the name of the class. The
    name has spaces for underscores."""
    quotes: bool = True
    """Whether fields of a CSV or TSV may be quoted. false: quotation marks are text."""
    keep: tuple[str, ...] = ()
    """Further columns to store in each sample's JSON, as [id, score]. "path" is the image's path. "*" stands for all
    that are neither image, captions nor label; of files, for all keys of their JSON."""
    group_by: Grouping | None = None
    """Which rows become one sample with all their captions. image: those with the same path. content: those whose
    images are equal byte for byte; it reads those twice that may be equal. none: each row is a sample. null: content
    for a folder of images with captions, unless `keep_duplicates` is set; else image."""
    keep_duplicates: bool = False
    """Whether an image with the bytes of an earlier one is written again."""
    val_share: Annotated[float, Field(gt=0.0, lt=1.0), NOT_BOOLEAN] | None = None
    """Share of the images that goes into OUT/val; the others go into OUT/train. A hash of the image's bytes decides, so
    equal images are in one folder. null: one folder, OUT."""
    resize: Positive | None = None
    """Shorter side, in pixels, to which larger images are shrunk, as JPEG. The others stay byte for byte. null: all
    stay."""
    quality: Annotated[int, Field(strict=True, ge=1, le=100)] = 95
    """JPEG quality of images that are shrunk or blurred."""
    check: Literal["full", "header"] = "full"
    """What is read of an image that is stored unchanged. full: it is decoded, and damaged ones are left out. header:
    what follows the header is trusted (of a PNG, its checksums are compared), which is faster by far."""
    min_side: Positive = 2
    """Smallest height or width of an image, in pixels."""
    max_image_bytes: Positive = 268_435_456
    """Largest image file, in bytes."""
    max_bad_share: Share = 0.05
    """Largest share of rows that cannot be used; above it nothing is published. Duplicates and filtered rows do not
    count, nor do rows whose image could not be fetched from its URL."""
    max_unfetched_share: Share = 1.0
    """Largest share of rows whose image could not be fetched from its URL: no answer, an error, or no usable image."""
    shard_rows: Positive = 10_000
    """Largest number of samples in a shard."""
    shard_bytes: Positive = 1_000_000_000
    """Largest size of a shard in bytes, unless a single sample is larger."""
    tokenizer: Location | None = None
    """Tokenizer that counts caption lengths for the index: a folder, or a Hugging Face name."""
    train_tokenizer: Annotated[int, Field(strict=True, ge=300)] | None = None
    """Entries of a tokenizer to train on the captions, into OUT/tokenizer."""

    @property
    def largest_shares(self) -> tuple[float, float]:
        """The largest shares of rows that are bad, and of rows whose URL gave no image."""
        return self.max_bad_share, self.max_unfetched_share

    @model_validator(mode="after")
    def _check(self) -> ConvertConfig:
        if self.tokenizer and self.train_tokenizer:
            raise ValueError("give one of tokenizer and train_tokenizer, not both")
        if "quality" in self.model_fields_set and self.resize is None and self.blur_boxes is None:
            raise ValueError("quality is that of images that are shrunk or blurred: give resize or blur_boxes as well")
        if self.caption_columns == []:
            raise ValueError("caption_columns must name a column")
        if self.columns is not None and len(set(self.columns)) < max(2, len(self.columns)):
            raise ValueError("columns must name two or more different columns")
        taken = sorted(RESERVED.intersection(self.keep))
        if taken:
            raise ValueError(f"keep cannot hold {taken}: a sample's JSON uses these names itself")
        return self


def load_recipe(
    name: str | None, settings: dict[str, Any] | None = None, *, overrides: list[str] | None = None
) -> ConvertConfig:
    """Read a recipe.

    Args:
        name: a corpus of datasets/ ("emoji"), the path of a YAML file, or None for the defaults.
        settings: replace the recipe's.
        overrides: settings as "key=value", which replace both.

    Raises:
        ConfigError: no such recipe, an unknown key, a value out of range.
    """
    content = {**(read_yaml(_find(name)) if name else {}), **(settings or {})}
    origin = f"recipe '{name}'" if name else "settings"
    return parse(ConvertConfig, with_overrides(content, overrides or []), origin=origin, overrides=overrides)


def _find(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    known = sorted(found.parent.name for found in shipped("datasets").glob("*/recipe.yaml"))
    if name not in known:
        listed = f"datasets/ has only: {', '.join(known) or 'none'}{did_you_mean(name, known)}"
        raise ConfigError(f"recipe '{name}': no such file, and {listed}")
    return shipped("datasets", name, "recipe.yaml")
