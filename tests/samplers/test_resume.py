"""Checkpoints in mid-epoch: Lightning with torchdata's StatefulDataLoader, and the Hugging Face Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmdata.samplers import BucketBatchSampler, TwoStreamBatchSampler

ROWS = 22


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"row": torch.tensor([float(row)])}


def bucket() -> BucketBatchSampler:
    return BucketBatchSampler([i % 5 for i in range(ROWS)], 4, bounds=2)  # 6 steps


def two_stream() -> TwoStreamBatchSampler:
    return TwoStreamBatchSampler(range(18), range(18, 22), 4, 1)  # 6 steps


class CrashError(Exception):
    """What a test raises in mid-training."""


def expected(make: Any) -> list[list[int]]:
    sampler = make()
    return [rows for _ in range(2) for rows in sampler]


@pytest.mark.parametrize("make", [bucket, two_stream])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [2, 6, 9])
@pytest.mark.sweep(keep=4)
def test_lightning_resumes_at_the_next_batch(tmp_path: Path, make: Any, num_workers: int, stop: int):
    lightning = pytest.importorskip("lightning.pytorch", reason="pip install 'mmdata[lightning]'")
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Watch(lightning.LightningModule):
        def __init__(self, stop: int | None) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.stop = stop
            self.seen: list[list[int]] = []

        def training_step(self, batch: Any, _: int) -> Tensor:
            if self.global_step == self.stop:
                raise CrashError
            self.seen.append(batch["row"][:, 0].int().tolist())
            return self.layer(batch["row"]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(model: Any, **settings: Any) -> list[list[int]]:
        loader = stateful.StatefulDataLoader(Rows(), batch_sampler=make(), num_workers=num_workers)
        save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        lightning.Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[save], **quiet).fit(
            model, loader, **settings
        )
        return model.seen

    first = Watch(stop)
    with pytest.raises(CrashError):
        fit(first)
    assert first.seen == expected(make)[:stop]
    assert fit(Watch(None), ckpt_path=str(tmp_path / f"step={stop}.ckpt")) == expected(make)[stop:]


@pytest.mark.parametrize("stop", [2, 6, 9])
@pytest.mark.sweep(keep=1)
def test_hugging_face_trainer_resumes_at_the_next_batch(tmp_path: Path, stop: int):
    pytest.importorskip("accelerate", reason="pip install 'mmdata[huggingface]'")
    from accelerate.data_loader import DataLoaderShard
    from transformers import Trainer, TrainingArguments

    class Watched(Trainer):
        seen: list[list[int]]

        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoaderShard(Rows(), batch_sampler=bucket())

        def compute_loss(self, model: Any, inputs: Any, *positional: Any, **others: Any) -> Any:
            self.seen.append(inputs["row"][:, 0].int().tolist())
            return model(inputs["row"]).mean()

    def train(max_steps: int, **settings: Any) -> list[list[int]]:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=max_steps, save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True
        )
        trainer = Watched(model=torch.nn.Linear(1, 1), args=arguments, train_dataset=Rows())
        trainer.seen = []
        trainer.train(**settings)
        return trainer.seen

    assert train(stop) == expected(bucket)[:stop]
    assert train(12, resume_from_checkpoint=True) == expected(bucket)[stop:]
