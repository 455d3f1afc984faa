"""Settings of the section data: which datasets, in which batches, how they are loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    field_validator,
    model_validator,
)

from mmdata.config.callables import by_name, name_of
from mmdata.config.loading import LoadingConfig
from mmdata.config.settings import BelowOne, Integer, Location, MayChange, Positive, Settings, Share, Side
from mmdata.errors import ConfigError
from mmdata.safe_read import path_of_url


def _template(text: str) -> str:
    if text.count("{}") != 1:
        raise ValueError(f"must hold {{}} once, where the caption stands: got {text!r}")
    if set("{}") & set(text.replace("{}", "")):
        raise ValueError(f"holds braces beside {{}}, which nothing fills in: got {text!r}; data.text_transform can")
    return text


class SelectFile(Settings):
    """A file of keys, a mask or row numbers."""

    file: MayChange[Location]
    """Text (a key a line), .parquet, .csv or .tsv with a column of keys, or .npy: bool (rows,), row numbers, or
    DataComp's uids (u8,u8)."""
    column: str | None = None
    """Column of the table that holds the keys; null: key, or uid."""


def _select(value: object) -> object:
    if value is None or isinstance(value, (str, dict, SelectFile)):
        return value
    raise ValueError(
        "expected a condition (width >= 64), a file of keys or rows (good.txt, rows.npy), or "
        f"{{file: good.parquet, column: id}}; got {value!r}"
    )


# All is checked before: the errors of a union name its types.
Select = Annotated[str | SelectFile | None, BeforeValidator(_select)]


class JoinConfig(Settings):
    """A table, or tars in another folder, that come to the rows of the index by key."""

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
    """What becomes of a row of the index that the table or the tars do not have. keep: it has no values. mask: it is
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
    repeat: Annotated[float, Field(gt=0.0, le=1000.0)] | None = None
    """Passes over the dataset per epoch; null: one. 2 uses each row twice; 0.5 uses half of the rows, and the other
    half in the next epoch."""
    select: Select = None
    """Rows of this dataset that are used, as for `data.select`, which holds too."""

    @field_validator("weight", mode="before")
    @classmethod
    def _whole(cls, weight: object) -> object:
        if isinstance(weight, float):
            raise ValueError(f"weights are whole numbers, as 7 and 3 for 70 % and 30 % of a batch: got {weight}")
        return weight


class GroupsConfig(Settings):
    """Rows that stand together in a batch: `size` rows of one group, or a row and `candidates` others of its group."""

    source: Location = "label"
    """What makes rows a group. label: rows with the same label. Or a .npy file, of `mmdata neighbours` or your own:
    int64 (rows,) with the group of each row of the index, -1 for rows without a group. run: near neighbours among the
    features that the run itself computes, from `every_epochs` on; only in `mmdata train`, and needs
    `train.feature_cache`, `train.steps` and `size`."""
    size: Annotated[int, Field(strict=True, ge=2)] | None = None
    """Rows of one group that stand together in a batch; each row comes once an epoch. Give this or `candidates`."""
    candidates: Positive | None = None
    """Rows of its group that follow each row in its batch, drawn anew in each epoch; each row comes once an epoch by
    itself. Give this or `size`."""
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the rows of each batch that stand in groups of `size`; the others stand alone, as without groups. Which
    groups stand together is drawn anew in each epoch. 0.5: half groups, half single rows; 1: as many as there are."""

    max_similarity: Annotated[float, Field(gt=-1.0, lt=1.0)] | None = None
    """For the source run: rows whose features have a larger cosine stand in no group together, since they may mean the
    same. null: however similar they are."""
    every_epochs: Positive = 1
    """For the source run: number of epochs between two searches for neighbours. Before the first one no row has a
    group."""

    @model_validator(mode="after")
    def _one_kind(self) -> GroupsConfig:
        if self.source == "run" and self.size is None:
            raise ValueError("source 'run' needs a size: how many near neighbours stand together")
        of_run = {"every_epochs": self.every_epochs != 1, "max_similarity": self.max_similarity is not None}
        if self.source != "run" and (given := [name for name, is_given in of_run.items() if is_given]):
            raise ValueError(f"{given[0]} belongs to source 'run', and source is '{self.source}': leave it out")
        if self.candidates is not None and self.share < 1:
            raise ValueError("share needs groups of a size: candidates follow every row")
        if (self.size is None) == (self.candidates is None):
            raise ValueError(
                "give either size (rows of a group together) or candidates (a row and others of its group)"
            )
        return self


