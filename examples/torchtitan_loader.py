"""mmdata in torchtitan. Copy this file; `PhotosLoader.Config(dataset_path="photos.yaml")` is the `dataloader`.

An epoch is finite, with as many steps on every rank. A checkpoint of torchtitan continues at the next batch, also at
another data-parallel degree, because the global batches stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

import mmdata


class PhotosLoader(BaseDataLoader):
    """This data-parallel rank's batches of a section `data`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`dataset_path` is a YAML file with the section `data`."""

        epochs: int = 1

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
        self.loader = mmdata.Loader.from_config(config.dataset_path, rank=dp_rank, world_size=dp_world_size)
        self.epochs = config.epochs

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for epoch in range(self.loader.state_dict()["epoch"], self.epochs):
            self.loader.set_epoch(epoch)
            for batch in self.loader:  # what your model takes, and its labels
                yield {"input": batch["pixel_values"], "texts": batch["input_ids"]}, batch["valid"]

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank: torchtitan's checkpoint keeps one."""
        return {"position": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the next batch."""
        self.loader.load_state_dict(json.loads(state_dict["position"]))
