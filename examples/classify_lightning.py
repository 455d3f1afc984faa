"""python examples/classify_lightning.py shards/flowers/train shards/flowers/val MODEL     # a folder or a hub's name

Fine-tune an image classifier with Lightning, on any number of devices. A folder for each class becomes shards with
`mmdata convert flowers shards/flowers --val-share 0.1`. After a stop or a kill, the same command continues from the
last checkpoint. OUT/model has the names of the classes and the image processor:
`pipeline("image-classification", "OUT/model")` works.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoImageProcessor, AutoModelForImageClassification

import mmdata
from mmdata.batch import normalized, valid_inputs
from mmdata.integrations.adapt import pixel_stats
from mmdata.integrations.lightning import LoaderDataModule


class Classify(LightningModule):
    """A classifier of transformers, and its accuracy on the validation set."""

    def __init__(self, model: Any, processor: Any, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr
        self.stats = pixel_stats(model, processor)  # mean and deviation of pixels that it expects

    def logits_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Of the rows that could be loaded; a label of -1 is none."""
        inputs = valid_inputs(batch)
        return self.model(normalized(inputs["pixel_values"], *self.stats)).logits, inputs["labels"]

    def training_step(self, batch: Any, _: int) -> Tensor:
        """The loss of one batch."""
        logits, labels = self.logits_and_labels(batch)
        loss = cross_entropy(logits, labels, ignore_index=-1, reduction="sum") / (labels >= 0).sum().clamp(min=1)
        self.log("loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        """Counts the right answers of one batch."""
        logits, labels = self.logits_and_labels(batch)
        right = (logits.argmax(1) == labels)[labels >= 0].float()
        if len(right):
            self.log("accuracy", right.mean(), prog_bar=True, batch_size=len(right), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    """Train for some epochs; a checkpoint that is there is resumed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("val_shards")
    parser.add_argument("model")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="over all devices")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--out", type=Path, default=Path("runs/classify-lightning"))
    given = parser.parse_args()

    names = mmdata.Index.open(given.shards).class_names
    if not names or names != mmdata.Index.open(given.val_shards).class_names:  # labels are numbers, each folder's own
        parser.error("both folders of shards need labels, of the same classes")
    model = AutoModelForImageClassification.from_pretrained(
        given.model,
        id2label=dict(enumerate(names)),
        label2id={name: label for label, name in enumerate(names)},
        ignore_mismatched_sizes=True,  # the head of other classes is made anew
    ).train()  # comes in eval mode, which Lightning leaves as it is
    processor = AutoImageProcessor.from_pretrained(given.model)
    data = LoaderDataModule(
        {
            "shards": given.shards,
            "val": {"shards": given.val_shards},
            "image_size": given.image_size,  # no tokenizer
            "global_batch_size": given.batch_size,
            "crop_scale": [0.25, 1.0],
            "augment": {"horizontal_flip_prob": 0.5},
        }
    )
    trainer = Trainer(
        max_epochs=given.epochs,
        callbacks=[ModelCheckpoint(given.out, filename="last", enable_version_counter=False)],
        default_root_dir=given.out,
        log_every_n_steps=10,
    )
    last = given.out / "last.ckpt"
    trainer.fit(Classify(model, processor, given.lr), datamodule=data, ckpt_path=str(last) if last.is_file() else None)
    if trainer.is_global_zero:
        model.save_pretrained(given.out / "model")
        processor.save_pretrained(given.out / "model")


if __name__ == "__main__":
    main()