class MembersConfig(Settings):
    """Members of a sample: an extension (jpg, caption.txt), or a JSON member and a key in it (json:TEXT).

    Of several, separated by commas, the first that a sample can use is taken."""

    image: str | None = None
    """Extension of the image; default: the first member that is an image."""
    caption: str | None = None
    """Member with the caption; default: json:captions, txt, json:caption."""
    label: str | None = None
    """Member with the label; default: cls, json:label."""


class AugmentConfig(Settings):
    """Random changes of a training crop, each row's its own in each epoch; all are off unless set."""

    horizontal_flip_prob: Share = 0.0
    """Probability that a crop is mirrored left to right. Captions that say left or right, and writing in images, are
    wrong after a flip."""
    brightness: Annotated[float, Field(ge=0.0)] = 0.0
    """Strength of the change of brightness: a factor between 1 - brightness (at least 0) and 1 + brightness, as in
    torchvision's ColorJitter."""
    contrast: Annotated[float, Field(ge=0.0)] = 0.0
    """Strength of the change of contrast: a factor between 1 - contrast (at least 0) and 1 + contrast."""
    saturation: Annotated[float, Field(ge=0.0)] = 0.0
    """Strength of the change of saturation: a factor between 1 - saturation (at least 0) and 1 + saturation."""
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """Largest turn of the hue, in either direction, as a share of the whole colour circle."""
    color_jitter_prob: Share = 1.0
    """Probability that brightness, contrast, saturation and hue are changed at all; they change in random order."""
    grayscale_prob: Share = 0.0
    """Probability that the colours become grey, after the other changes."""


