"""The section data: one class a concern, and `DataConfig`, which is each of them and has all settings.

A room takes the class that it needs, as `PixelTransform.from_config(images: ImagesConfig)`.
"""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from mmdata.config.batches import BatchesConfig
from mmdata.config.corpus import CorpusConfig, sources
from mmdata.config.images import ImagesConfig
from mmdata.config.settings import NOT_BOOLEAN, Count, Location, Positive, Settings, Share, name_of
from mmdata.config.targets import TargetsConfig
from mmdata.config.texts import TextsConfig
from mmdata.errors import ConfigError
from mmdata.safe_read import path_of_url

PAD_OR_DROP = "a leftover other than merge"
LEAVE_OUT = "leave one of them out"
FORM_OF_EPOCHS = ("groups", "num_lanes above 1", "a weight or repeat of shards")
EXCLUDE_EACH_OTHER = (
    ("order", ("row_weights", "captions every", *FORM_OF_EPOCHS, "token_budget", PAD_OR_DROP), LEAVE_OUT),
    ("order", ("shuffle",), "set shuffle to false"),
    ("row_weights", ("captions every", *FORM_OF_EPOCHS), LEAVE_OUT),
    ("captions every", FORM_OF_EPOCHS, LEAVE_OUT),
    ("weights of shards", ("token_budget", "groups"), "give each dataset a repeat in place of its weight"),
    ("weights of shards", (PAD_OR_DROP,), "set leftover to merge, which fills every batch"),
    ("negative_captions", ("several datasets",), "their keys are those of one dataset; convert them into one folder"),
    ("negative_captions", ("caption_hash",), "whether one is true of another row is known by its text alone"),
)
"""A setting, others that it does not go with, and what to do, or why."""


class RowsConfig(Settings):
    """What a batch has of each row, beside pixels and tokens."""

    caption_hash: str | None = None
    """Column of the index or of a joined table that stands for caption_hash: rows with equal values count as rows with
    equal captions, which `train.mask_false_negatives` does not use as negatives for each other. A row without a value
    has the hash of its caption, as all have with null."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Further entries of batches, by name. `join:COLUMN` has the values of a joined table. A member of the sample's own
    tar: `json:KEY` (a.b for nested objects), `npy`, `npz:NAME`, `png`, `txt`, and extensions that end in these, as
    `syn.json:KEY`; of joined tars `join:NAME:npy` and so on. Numbers and arrays are a tensor (B, …), texts and other
    JSON a list of B. A row whose own sample lacks a value, or has a damaged one, is masked, and listed among the
    skipped rows; for joined tars `missing` decides."""
    targets: TargetsConfig | None = None
    """Boxes, key points and masks that follow the crop of their image; null: none."""


