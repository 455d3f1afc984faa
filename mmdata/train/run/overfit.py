"""Overfitting on purpose: the first batches of epoch 0 again and again, to see whether a model can learn at all.

A model that cannot memorise a few batches has a defect, or its loss or its data has; more data would hide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from mmdata.batch import Batch
from mmdata.errors import ConfigError
from mmdata.train.batches import Batches, LoaderExtras


class FirstBatches:
    """A loader whose every epoch is the first batches of another loader's epoch 0: equal rows, equal pixels.

    The batches are taken in the first iteration and kept: a stream would give other batches the second time.

    Args:
        batches: a loader, used only through this object.
        count: batches of an epoch, on each rank.

    Raises:
        ConfigError: epoch 0 has fewer.

    Example:
        three = FirstBatches(Loader.from_config("configs/scenes.yaml"), 3)
        rows = [[batch["rows"].tolist() for batch in three] for _ in range(2)]
        assert rows[0] == rows[1]
    """

    def __init__(self, batches: Batches, count: int) -> None:
        batches.set_epoch(0)
        if len(batches) < count:
            raise ConfigError(
                f"train.overfit_batches is {count}, and epoch 0 has {len(batches)} batches; set it to "
                f"{len(batches)} or less, or data.global_batch_size to less"
            )
        self._batches = batches
        self._count = count
        self._kept: list[Batch] = []
        self._step = 0
        self._begin = batches.state_dict()  # of the loader, before its first batch
        self.index = LoaderExtras.of(batches).index

    def __len__(self) -> int:
        """Batches of every epoch."""
        return self._count

    def set_epoch(self, epoch: int) -> None:
        """Go to the start; all epochs are equal."""
        self._step = 0

    def state_dict(self) -> dict[str, Any]:
        """Batches yielded in this epoch, and the loader's state before the first."""
        return {"step": self._step, "begin": self._begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state_dict` was taken.

        Raises:
            ConfigError: the loader gives other batches than that of the state.
        """
        self._batches.load_state_dict(state["begin"])
        self._step = state["step"]
        self._kept = []

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left of this epoch; after the last one, all of them."""
        if not self._kept:
            self._kept = list(islice(self._batches, self._count))
        if self._step == self._count:
            self._step = 0
        for batch in self._kept[self._step :]:
            self._step += 1
            yield batch