class ValConfig(Settings):
    """What a run is evaluated on: other shards, or a share of the rows of `data.shards`. Neither: nothing."""

    shards: MayChange[Location | None] = None
    """Folder or URL with shards to evaluate on, with the same tokenizer and image size."""
    share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the rows of `data.shards`, 0.01 for 1 %, that is kept from training and evaluated on. The hash of the
    row's image decides, so equal images are on one side, and a row stays on its side when the shards are written or
    indexed anew."""

    select: Select = None
    """Rows of `shards` that are evaluated on, as `data.select` chooses those of `data.shards`; null: all of them."""

    @model_validator(mode="after")
    def _one_kind(self) -> ValConfig:
        if self.shards is not None and self.share is not None:
            raise ValueError(f"shards ('{self.shards}') and share ({self.share:g}) exclude each other: give one")
        if self.select is not None and self.shards is None:
            raise ValueError(
                "select chooses rows of val.shards, which is not set; data.select chooses those of a share"
            )
        return self

    def __bool__(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.shards is not None or self.share is not None


class DataConfig(Settings):
    """What is loaded, and in which batches."""

    shards: MayChange[Location | Annotated[list[SourceConfig], Field(min_length=1)]]
    """Folder or URL of the training shards, as `mmdata convert` or `mmdata index` leaves it. Or a list of several such
    datasets, each with a weight or a repeat."""
    val: ValConfig = ValConfig()
    """What the run is evaluated on: {shards: FOLDER} or {share: 0.01}."""
    split: Literal["train", "val"] = "train"
    """With `val.share`, the part of the rows that is loaded: train (all other rows) or val. It alone does not make an
    evaluation, which is without dropout, weights and shuffling: `mmdata.config.evaluation_data` gives its settings."""
    tokenizer: Location | None = None
    """Tokenizer of the captions: a folder that transformers' `AutoTokenizer.from_pretrained` loads, a name on the
    Hugging Face hub, or clip: CLIP's, which comes with mmdata. null: batches have no texts (no input_ids and
    attention_mask), for corpora of images and labels."""
    global_batch_size: Positive
    """Image-caption pairs (rows) of one step over all ranks; each rank gets an equal part. With `token_budget`, the
    largest number of rows."""
    allow_larger_batch: MayChange[bool] = False
    """Whether `global_batch_size` may exceed the rows of an epoch, so that each batch is filled up with masked rows.
    false: an error. An evaluation, which loads each row once in order, needs no permission."""
    token_budget: Positive | None = None
    """Text tokens and image patches of one step over all ranks, padding included: batches of short texts then have more
    rows than batches of long texts. null: all batches have `global_batch_size` rows."""
    batch_multiple: Positive = 8
    """With `token_budget`, the number of rows of each batch is a multiple of this; the number of ranks must divide
    it."""
    image_size: Side = 224
    """Side of the square that images are cropped and resized to, in pixels. With `image_buckets: auto` the chosen
    shapes have about as many pixels; with a list of shapes, or `image_patches`, it is not used."""
    image_buckets: Literal["auto"] | Annotated[list[tuple[Side, Side]], Field(min_length=1)] | None = None
    """Image shapes as [height, width] pairs in pixels; each image goes to the shape nearest in aspect ratio. auto:
    choose `num_image_buckets` shapes of about `image_size`² pixels that crop least. null: one square of
    `image_size`."""
    num_image_buckets: Positive = 3
    """Largest number of image shapes that `image_buckets: auto` chooses."""
    patch_size: Positive = 16
    """Side of the model's patches, in pixels. The sides of shapes that `image_buckets: auto` chooses are multiples of
    it, and `image_patches` cuts images into such patches."""
    image_patches: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Native resolution, in place of image shapes: each image keeps its aspect ratio and goes to the smallest of these
    numbers of patches that holds it. For models of SigLIP 2's NaFlex kind."""
    max_length: Positive = 77
    """Longest text in tokens; longer captions are truncated. 77 is the length of CLIP's text tower."""
    text_buckets: Literal["auto"] | Annotated[list[Positive], Field(min_length=1)] = "auto"
    """Text lengths of batches, in tokens: a caption is padded to the smallest length that holds it. auto: choose
    `num_text_buckets` lengths for the least padding. A list must rise and end with `max_length`."""
    num_text_buckets: Positive = 8
    """Largest number of text lengths that `text_buckets: auto` chooses, the same for all image shapes. More lengths pad
    less and give more batch shapes."""
    transform: Annotated[
        str | Callable[..., Any],
        PlainValidator(partial(by_name, words="train, eval, "), json_schema_input_type=str),
        PlainSerializer(name_of, return_type=str, when_used="json"),
    ] = "train"
    """What makes pixels of an image. train: random resized crop. eval: resize and centre crop. Or a transform of your
    own, as "module:callable"; in Python also the callable itself."""
    caption_template: Annotated[str, AfterValidator(_template)] | None = None
    """A prompt around each caption, such as "a photo of {}", with {} where the caption stands; evaluations have it too.
    The index must have counted the captions in it (`mmdata index --caption-template`), else they are counted at each
    start. null: the captions alone."""
    caption_dropout: BelowOne = 0.0
    """Probability that a row has an empty caption, for classifier-free guidance; each row draws anew in each epoch. An
    empty caption has no template, and goes through no `text_transform`. Evaluations do without it."""
    text_transform: (
        Annotated[
            str | Callable[..., Any],
            PlainValidator(by_name, json_schema_input_type=str),
            PlainSerializer(name_of, return_type=str, when_used="json"),
        ]
        | None
    ) = None
    """A function of your own that changes captions before they are tokenized, as "module:callable"; in Python also the
    callable itself. It is called with a caption (in its template) and the row's own random.Random, and returns the
    text. Evaluations do without it. null: the captions as they are."""
    decode: Literal["fast", "exact"] = "fast"
    """fast: decode a JPEG at a half, a quarter or an eighth of its size where the crop allows it. exact: decode every
    image at full size, which takes longer and is nearer to Pillow's pixels."""
    crop_scale: tuple[Share, Share] = (0.9, 1.0)
    """Smallest and largest share of the image's area that a training crop keeps. An image that is much wider or higher
    than its batch's shape keeps less, since no larger crop fits."""
    augment: AugmentConfig | None = None
    """Random flips and colour changes of training crops; null: none. Only with `transform: train`."""
    shuffle: bool = True
    """Whether rows come in a new random order in each epoch; false: in the order of the index within each batch
    shape."""
    order: Location | None = None
    """Exactly the rows that an epoch has, in this order: a .npy file of int64 row numbers of the index, in which a row
    may come several times. For a curriculum, or to replay rows. It needs `shuffle: false`; null: every row once."""
    leftover: Literal["merge", "pad", "drop"] = "merge"
    """What becomes of rows that fill no batch of their shape at the end of an epoch. merge: they go to a larger shape,
    and the last batches are filled up with masked rows. pad: the last batch of each shape is filled up. drop: they are
    left out of the epoch."""
    seed: Integer = 0
    """Seed of everything random in the data: order, crops, augmentation. Equal seeds give equal batches on any number
    of ranks and workers."""
    shuffle_window_rows: Positive = 2**20
    """Rows that are shuffled together, rounded up to whole shards. Smaller windows need less memory and a smaller cache
    for shards behind URLs, and mix less."""
    groups: GroupsConfig | None = None
    """Puts rows of one label, or near neighbours, into the same batch, as hard negatives of each other; null: each row
    stands alone."""
    num_lanes: Positive = 1
    """Parts of each batch that have shards of their own. With as many lanes as nodes, each node reads only its part of
    the shards; 1 mixes all shards."""
    add_hashes: bool = False
    """Adds image_hash and caption_hash to each batch, equal for equal images and captions, for masks of false
    negatives."""
    add_captions: bool = False
    """Adds `captions` to each batch: the text of each row's caption, as a list of str; "" where a row has none that can
    be used. And `caption_numbers` (B,), which of its captions that is, and, where `captions` names sources,
    `caption_sources`. Needs no tokenizer."""
    caption_hash: str | None = None
    """Column of the index or of a joined table that stands for caption_hash: rows with equal values count as rows with
    equal captions, which `train.mask_false_negatives` takes for no negatives of each other. A row without a value has
    the hash of its caption, as all have with null."""
    negative_captions: Location | None = None
    """Parquet file with the columns key and captions: wrong captions of images, as hard negatives (NegCLIP). Each batch
    then has one of them for each row. null: none."""
    max_rows: Positive | None = None
    """Uses only the first rows of the index, for a quick try; null: all rows. `select` chooses among these."""
    row_weights: Location | None = None
    """How often a row comes in an epoch, on average: a column of numbers of the index or of a joined table, a file
    (.npy) of a number for each row of the index, or label_balanced: each class as often as another, and the rows once
    on average. 2.3 is two or three times, 0.1 once in ten epochs. null: every row once."""
    max_repeats: Annotated[int, Field(strict=True, ge=1, le=1000)] = 10
    """Largest weight: rows of larger `row_weights` come so many times an epoch. An epoch has as many parts as the
    largest weight, each without a row twice, and the last batch of a part may be padded."""
    captions: Literal["one", "every"] | Annotated[dict[str, Share], Field(min_length=1)] = "one"
    """one: a row comes once an epoch with one of its captions, in turn from epoch to epoch. every: it comes once with
    each of its captions, never two of them in one batch. Or sources and their probabilities, from which each row draws
    in each epoch: {shards: 0.3, "join:recaption": 0.7} for the captions in the shards and a column of a joined
    table."""
    select: Select = None
    """Rows that are used, where nothing is rewritten: a condition on the index, such as `width >= 256 and height >=
    256`, or a file of keys (.txt, .parquet, .csv, .tsv), a mask or row numbers (.npy); null: all rows. See
    docs/select.md."""
    join: list[JoinConfig] = Field(default_factory=list)
    """Tables whose columns come to the rows by key, such as the scores of a filter: `select` and `fields` name them.
    And tars in other folders, whose members `fields` names."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Further entries of batches, by name. `join:COLUMN` has the values of a joined table. A member of the sample's own
    tar: `json:KEY` (a.b for nested objects), `npy`, `npz:NAME`, `txt`, and extensions that end in these, as
    `syn.json:KEY`; of joined tars `join:NAME:npy` and so on. Numbers and arrays are a tensor (B, …), texts and other
    JSON a list of B."""
    missing_fields: Literal["mask", "keep", "error"] = "mask"
    """What becomes of a row whose sample lacks a value that `fields` names in a member of its own; for joined tars
    their `missing` says it. mask: it is masked, with a line
    in the ledger. keep: it has NaN, "" or None; whole numbers come as floats then, and one above 2^53, which a float
    would round, is masked. error: an error. A damaged value, or one of another shape than in the first rows, is masked,
    or an error with `error`."""
    skip_damaged: bool = False
    """A stream that meets a damaged or unreadable shard goes on with the next one, and counts the loss in `stream.lost`
    and its ledger; otherwise that is an error. Shards with an index: `mmdata index --skip-damaged`."""
    members: MembersConfig | None = None
    """Which members of a sample a stream takes as image, caption and label. Shards with an index: `mmdata index
    --image … --caption … --label …`, which the index keeps."""
    loading: LoadingConfig = LoadingConfig()
    """Who makes the batches, and where files lie. Nothing in it changes a batch."""

    @field_validator("val", mode="before")
    @classmethod
    def _nothing(cls, val: object) -> object:
        return {} if val is None else val  # data.val=null on the command line turns evaluations off

    def with_loading(self, **changes: Any) -> DataConfig:
        """The same batches, loaded with other settings of `loading`."""
        return self.model_copy(update={"loading": self.loading.model_copy(update=changes)})

    @field_validator("captions")
    @classmethod
    def _sum_to_one(cls, captions: str | dict[str, float]) -> str | dict[str, float]:
        if isinstance(captions, dict) and abs((total := math.fsum(captions.values())) - 1) > 1e-6:
            raise ValueError(f"the probabilities of the sources must sum to 1: got {total:g}")
        return captions

    @model_validator(mode="after")
    def _check_weights(self) -> DataConfig:
        ways = {"order": self.order, "row_weights": self.row_weights, "captions every": self.captions == "every"}
        weighs = [name for name, on in ways.items() if on]
        if len(weighs) > 1:
            raise ValueError(f"{' and '.join(weighs)} exclude each other: give one")
        several = isinstance(self.shards, list) and any(one.weight or one.repeat for one in self.shards)
        others = {
            "groups": self.groups,
            "num_lanes above 1": self.num_lanes > 1,
            "a weight or repeat of shards": several,
        }
        if self.order:
            others |= {"token_budget": self.token_budget, "shuffle (set shuffle to false)": self.shuffle}
            others |= {f"leftover {self.leftover}": self.leftover != "merge"}
        if weighs and (found := [name for name, on in others.items() if on]):
            raise ValueError(f"{weighs[0]} does not go with {found[0]}: leave one of them out")
        return self

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if isinstance(self.text_buckets, list):
            if sorted(set(self.text_buckets)) != self.text_buckets:
                raise ValueError(f"text_buckets must rise: got {self.text_buckets}")
            if self.text_buckets[-1] != self.max_length:
                raise ValueError(
                    f"the last of text_buckets must be max_length ({self.max_length}): got {self.text_buckets[-1]}"
                )
        shapes = self.image_buckets
        if isinstance(shapes, list) and len(set(shapes)) != len(shapes):
            raise ValueError(f"image_buckets must differ from each other: got {[list(b) for b in shapes]}")
        if shapes == "auto" and self.image_size % self.patch_size:
            raise ValueError(
                f"image_size ({self.image_size}) must be a multiple of patch_size ({self.patch_size}) where "
                "image_buckets is auto: its shapes consist of whole patches"
            )
        if self.image_patches is not None:
            if sorted(set(self.image_patches)) != self.image_patches:
                raise ValueError(f"image_patches must rise: got {self.image_patches}")
            if self.image_buckets is not None:
                raise ValueError("image_patches and image_buckets exclude each other: give one")
        if self.crop_scale[0] > self.crop_scale[1] or self.crop_scale[0] == 0:
            raise ValueError(f"crop_scale must be (min, max) with 0 < min <= max: got {self.crop_scale}")
        if self.tokenizer is None:
            of_texts = {
                "text_buckets": isinstance(self.text_buckets, list),
                "negative_captions": self.negative_captions is not None,
            }
            if given := [name for name, is_given in of_texts.items() if is_given]:
                raise ValueError(
                    f"tokenizer is missing, and without it batches have no texts, which {' and '.join(given)} are "
                    "about: give data.tokenizer, or leave them out"
                )
        if self.augment is not None and self.transform != "train":
            raise ValueError(
                f"augment changes the crops of transform train, and transform is '{name_of(self.transform)}': leave "
                "augment out (data.augment=null)"
            )
        return self

    @model_validator(mode="after")
    def _check_token_budget(self) -> DataConfig:
        if self.token_budget is None:
            return self
        if self.batch_multiple > self.global_batch_size:
            raise ValueError(
                f"with token_budget, global_batch_size ({self.global_batch_size}) must be batch_multiple "
                f"({self.batch_multiple}) or more"
            )
        if self.batch_multiple % self.num_lanes:
            raise ValueError(
                f"with token_budget, num_lanes ({self.num_lanes}) must divide batch_multiple ({self.batch_multiple})"
            )
        return self

    @model_validator(mode="after")
    def _check_caption_hash(self) -> DataConfig:
        if self.caption_hash is not None and self.negative_captions is not None:
            raise ValueError(
                "caption_hash and negative_captions exclude each other: whether a negative caption is true of another "
                "row is known by its text alone"
            )
        return self

    @model_validator(mode="after")
    def _check_split(self) -> DataConfig:
        if self.split == "val" and self.val.share is None:
            where = f"; to load '{self.val.shards}', set shards to it" if self.val.shards else ""
            raise ValueError(f"split val is a share of the rows, and val.share is not set{where}")
        return self

    @model_validator(mode="after")
    def _check_mixture(self) -> DataConfig:
        mixed = self.shards if isinstance(self.shards, list) else []
        given = {source.weight is not None for source in mixed}
        if len(given) > 1 or (True in given and any(source.repeat is not None for source in mixed)):
            listed = "; ".join(f"'{s.shards}' has {_shares(s)}" for s in mixed)
            raise ValueError(f"give each dataset a weight and none a repeat, or none of them a weight: {listed}")
        if len(mixed) > 1 and self.max_rows is not None:
            raise ValueError(
                f"max_rows ({self.max_rows}) takes the first rows of one dataset, and shards lists {len(mixed)}"
            )
        if len(mixed) > 1 and self.negative_captions is not None:
            raise ValueError(
                f"negative_captions have the keys of one dataset, and shards lists {len(mixed)}: convert them into one "
                "folder of shards, or leave negative_captions out"
            )
        weights = [source.weight for source in mixed if source.weight is not None]
        if weights:
            if self.token_budget is not None or self.groups is not None:
                raise ValueError(
                    "weights are shares of batches of one size without groups: with token_budget or groups, "
                    "give each dataset a repeat"
                )
            if self.leftover != "merge":
                raise ValueError(
                    f"weights fill every batch by merging, and leftover is {self.leftover}: set it to merge"
                )
            unit = sum(weights) // math.gcd(*weights)  # the smallest batch that holds them to the row
            rows = self.global_batch_size
            if rows % unit:
                raise ValueError(
                    f"global_batch_size {rows} cannot hold the weights {' : '.join(map(str, weights))} to the row: "
                    f"it must be a multiple of {unit}; {rows // unit * unit or unit} is"
                )
        return self


