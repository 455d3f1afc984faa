"""A loader's batches as a Grain dataset, whose iterators keep their position in Grain's checkpoints.

`grain.MapDataset.source(mmdata.Index.open(FOLDER))` gives single samples in Grain's own order instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
from torch import Tensor

from mmdata.batch import Batch
from mmdata.integrations.adapt import judged_together
from mmdata.loader import Loader


class LoaderDataset(grain.IterDataset[dict[str, Any]]):
    """The batches of a loader, with NumPy arrays in place of tensors.

    Each iterator begins with epoch 0. The loader has one position: only the newest iterator can be used. Shuffling,
    sharding and batching are the loader's; Grain's `map` and `ThreadPrefetchIterDataset` may follow. It cannot be sent
    to Grain's worker processes (`mp_prefetch`).

    Args:
        loader: this process's loader, or its stream with `steps_per_epoch`. Outside torchrun give it `rank` and
            `world_size`.
        num_epochs: each in another order; None: without end.

    Example:
        batches = iter(LoaderDataset(loader, num_epochs=3))
        batches.set_state(state)  # of `batches.get_state()`; reads no earlier batch
    """

    def __init__(self, loader: Loader, *, num_epochs: int | None = 1) -> None:
        super().__init__()
        self._loader, self._num_epochs = loader, num_epochs

    def __iter__(self) -> grain.DatasetIterator[dict[str, Any]]:
        self._loader.load_state_dict({**self._loader.state_dict(), "epoch": 0, "step": 0})
        return _LoaderIterator(self._loader, self._num_epochs)


class _LoaderIterator(grain.DatasetIterator[dict[str, Any]]):
    def __init__(self, loader: Loader, num_epochs: int | None) -> None:
        super().__init__()
        self._loader, self._num_epochs = loader, num_epochs
        self._batches = self._epochs()

    def __next__(self) -> dict[str, Any]:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """The loader's state, as JSON."""
        return self._loader.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position; raises ConfigError for a state of other batches."""
        self._loader.load_state_dict(state)
        self._batches = self._epochs()

    def _epochs(self) -> Iterator[dict[str, Any]]:
        while self._num_epochs is None or self._epochs_given() < self._num_epochs:
            yield from map(_arrays, judged_together(self._loader))

    def _epochs_given(self) -> int:
        epoch, step = (self._loader.state_dict()[name] for name in ("epoch", "step"))
        return epoch + (step == self._loader.num_steps(epoch))


def _arrays(batch: Batch) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in batch.items()}
