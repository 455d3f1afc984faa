"""Run under torchrun by test_trainers.py: which rows each rank's model gets from Lightning and from accelerate."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from mmdata.samplers import BucketBatchSampler, TwoStreamBatchSampler
from mmdata.train.ranks import collectives

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LENGTHS = [(7 * i) % 13 for i in range(51)]  # 51: neither 2 ranks nor batches of 4 divide it
OWN = {"rank": RANK, "world_size": WORLD_SIZE}


class Rows(Dataset[int]):
    """Each row is its number."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, row: int) -> int:
        return row


def bucket(**settings: Any) -> BucketBatchSampler:
    return BucketBatchSampler(**{"lengths": LENGTHS, "batch_size": 4, "bounds": 3, "seed": 5} | settings)


def two_stream(**settings: Any) -> TwoStreamBatchSampler:
    return TwoStreamBatchSampler(
        range(45), secondary_indices=range(45, 51), batch_size=6, secondary_batch_size=2, **settings
    )


class Watch(lightning.LightningModule):
    """Keeps the rows it saw, by epoch."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.make = make
        self.seen: list[list[list[int]]] = []

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        if number == 0 or not self.seen:  # an epoch, or the rest of one, begins
            self.seen.append([])
        self.seen[-1].append(batch.tolist())
        return self.layer(batch.float()[:, None]).mean()

    def predict_step(self, batch: Tensor, _: int) -> list[int]:
        return batch.tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Hooked(Watch):
    """Makes its DataLoader in the hook, where Lightning watches."""

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_sampler=self.make())


def trainer(**settings: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    kept = {"max_epochs": 2, "enable_checkpointing": False, "strategy": "ddp" if WORLD_SIZE > 1 else "auto"}
    return lightning.Trainer(accelerator="cpu", devices=WORLD_SIZE, **quiet | kept | settings)


def fit(make: Callable[[], Any], *, hooked: bool, replaced: bool) -> list[list[list[int]]]:
    model = Hooked(make) if hooked else Watch(make)
    given = {} if hooked else {"train_dataloaders": DataLoader(Rows(), batch_sampler=make())}
    trainer(use_distributed_sampler=replaced).fit(model, **given)
    return model.seen


def predict(sampler: Any) -> list[list[int]]:
    return trainer().predict(Watch(bucket), DataLoader(Rows(), batch_sampler=sampler))


def limited() -> list[list[list[int]]]:
    """Epochs that end early: only Lightning's set_epoch brings the next."""
    model = Watch(bucket)
    trainer(limit_train_batches=3).fit(model, DataLoader(Rows(), batch_sampler=bucket()))
    return model.seen


def loaded() -> list[list[int]]:
    """An epoch that begins at a state loaded before Lightning makes its own sampler."""
    sampler = bucket(**OWN)
    sampler.load_state_dict(sampler.state_at(0, 2))
    model = Watch(bucket)
    trainer(max_epochs=1).fit(model, DataLoader(Rows(), batch_sampler=sampler))
    return model.seen[0]


def resumed(out: Path) -> list[list[int]]:
    """What follows a checkpoint after two batches, which holds the state of rank 0 only."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def go_on(max_steps: int, **settings: Any) -> list[list[int]]:
        model = Watch(bucket)
        save = ModelCheckpoint(out, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        watched = trainer(max_epochs=1, max_steps=max_steps, enable_checkpointing=True, callbacks=[save])
        watched.fit(model, StatefulDataLoader(Rows(), batch_sampler=bucket(), num_workers=1), **settings)
        return [rows for epoch in model.seen for rows in epoch]

    return go_on(2) + go_on(-1, ckpt_path=str(out / "step=2.ckpt"))


def accelerated(*, epochs: int = 2) -> list[list[list[int]]]:
    """One sampler of global batches, cut by accelerate."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    whole = bucket(batch_size=4 * WORLD_SIZE, rank=0, world_size=1)  # or it would give a rank's share, cut once more
    loader = accelerator.prepare(DataLoader(Rows(), batch_sampler=whole))
    return [[batch.tolist() for batch in loader] for _ in range(epochs)]


def main(out: Path) -> None:
    """Every way, and a file with what this rank saw."""
    seen: dict[str, Any] = {}
    for make, hooked in itertools.product((bucket, two_stream), (False, True)):
        where = f"{make.__name__} {'hook' if hooked else 'direct'}"
        seen[f"{where} replaced"] = fit(make, hooked=hooked, replaced=True)
        seen[f"{where} own"] = fit(lambda make=make: make(**OWN), hooked=hooked, replaced=False)
        seen[f"{where} both"] = fit(lambda make=make: make(**OWN), hooked=hooked, replaced=True)
    seen["limited"] = limited()
    seen["loaded"] = loaded()
    if find_spec("torchdata"):
        seen["resumed"] = resumed(out)
    seen["predict"] = predict(bucket(drop_last=True, shuffle=False))
    seen["accelerate"] = accelerated()
    if WORLD_SIZE > 1:
        seen["distributed sampler"] = list(bucket(sampler=DistributedSampler(Rows())))
    (out / f"rank{RANK}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    collectives.finish()