def _shares(source: SourceConfig) -> str:
    given = {"weight": source.weight, "repeat": source.repeat}
    return " and ".join(f"{name} {value:g}" for name, value in given.items() if value is not None) or "neither"


def sources(data: DataConfig) -> list[SourceConfig]:
    """The datasets of `data.shards`, one or several: all of them with a weight, or all with a repeat.

    Where neither is given, and for a dataset that is alone, it is `repeat` 1: the rows of all, each once an epoch.
    """
    listed = data.shards if isinstance(data.shards, list) else [SourceConfig(shards=data.shards)]
    if len(listed) > 1 and listed[0].weight is not None:
        return listed
    return [source.model_copy(update={"weight": None, "repeat": source.repeat or 1.0}) for source in listed]


def once_in_order(data: DataConfig) -> DataConfig:
    """The settings that load each row once: centre crop, order of the index, batches of one size, nothing grouped.

    The captions are those of the shards in turn. Where `data.captions` names other sources alone, they are of those.
    """
    mixed = isinstance(data.shards, list)
    once = {"weight": None, "repeat": None}
    shards = [source.model_copy(update=once) for source in sources(data)] if mixed else data.shards
    changes = {
        "transform": "eval",
        "caption_dropout": 0.0,
        "text_transform": None,
        "augment": None,
        "shuffle": False,
        "groups": None,
        "token_budget": None,
        "negative_captions": None,
        "caption_hash": None,
        "row_weights": None,
        "order": None,
        "leftover": "merge",
        "captions": "one",
    }
    if isinstance(data.captions, dict) and "shards" not in data.captions:
        del changes["captions"]  # the shards' captions are not used, or there are none
    return data.model_copy(update={"shards": shards, **changes})


