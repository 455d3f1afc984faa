"""What the loop needs of a loader, and how long it makes a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mmdata.batch import Batch, CaptionBatch
from mmdata.config import TrainConfig
from mmdata.errors import ConfigError


class Batches(Protocol):
    """What the loop needs of a loader; `mmdata.Loader` is one."""

    def __len__(self) -> int:
        """Batches of the epoch that is set, for this rank; the same number on all ranks."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the epoch, from where the state says."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain data: counts the batches yielded."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state_dict` was taken."""
        ...


@runtime_checkable
class CountsRows(Protocol):
    """A loader that counts rows which cannot be used, and can do so over all ranks; `mmdata.Loader` is one."""

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One state of those that all ranks took at the same step: their rows are added up."""
        ...

    def check_rows(self, state: dict[str, Any]) -> None:
        """Raise a DataError where too many of the rows that a state counts could not be used."""
        ...


@runtime_checkable
class HasCaptions(Protocol):
    """A loader that gives all captions of rows; `mmdata.Loader` is one."""

    def all_captions(self, rows: NDArray[np.int64]) -> CaptionBatch:
        """The captions of those of the rows that have several; none of a row that has one."""
        ...


@runtime_checkable
class HasIndex(Protocol):
    """A loader whose row numbers are those of an index; `mmdata.Loader` is one."""

    @property
    def index(self) -> Sized:
        """All rows."""
        ...


class Bottleneck(Protocol):
    """What a loader spends most time on."""

    @property
    def stage(self) -> str:
        """Its name."""
        ...

    @property
    def words(self) -> str:
        """A clause that says so."""
        ...


class Clock(Protocol):
    """Sums of a loader's clock; `mmdata.loader.Stats` is one."""

    transfer_s: float
    """The caller was busy with the copy to the device."""

    def copy(self) -> Self:
        """The sums as they are now."""
        ...

    def since(self, earlier: Self) -> Self:
        """The sums of what came after an earlier `copy`."""
        ...

    def bottleneck(self) -> Bottleneck | None:
        """The stage that most time goes to."""
        ...


@runtime_checkable
class KeepsClock(Protocol):
    """A loader with a clock on its stages; `mmdata.Loader` is one."""

    @property
    def stats(self) -> Clock:
        """Sums over the batches yielded."""
        ...


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
