"""The loader in Lightning: each rank gets its slice of the plan, and a checkpoint holds the loader's place.

A `Loader` may also be given to `Trainer.fit(model, train_dataloaders=loader)` as it is: Lightning puts no sampler into
what is no DataLoader, and saves and restores whatever has a `state_dict`. This module adds rank, world size and the
number of the epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from mmdata.batch import Batch
from mmdata.data_config import DataConfig, evaluation_data
from mmdata.integrations.adapt import SameEpoch, check_launched, judged_together
from mmdata.loader import Loader
from mmdata.loader.loader import data_config
from mmdata.train import distributed


class EpochLoader:
    """A loader in a trainer's epochs, whichever batch the last one stopped at.

    Args:
        loader: this rank's.
        trainer: that counts the epochs.
    """

    def __init__(self, loader: Loader, trainer: Trainer) -> None:
        distributed.check_ranks(loader, (trainer.global_rank, trainer.world_size))
        self.loader = loader
        self._trainer = trainer

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        # Lightning makes iterators before it has counted up; this runs when the first batch is asked for.
        self.loader.set_epoch(self._trainer.current_epoch)
        yield from judged_together(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """The loader's place; Lightning keeps it in each checkpoint."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.loader.load_state_dict(state_dict)


class LoaderDataModule(LightningDataModule):
    """Loaders of `data.shards` and, where it is set, of `data.val_shards`.

    Args:
        config: a YAML file or a dictionary with the section `data`, or that section.

    Example:
        trainer = lightning.Trainer(max_epochs=3)
        trainer.fit(model, datamodule=LoaderDataModule("configs/scenes.yaml"))
    """

    def __init__(self, config: str | os.PathLike[str] | dict[str, Any] | DataConfig) -> None:
        super().__init__()
        self.data = data_config(config)

    def train_dataloader(self) -> EpochLoader:
        """This rank's batches, in the trainer's epoch."""
        return EpochLoader(self._loader(self.data), self._running_trainer())

    def val_dataloader(self) -> SameEpoch | list[Any]:
        """This rank's batches of `data.val_shards`, the same each time; nothing where they are not set."""
        return [] if self.data.val_shards is None else SameEpoch(self._loader(evaluation_data(self.data)))

    def _loader(self, data: DataConfig) -> Loader:
        trainer = self._running_trainer()
        check_launched(
            trainer.world_size,
            trainer="Lightning's Trainer",
            remedy="give Trainer(devices=…, num_nodes=…) as many as were started, or start one process with python",
        )
        return Loader.from_config(data, rank=trainer.global_rank, world_size=trainer.world_size)

    def _running_trainer(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("a LoaderDataModule needs its trainer: Trainer.fit(model, datamodule=…) brings it")
        return self.trainer
