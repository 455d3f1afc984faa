"""What the loop needs of a loader, and how long it makes a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from mmdata.batch import Batch, CaptionBatch
from mmdata.config import TrainConfig
from mmdata.config.train import FeatureFields
from mmdata.errors import ConfigError


class Batches(Protocol):
    """What the loop needs of a loader; `mmdata.Loader` is one.

    The loop takes a batch ahead, on a GPU and where there are several ranks: a batch must be in memory of its own, and
    depend on the state alone, not on random numbers that the step draws too.
    """

    def __len__(self) -> int:
        """Batches of the epoch that is set, for this rank; the same number on all ranks."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the epoch, from where the state says; each has as many rows on all ranks."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position as plain data; it counts the batches that were yielded."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of a state."""
        ...


@dataclass(frozen=True)
class LoaderExtras:
    """What mmdata's loaders offer beyond `Batches`; None for what a loader lacks: the loop does without it.

    Attributes:
        index: the corpus that row numbers are of.
        num_rows: how many of its rows are loaded at all.
        identity: what the batches depend on, by name; the same on all ranks.
        stats: the loader's clock, a `mmdata.loader.Stats`.
        all_captions: takes row numbers int64 (n,); gives the captions of those of the rows that have several.
        merge_states: takes the states of all ranks at the same step; gives one, with the rows of all of them counted.
        check_rows: raises a DataError if too many of the rows that a state counts could not be used.
        other_shards: says in words that a state was taken with other shards; "" if it was not.
        regroups: what takes new groups between epochs, a `mmdata.loader.regrouped.RegroupedLoader`.
        blank_batches: gives each shape of the epoch's batches in words, and what makes a batch of it without a row.
    """

    index: Sized | None
    num_rows: int | None
    identity: dict[str, Any] | None
    stats: Any
    all_captions: Callable[[NDArray[np.int64]], CaptionBatch] | None
    merge_states: Callable[[Sequence[dict[str, Any]]], dict[str, Any]] | None
    check_rows: Callable[[dict[str, Any]], None] | None
    other_shards: Callable[[dict[str, Any]], str] | None
    regroups: Any
    blank_batches: Callable[[], Sequence[tuple[str, Callable[[], Batch]]]] | None

    @classmethod
    def of(cls, batches: object) -> Self:
        """What these batches offer."""
        return cls(**{field.name: getattr(batches, field.name, None) for field in fields(cls)})


def count_steps(batches: Batches, config: TrainConfig) -> int:
    """Updates of the whole run, exact; leaves `batches` at another epoch."""
    if config.steps is not None:
        return config.steps
    if config.epochs is None:
        raise ConfigError("train.epochs or train.steps is required: how long to train")
    total = 0
    for epoch in range(config.epochs):
        batches.set_epoch(epoch)
        total += len(batches)
    return total


def split(batch: Mapping[str, object], size: int) -> Iterator[dict[str, Any]]:
    """Parts of `size` rows, the last one with what is left; values that are no tensor or list go into each part.

    Raises:
        ValueError: entries of the batch with different numbers of rows, or an entry that nests tensors with rows.
    """
    cut = {key: value for key, value in batch.items() if isinstance(value, list) or has_rows(value)}
    counts = {key: len(cast("list[object]", value)) for key, value in cut.items()}
    if max(counts.values(), default=0) <= size:
        yield dict(batch)
        return
    if nested := [key for key in batch if key not in cut and any(map(has_rows, tree_leaves(batch[key])))]:
        raise ValueError(f"the batch's entries {nested} nest tensors, and cannot be split: make each an entry itself")
    if len(set(counts.values())) > 1:
        raise ValueError(f"the batch's entries have different numbers of rows, and cannot be split: {counts}")
    for start in range(0, max(counts.values(), default=0), size):
        yield {**batch, **{key: cast(Any, value)[start : start + size] for key, value in cut.items()}}


def field_features(batch: Mapping[str, object], fields: FeatureFields, setting: str) -> tuple[Tensor, Tensor]:
    """Another model's features of the images and the texts, which the batch holds.

    Args:
        batch: of the loader.
        fields: names of its entries.
        setting: that gives the names, for messages.

    Returns:
        (B, D) each, L2-normalised, at least float32; NaN in both where a row lacks one of them: NaN, or all zeros.

    Raises:
        ValueError: an entry is missing, is no floats (B, D) or (B, A, D), or the two differ in D.
    """
    found: list[Tensor] = []
    for name in (fields.image, fields.text):
        value = batch.get(name)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim not in (2, 3):
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            got = got if name in batch else "nothing"
            raise ValueError(f"{setting} '{name}': the batch has {got} there; data.fields brings floats (B, D) to it")
        unit = F.normalize(value.to(torch.promote_types(value.dtype, torch.float32)), dim=-1)
        found.append(unit if unit.ndim == 2 else F.normalize(unit.mean(1), dim=-1))
    images, texts = found
    if images.shape != texts.shape:
        raise ValueError(
            f"{setting}: '{fields.image}' has {images.shape[1]} numbers a row and '{fields.text}' {texts.shape[1]}: "
            "features of one model have as many for images as for texts"
        )
    there = (images.norm(dim=1) * texts.norm(dim=1))[:, None] > 0.5
    return images.where(there, torch.nan), texts.where(there, torch.nan)


def has_rows(value: object) -> bool:
    """Whether an entry of a batch is a tensor with rows."""
    return isinstance(value, Tensor) and value.ndim > 0
