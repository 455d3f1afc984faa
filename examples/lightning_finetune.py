"""python examples/lightning_finetune.py SHARDS MODEL --epochs 3     # MODEL: a folder with a tokenizer, or a hub name

Fine-tune a CLIP with Lightning, on any number of devices. After a stop or a kill, the same command continues from
the last checkpoint, at any batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import CLIPModel

from mmdata.batch import normalized, valid_inputs
from mmdata.integrations.adapt import pixel_stats
from mmdata.integrations.lightning import LoaderDataModule


class FineTune(LightningModule):
    """CLIP's own loss on each device's rows."""

    def __init__(self, model: CLIPModel, lr: float) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.stats = pixel_stats(model)  # mean and deviation of pixels that it expects

    def training_step(self, batch: Any, _: int) -> Tensor:
        """The loss of one batch."""
        inputs = valid_inputs(batch)
        inputs["pixel_values"] = normalized(inputs["pixel_values"], *self.stats)
        loss = self.model(**inputs, return_loss=True).loss
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["rows"]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    """Train for some epochs; a checkpoint that is there is resumed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="over all devices")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--save-steps", type=int, default=500, help="a checkpoint after so many, and each epoch")
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    given = parser.parse_args()

    model = CLIPModel.from_pretrained(given.model).train()  # comes in eval mode, which Lightning leaves as it is
    data = LoaderDataModule(
        {
            "shards": given.shards,
            "tokenizer": given.model,
            "global_batch_size": given.batch_size,
            "image_size": model.config.vision_config.image_size,
            "max_length": model.config.text_config.max_position_embeddings,
        }
    )
    # One ModelCheckpoint saves either every so many steps or every so many epochs: the steps alone would leave out what
    # is trained after the last multiple of them. Both write the same file.
    saves = [
        ModelCheckpoint(given.out, filename="last", enable_version_counter=False, save_on_train_epoch_end=True, **every)
        for every in ({"every_n_train_steps": given.save_steps}, {"every_n_epochs": 1})
    ]
    torch.set_float32_matmul_precision("high")  # what is left in float32: TF32 on a GPU
    has_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    trainer = Trainer(
        max_epochs=given.epochs,
        callbacks=saves,
        default_root_dir=given.out,
        log_every_n_steps=10,
        precision="bf16-mixed" if has_bfloat16 else "32-true",
    )
    last = given.out / "last.ckpt"
    trainer.fit(FineTune(model, given.lr), datamodule=data, ckpt_path=str(last) if last.is_file() else None)


if __name__ == "__main__":
    main()
