"""Which rows there are: shards, tables that are joined to them, and what selects among them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from mmdata.config.settings import NOT_BOOLEAN, Location, MayChange, Positive, Settings

FILES = (".npy", ".txt", ".parquet", ".csv", ".tsv")
"""Ends of the names of files that select rows; anything else is a condition."""


class JoinConfig(Settings):
    """A table, or tars in another folder, that are joined to the rows of the index by key."""

    table: MayChange[
        Location
        | Annotated[list[Location], Field(min_length=1)]
        | Annotated[dict[Location, Location | list[Location]], Field(min_length=1)]
        | None
    ] = None
    """File of the table, or a pattern, or several: .parquet, .csv or .tsv. Its rows may have any order. Of a mixture
    whose datasets have equal keys, a table for each: {FOLDER: FILE}, with the folders as in `data.shards`; `missing` is
    about their rows then, and rows of other datasets have no values. Give this or `shards`."""
    shards: MayChange[Location | None] = None
    """Folder of tars whose members `fields` names, indexed by `mmdata index FOLDER`; they need no images. Its
    samples may have any order."""
    name: Annotated[str, Field(pattern=r"^[\w-]+$")] | None = None
    """Name of the tars of `shards` in `fields`: `join:NAME:json:KEY`."""
    key: str | None = None
    """Column of the table that holds the keys of samples; null: key, or uid. With `shards`, the column of a joined
    table that holds the key of each row in those tars; null: the keys of the rows themselves."""
    missing: Literal["keep", "mask", "error"] = "keep"
    """What happens to a row of the index that the table or the tars do not have. keep: it has no values. mask: it is
    not loaded. error: an error."""

    @model_validator(mode="after")
    def _one_kind(self) -> JoinConfig:
        if (self.table is None) == (self.shards is None):
            raise ValueError("give either table (a file of columns) or shards (a folder of tars)")
        if (self.shards is None) != (self.name is None):
            raise ValueError(
                "shards have a name, by which data.fields calls them (join:NAME:npy), and tables have none"
            )
        return self


class SourceConfig(Settings):
    """One dataset of a mixture: all have a weight, or all have a repeat."""

    shards: MayChange[Location]
    """Folder or URL of the dataset's shards, as for `data.shards`."""
    weight: Positive | None = None
    """Share of every batch, exact to the row: 3 and 1 put three rows of the first dataset beside each row of the
    second. An epoch is one pass over the first dataset; the other datasets are cycled."""
    repeat: Annotated[float, Field(gt=0.0, le=1000.0), NOT_BOOLEAN] | None = None
    """Passes over the dataset per epoch; null: one. 2 uses each row twice; 0.5 uses half of the rows, and the other
    half in the next epoch."""
    select: str | None = None
    """Rows of this dataset that are used, as for `data.select`, which holds too."""


class ValConfig(Settings):
    """What a run is evaluated on: other shards, or a share of the rows of `data.shards`. Without either, nothing is
    evaluated."""

    shards: MayChange[Location | None] = None
    """Folder or URL with shards to evaluate on, with the same tokenizer and image size."""
    share: Annotated[float, Field(gt=0.0, lt=1.0), NOT_BOOLEAN] | None = None
    """Share of the rows of `data.shards`, 0.01 for 1 %, that is kept from training and evaluated on. The hash of the
    row's image decides, so equal images are on one side, and a row stays on its side when the shards are written or
    indexed anew."""

    select: str | None = None
    """Rows of `shards` that are evaluated on, as `data.select` chooses those of `data.shards`; null: all of them."""
    classes: MayChange[Location | None] = None
    """Class names and templates for zero-shot accuracy in each evaluation, where rows have labels: a JSON file (see
    docs/train.md), `imagenet` for its 1,000 class names and 80 templates, or `shards` for the names in the shards.
    null: none while training, and in `mmdata evaluate` the names in the shards."""

    @model_validator(mode="after")
    def _one_kind(self) -> ValConfig:
        if self.shards is not None and self.share is not None:
            raise ValueError(f"shards ('{self.shards}') and share ({self.share:g}) exclude each other: give one")
        if self.select is not None and self.shards is None:
            raise ValueError(
                "select chooses rows of val.shards, which is not set; data.select chooses those of a share"
            )
        if self.classes is not None and not self:
            raise ValueError("classes are those of the rows of val.shards or val.share: set one of them")
        return self

    def __bool__(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.shards is not None or self.share is not None


class CorpusConfig(Settings):
    """Which rows there are."""

    shards: MayChange[Location | Annotated[list[SourceConfig], Field(min_length=1)]]
    """Folder or URL of the training shards, as `mmdata convert` or `mmdata index` leaves it. Or a list of several such
    datasets, each with a weight or a repeat."""
    val: ValConfig = ValConfig()
    """What the run is evaluated on: {shards: FOLDER} or {share: 0.01}."""
    split: Literal["train", "val"] = "train"
    """With `val.share`, the part of the rows that is loaded: train (all other rows) or val. This alone does not make an
    evaluation, which has no dropout, weights or shuffling: `mmdata.config.evaluation_data` gives its settings."""
    select: str | None = None
    """Rows that are used; no shard is rewritten. A condition on the index, such as `width >= 256 and height >= 256`, or
    a file of keys (.txt, .parquet, .csv, .tsv), or a mask or DataComp's uids (.npy); null: all rows. See
    docs/index.md. When a run is resumed, only the place of the file may change."""
    join: list[JoinConfig] = Field(default_factory=list)
    """Tables whose columns are joined to the rows by key, such as the scores of a filter; `select` and `fields` name
    the columns. Also tars in other folders, whose members `fields` names."""
    members: dict[Literal["image", "caption", "label"], str] = Field(default_factory=dict)
    """Which members of a sample a stream takes, such as {caption: "json:TEXT", label: cls}: an extension, or a JSON
    member and a key in it. Of several, separated by commas, the first that a sample can use is taken. Shards with an
    index: `mmdata index --image … --caption … --label …`, which the index keeps."""

    @field_validator("val", mode="before")
    @classmethod
    def _nothing(cls, val: object) -> object:
        return {} if val is None else val  # data.val=null on the command line turns evaluations off

    @model_validator(mode="after")
    def _check_corpus(self) -> CorpusConfig:
        if self.split == "val" and self.val.share is None:
            where = f"; to load '{self.val.shards}', set shards to it" if self.val.shards else ""
            raise ValueError(f"split val is a share of the rows, and val.share is not set{where}")
        mixed = self.shards if isinstance(self.shards, list) else []
        given = {source.weight is not None for source in mixed}
        if len(given) > 1 or (True in given and any(source.repeat is not None for source in mixed)):
            raise ValueError("shards: give each dataset a weight and none a repeat, or none of them a weight")
        return self


def sources(data: CorpusConfig) -> list[SourceConfig]:
    """The datasets of `data.shards`, one or several: all of them with a weight, or all with a repeat.

    Where neither is given, and for a dataset that is alone, it is `repeat` 1: the rows of all, each once an epoch.
    """
    listed = data.shards if isinstance(data.shards, list) else [SourceConfig(shards=data.shards)]
    if len(listed) > 1 and listed[0].weight is not None:
        return listed
    return [source.model_copy(update={"weight": None, "repeat": source.repeat or 1.0}) for source in listed]


def val_in_words(data: CorpusConfig) -> str:
    """What `data.val` names: "shards/val", or "shards/train (data.val.share 0.01)"."""
    if data.val.share is None:
        return data.val.shards or "nothing"
    return f"{', '.join(source.shards for source in sources(data))} (data.val.share {data.val.share:g})"
