"""Loader and stream in Lightning: each rank gets its own batches, and a run resumes at the next batch.

`Trainer.fit(model, train_dataloaders=loader)` works with a `Loader` too: Lightning replaces the sampler of a DataLoader
only, sets the epoch through `batch_sampler.sampler`, and keeps the state of any loader with a `state_dict`. But it
loads that state only in mid-epoch, and keeps only the state of rank 0. The classes of this file add rank and world
size, the states of all ranks, and `overfit_batches`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from mmdata.batch import Batch
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError
from mmdata.integrations.adapt import SameEpoch, check_launched, judged_together
from mmdata.loader import Loader
from mmdata.loader.loader import data_config
from mmdata.loader.stream import stream
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather


class EpochLoader:
    """A loader or a stream whose epoch is the trainer's, also if the epoch before ended early.

    With `Trainer(overfit_batches=…)` every epoch is epoch 0.

    Args:
        loader: this rank's loader, or its stream with `steps_per_epoch`.
        trainer: counts the epochs.

    Raises:
        ConfigError: a stream without `steps_per_epoch`.
    """

    def __init__(self, loader: Loader, trainer: Trainer) -> None:
        collectives.check_ranks(loader, (trainer.global_rank, trainer.world_size))
        try:
            len(loader)
        except TypeError as error:
            raise ConfigError(
                "Lightning takes a batch ahead of a stream that has no length, and a checkpoint would then skip one: "
                "give steps_per_epoch"
            ) from error
        self.loader = loader
        self._trainer = trainer
        if loader.plan.epochs_differ:
            # Else Lightning gives every epoch at most as many batches as the first one has.
            undeclared: Any = trainer
            undeclared.reload_dataloaders_every_n_epochs = 1

    def __len__(self) -> int:
        """Batches of the trainer's epoch."""
        return self.loader.num_steps(self._epoch())

    def __iter__(self) -> Iterator[Batch]:
        # As a generator, this runs when the first batch is asked for: Lightning makes the iterator before it increments
        # `current_epoch`. Its own call of a sampler's `set_epoch` is not used: after resuming at the end of an epoch
        # under `max_steps` it passes an epoch that is too large by one.
        self.loader.set_epoch(self._epoch())
        yield from judged_together(self.loader)

    def _epoch(self) -> int:
        overfit = getattr(self._trainer, "overfit_batches", 0)  # Lightning sets it without declaring it
        return 0 if overfit else self._trainer.current_epoch

    def state_dict(self) -> dict[str, Any]:
        """The loader's position and the counts of all ranks, for Lightning's checkpoints.

        A collective, like Lightning's `save_checkpoint`: all ranks must call it.
        """
        return self.loader.merge_states(gather(self.loader.state_dict(), collectives.cpu_group()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position."""
        self.loader.load_state_dict(state_dict)


class LoaderDataModule(LightningDataModule):
    """Loaders of `data.shards` and, if set, of `data.val`.

    Args:
        config: a YAML file or a dictionary with the section `data`, or that section.
        steps_per_epoch: batches of an epoch, the same on every rank; the shards are then a stream, and need no index.
            See `mmdata.stream`.

    Example:
        trainer = lightning.Trainer(max_epochs=3)
        trainer.fit(model, datamodule=LoaderDataModule("configs/scenes.yaml"))
    """

    def __init__(
        self, config: str | os.PathLike[str] | dict[str, Any] | DataConfig, *, steps_per_epoch: int | None = None
    ) -> None:
        super().__init__()
        self.data = data_config(config)
        self._steps = steps_per_epoch
        self._training: EpochLoader | None = None
        self._state: dict[str, Any] | None = None  # of a checkpoint, until the loader is made

    def train_dataloader(self) -> EpochLoader:
        """This rank's batches, in the trainer's epoch."""
        if self._training is not None:  # Lightning asks again, for the length of another epoch
            return self._training
        trainer = self._checked_trainer()
        rank, world_size = trainer.global_rank, trainer.world_size
        if self._steps is None:
            loader = Loader.from_config(self.data, rank=rank, world_size=world_size)
        else:
            loader = stream(None, self.data, rank=rank, world_size=world_size, steps_per_epoch=self._steps)
        self._training = EpochLoader(loader, trainer)
        if self._state is not None:
            self._training.load_state_dict(self._state)
            self._state = None
        return self._training

    def val_dataloader(self) -> SameEpoch | list[Any]:
        """This rank's batches of `data.val`, the same each time; [] if they are not set."""
        if not self.data.val:
            return []
        trainer = self._checked_trainer()
        data = evaluation_data(self.data)
        return SameEpoch(Loader.from_config(data, rank=trainer.global_rank, world_size=trainer.world_size))

    def state_dict(self) -> dict[str, Any]:
        """The position in the training batches, kept in each checkpoint. A collective."""
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position, also one between two epochs."""
        if self._training is not None:
            self._training.load_state_dict(state_dict)
        elif self._checked_trainer().state.fn == "fit":  # not in a validation of a checkpoint
            self._state = state_dict

    def teardown(self, stage: str) -> None:
        """Drop the loader, which ends its threads."""
        self._training = self._state = None

    def _checked_trainer(self) -> Trainer:
        """The trainer.

        Raises:
            ConfigError: a launcher has started several processes and the trainer does not know of them.
            RuntimeError: there is none.
        """
        if self.trainer is None:
            raise RuntimeError("a LoaderDataModule needs its trainer: Trainer.fit(model, datamodule=…) brings it")
        check_launched(
            self.trainer.world_size,
            trainer="Lightning's Trainer",
            remedy="give Trainer(devices=…, num_nodes=…) as many as were started, or start one process with python",
        )
        return self.trainer