class LoadingConfig(Settings):
    """How batches are made, and where files are kept. No setting here changes a batch."""

    MAY_CHANGE: ClassVar[bool] = True

    num_workers: Count | Literal["auto"] = "auto"
    """Number of threads that make batches. auto: one for each CPU core that this rank may use. 0: batches are made in
    the training loop's own thread, whatever `num_processes` is."""
    num_processes: Count | Literal["auto"] = "auto"
    """Number of worker processes that share the `num_workers` threads, so that the loop never waits for Python's lock
    (the GIL); each takes the memory of one more interpreter. More of them help above 4,000 rows a second, or if a
    transform of your own is slow Python code. 0: the threads are those of the training process. auto: one for each 4
    threads if there is a GPU of CUDA, at most 8; otherwise, and always on Windows, 0."""
    prefetch_batches: Positive = 2
    """Number of batches that are made before the loop asks for them, by all workers together. More helps if steps take
    unequally long, and takes the memory of so many batches."""
    cache_dir: Location | None = None
    """Folder where files of shards behind URLs are kept, shared by all processes of the machine. null: mmdata/shards in
    the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    cache_gb: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] = 100.0
    """Largest size of `cache_dir`, in gigabytes (10⁹ bytes); the least recently used files are removed to make room."""
    cache_pixels_gb: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] | None = None
    """Keep decoded images in files of up to this many gigabytes in all, in the folder pixels of `cache_dir`, so that
    later epochs decode nothing. For many epochs over few images; needs `data.shorter_side`. A row takes 3 bytes a
    pixel, about 0.26 MB at 256: the first rows of the index are kept, as many as fit. All processes of the machine
    share the files. null: decode in each epoch."""
    max_bad_share: Share = 0.05
    """Largest share of rows that may fail to load, such as damaged images; above it the run ends with an error. In a
    loop of your own on several ranks this is a warning, unless `check_rows` is called on every rank."""

    @model_validator(mode="after")
    def _check(self) -> LoadingConfig:
        workers, processes = self.num_workers, self.num_processes
        if workers != "auto" and processes != "auto" and 1 < processes > workers:
            raise ValueError(
                f"num_processes ({self.num_processes}) share num_workers ({self.num_workers}): set num_workers to as "
                "many or more, or leave num_processes out"
            )
        return self


# pydantic lists the settings of the last base first.
class DataConfig(RowsConfig, TextsConfig, ImagesConfig, BatchesConfig, CorpusConfig):
    """What is loaded, and in which batches."""

    loading: LoadingConfig = LoadingConfig()
    """How batches are made, and where files are kept. No setting in it changes a batch."""

    def with_loading(self, **changes: Any) -> DataConfig:
        """The same batches, loaded with other settings of `loading`."""
        return self.model_copy(update={"loading": self.loading.model_copy(update=changes)})

    @model_validator(mode="after")
    def _check_ways(self) -> DataConfig:
        mixed = self.shards if isinstance(self.shards, list) else []
        weights = [source.weight for source in mixed if source.weight is not None]
        given = {
            "order": self.order,
            "row_weights": self.row_weights,
            "captions every": self.captions == "every",
            "groups": self.groups,
            "num_lanes above 1": self.num_lanes > 1,
            "token_budget": self.token_budget,
            PAD_OR_DROP: self.leftover != "merge",
            "shuffle": self.shuffle,
            "a weight or repeat of shards": any(source.weight or source.repeat for source in mixed),
            "weights of shards": weights,
            "several datasets": len(mixed) > 1,
            "caption_hash": self.caption_hash,
            "negative_captions": self.negative_captions,
        }
        for one, others, remedy in EXCLUDE_EACH_OTHER:
            if given[one] and (found := [other for other in others if given[other]]):
                raise ValueError(f"{one} does not go with {found[0]}: {remedy}")
        self._check_targets()
        if self.loading.cache_pixels_gb is not None and self.shorter_side is None:
            raise ValueError(
                "loading.cache_pixels_gb keeps images of data.shorter_side, which is not set: set it, to 256 for an "
                "image_size of 224, or leave cache_pixels_gb out"
            )
        rows = self.global_batch_size
        unit = sum(weights) // math.gcd(*weights) if weights else 1  # the smallest batch that holds them to the row
        if rows % unit:
            raise ValueError(
                f"global_batch_size {rows} cannot hold the weights {' : '.join(map(str, weights))} to the row: it must "
                f"be a multiple of {unit}; {rows // unit * unit or unit} is"
            )
        return self

    def _check_targets(self) -> None:
        if (targets := self.targets) is None:
            return
        if targets.keep_boxes and self.transform != "train":
            raise ValueError(
                f"targets.keep_boxes changes the random crops of transform train, and transform is "
                f"'{name_of(self.transform)}': leave keep_boxes out"
            )
        is_own = self.transform not in ("train", "eval")
        for name in ("keypoint_swaps", "min_visible"):
            if is_own and getattr(targets, name) != TargetsConfig.model_fields[name].default:
                raise ValueError(
                    f"targets.{name} is for the transforms train and eval, and a transform of your own, "
                    f"'{name_of(self.transform)}', moves and leaves out boxes itself: leave {name} out"
                )
        if targets.box_texts is not None and self.tokenizer is None:
            raise ValueError("targets.box_texts are tokenized: set tokenizer")
        if targets.masks is not None and self.image_patches is not None:
            raise ValueError(
                "targets.masks have the shape of a batch's images, and images in patches keep their own: leave "
                "image_patches or targets.masks out"
            )
        flips = self.augment is not None and self.augment.horizontal_flip_prob > 0
        if targets.keypoints is not None and targets.keypoint_swaps is None and flips:
            raise ValueError(
                "targets.keypoint_swaps is not set, and augment.horizontal_flip_prob mirrors images, where a left eye "
                "becomes a right one: list the pairs of key points that a flip exchanges, as [[1, 2], [3, 4]], or [] "
                "for none"
            )


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
        "targets": data.targets and data.targets.model_copy(update={"keep_boxes": False}),
    }
    if isinstance(data.captions, dict) and "shards" not in data.captions:
        del changes["captions"]  # the shards' captions are not used, or there are none
    return data.model_copy(update={"shards": shards, **changes})


def evaluation_data(data: DataConfig) -> DataConfig:
    """The settings that load what `data.val` names, as `once_in_order`.

    `num_processes: auto` becomes 0: an evaluation is short, and a second worker process would hold its memory during
    the whole run.

    Raises:
        ConfigError: `data.val` is not set.
    """
    if not data.val:
        raise ConfigError(
            "data.val is not set: there is nothing to evaluate on; set data.val.shards=FOLDER, or data.val.share=0.01 "
            "to keep 1 % of the rows from training"
        )
    if data.loading.num_processes == "auto":
        data = data.with_loading(num_processes=0)
    # Other shards have other rows: what selects those to train on, and what is joined to them, says nothing about them.
    is_same = isinstance(data.shards, str) and _real(data.val.shards or "") == _real(data.shards)
    # Only val.select asks for joined columns: captions, fields and weights of an evaluation are not of a table.
    join = data.join if is_same and data.val.select is not None else []
    of_val = {"shards": data.val.shards, "select": data.val.select, "join": join, "captions": "one"}
    which = {"split": "val"} if data.val.shards is None else of_val
    # No evaluation reads the values of tables. Boxes of joined tars are those of the rows to train on.
    joins_none = data.val.shards is not None and not join
    targets = None if joins_none and data.targets is not None and data.targets.is_joined else data.targets
    return once_in_order(data.model_copy(update={**which, "fields": {}, "targets": targets}))


def _real(place: str) -> str:
    """The same for two names of one folder: a path, relative or through a link, or a `file:` URL."""
    return os.path.realpath(path_of_url(place) or place)
