"""Run under torchrun by test_two_ranks.py: what each rank's model gets in Lightning and in the Hugging Face Trainer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import CLIPModel, TrainingArguments, ViTConfig, ViTForImageClassification

from mmdata.batch import normalized, valid_inputs
from mmdata.errors import DataError
from mmdata.integrations.huggingface import LoaderTrainer
from mmdata.integrations.lightning import LoaderDataModule
from mmdata.train.ranks import collectives

RANK = int(os.environ["RANK"])


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
STEPS = 2  # of an epoch of the stream


class Contrast(lightning.LightningModule):
    """Keeps the rows it saw."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.seen.append(batch["rows"].tolist())
        inputs = valid_inputs(batch)
        return self.clip(**inputs | {"pixel_values": normalized(inputs["pixel_values"])}, return_loss=True).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watched(LoaderTrainer):
    """Keeps a fingerprint of each row it saw: the sum of its pixels; and the norm of each update's gradient."""

    seen: list[list[float]]
    norms: list[float]

    def log(self, logs: dict[str, float], *positional: Any, **others: Any) -> None:
        self.norms += [float(logs["grad_norm"])] if "grad_norm" in logs else []
        super().log(logs, *positional, **others)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *positional: Any, **others: Any) -> Any:
        self.seen.append(inputs["pixel_values"].double().sum(dim=(1, 2, 3)).tolist())
        return super().compute_loss(model, inputs, *positional, **others)


def streamed(data: dict[str, Any], model: str, out: Path) -> list[list[int]]:
    """Three epochs of a stream, stopped and resumed at the end of the first and in the second."""
    seen: list[list[int]] = []
    for step, checkpoint in ((STEPS, None), (STEPS + 1, "step=2.ckpt"), (3 * STEPS, "step=3.ckpt")):
        save = ModelCheckpoint(out, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        module = Contrast(CLIPModel.from_pretrained(model))
        streams = LoaderDataModule(data, steps_per_epoch=STEPS)
        trainer = lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_steps=step, callbacks=[save], **QUIET
        )
        trainer.fit(module, datamodule=streams, ckpt_path=checkpoint and str(out / checkpoint))
        seen += module.seen
    return seen


def in_lightning(data: dict[str, Any], model: str, **settings: Any) -> list[list[int]]:
    """The rows of two epochs."""
    module = Contrast(CLIPModel.from_pretrained(model))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    devices = {"accelerator": "cpu", "strategy": "ddp", "devices": 2, "max_epochs": 2, "num_sanity_val_steps": 0}
    lightning.Trainer(**devices, **quiet, **settings, enable_checkpointing=False).fit(
        module, datamodule=LoaderDataModule(data)
    )
    return module.seen


def in_huggingface(data: dict[str, Any], model: str, out: Path, **settings: Any) -> Watched:
    """The trainer, after two epochs."""
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    arguments = TrainingArguments(str(out), **quiet, **{"num_train_epochs": 2, "max_grad_norm": 1e9, **settings})
    trainer = Watched(data, model=CLIPModel.from_pretrained(model), args=arguments)
    trainer.seen, trainer.norms = [], []
    trainer.train()
    return trainer


def predicted(data: dict[str, Any], out: Path) -> dict[str, Any]:
    """What a classifier says of the rows of both ranks, of which one rank has fewer, and in one batch none."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=16, patch_size=16, num_labels=5))
    arguments = TrainingArguments(str(out), use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = LoaderTrainer(data | {"tokenizer": None}, model=model, args=arguments)
    found = trainer.predict(trainer.eval_dataset)
    return {
        "logits": found.predictions.tolist(),
        "labels": found.label_ids.tolist(),
        "loss": trainer.evaluate()["eval_loss"],
    }


def refused(train: Any, *positional: Any) -> str:
    """What ends a training on rows of which too many are damaged."""
    try:
        train(*positional)
    except DataError as error:
        return str(error)
    return "nothing"


def main(spec: dict[str, Any], out: Path) -> None:
    """Two epochs in each, and a file with what this rank saw."""
    data, model = spec["data"], spec["model"]
    seen = {"lightning": in_lightning(data, model), "huggingface": in_huggingface(data, model, out).seen}
    seen["stream"] = streamed(data, model, out)
    labelled = spec["labelled"] | {"val": {"shards": spec["labelled"]["shards"]}}
    steady = {"gradient_accumulation_steps": 3, "learning_rate": 0.0, "num_train_epochs": 1, "eval_strategy": "epoch"}
    trainer = in_huggingface(labelled, model, out, **steady)
    seen["norm"] = trainer.norms
    seen["eval_loss"] = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    seen["predicted"] = predicted(spec["uneven"] | {"val": {"shards": spec["uneven"]["shards"]}}, out)
    seen["bad lightning"] = refused(in_lightning, spec["bad"], model)
    seen["bad huggingface"] = refused(in_huggingface, spec["bad"], model, out)
    (out / f"rank{RANK}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    collectives.finish()
