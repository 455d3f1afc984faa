"""The loader in the Hugging Face Trainer: its batches are used as they are, neither sharded nor dispatched again.

`train(resume_from_checkpoint=True)` goes on with the very batch that follows; the Trainer gets there by reading the
epoch's earlier batches again.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from mmdata.data_config import DataConfig, evaluation_data
from mmdata.integrations.adapt import CLIP_MEAN, CLIP_STD, normalized, valid_inputs
from mmdata.loader import Loader
from mmdata.loader.loader import data_config


class _Batches(IterableDataset[dict[str, Any]]):
    """A loader as the data set of a DataLoader that batches nothing: each item is a whole batch of model inputs."""

    def __init__(self, loader: Loader, *, repeat: bool, extra: dict[str, Any]) -> None:
        self.loader = loader
        self._repeat = repeat  # the first epoch each time
        self._extra = extra

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        if not self._repeat:
            self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._repeat:
            self.loader.set_epoch(0)
        for batch in self.loader:
            yield valid_inputs(batch) | self._extra


class LoaderTrainer(Trainer):
    """A Trainer that trains on `data.shards` and evaluates on `data.val_shards`.

    Masked rows are left out before the model sees a batch; pixels are normalised on the device.
    `args.per_device_train_batch_size` is set to what the settings make of it, so that the Trainer's figures are right.

    Args:
        config: a YAML file or a dictionary with the section `data`, or that section.
        image_mean: of RGB values from 0 to 1, as the model expects them.
        image_std: likewise.
        others: of `transformers.Trainer`, but for its data sets and collator.

    Example:
        trainer = LoaderTrainer("configs/scenes.yaml", model=model, args=TrainingArguments(num_train_epochs=3))
        trainer.train()
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | dict[str, Any] | DataConfig,
        *,
        image_mean: Sequence[float] = CLIP_MEAN,
        image_std: Sequence[float] = CLIP_STD,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.data = data_config(config)
        self._normalization = (image_mean, image_std)
        assert self.model is not None  # Trainer has refused to be made without one
        asks = "return_loss" in inspect.signature(self.model.forward).parameters
        self._extra = {"return_loss": True} if asks else {}
        self.args.per_device_train_batch_size = self.data.global_batch_size // self.args.world_size

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's batches."""
        return self._batches(self.data, repeat=False)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """This rank's batches of `data.val_shards`, the same each time."""
        if eval_dataset is not None:
            raise ValueError("a LoaderTrainer evaluates on data.val_shards: eval_dataset is not used")
        return self._batches(evaluation_data(self.data), repeat=True)

    def num_examples(self, dataloader: Any) -> int:
        """Rows of an epoch."""
        return dataloader.dataset.loader.plan.num_rows

    def _batches(self, data: DataConfig, *, repeat: bool) -> DataLoader[Any]:
        loader = Loader.from_config(data, rank=self.args.process_index, world_size=self.args.world_size)
        # What accelerate makes of a DataLoader once it has sharded it: moves batches to the device, can skip the first.
        batches = _Batches(loader, repeat=repeat, extra=self._extra)
        return cast("DataLoader[Any]", DataLoaderShard(batches, device=self.args.device, batch_size=None))

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared = super()._prepare_inputs(inputs)
        pixel_values = normalized(prepared["pixel_values"], *self._normalization)
        return {**prepared, "pixel_values": pixel_values}