def evaluation_data(data: DataConfig, *, hashes: bool = False) -> DataConfig:
    """The settings that load what `data.val` names, as `once_in_order`.

    `hashes` adds hashes if training has none. `worker_type: auto` becomes thread: an evaluation is short, and a second
    worker process would hold its memory during the whole run.

    Raises:
        ConfigError: `data.val` is not set.
    """
    if not data.val:
        raise ConfigError(
            "data.val is not set: there is nothing to evaluate on; set data.val.shards=FOLDER, or data.val.share=0.01 "
            "to keep 1 % of the rows from training"
        )
    if data.loading.worker_type == "auto":
        data = data.with_loading(worker_type="thread")
    # Other shards have other rows: what selects those to train on, and what is joined to them, says nothing about them.
    same = isinstance(data.shards, str) and data.val.shards is not None and _is_same(data.val.shards, data.shards)
    # Only val.select asks for joined columns: captions, fields and weights of an evaluation are not of a table.
    join = data.join if same and data.val.select is not None else []
    of_val = {"shards": data.val.shards, "select": data.val.select, "join": join, "captions": "one"}
    which = {"split": "val"} if data.val.shards is None else of_val
    # No evaluation reads the values of tables.
    return once_in_order(data.model_copy(update={**which, "fields": {}, "add_hashes": hashes or data.add_hashes}))


def _is_same(first: str, second: str) -> bool:
    """Whether two names are those of one folder: "laion", "./laion/"; URLs are compared without a slash at the end."""
    names = [path_of_url(name) or name for name in (first, second)]
    if any("://" in name for name in names):
        return names[0].rstrip("/") == names[1].rstrip("/")
    return os.path.realpath(names[0]) == os.path.realpath(names[1])


def val_in_words(data: DataConfig) -> str:
    """What `data.val` names: "shards/val", or "shards/train (data.val.share 0.01)"."""
    if data.val.share is None:
        return data.val.shards or "nothing"
    return f"{', '.join(source.shards for source in sources(data))} (data.val.share {data.val.share:g})"
