"""The Hugging Face Trainer runs our loader: each row once an epoch, another order each epoch, and resumes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata.errors import ConfigError
from mmdata.loader import Loader

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'mmdata[huggingface]'")

from transformers import TrainerCallback, TrainingArguments

from mmdata.integrations.huggingface import LoaderTrainer

ROWS, STEPS = 22, 3  # of the fixture `data`


class Watched(LoaderTrainer):
    """Keeps the texts of every batch that reached the model."""

    def __init__(self, *positional: Any, **others: Any) -> None:
        super().__init__(*positional, **others)
        self.seen: list[torch.Tensor] = []

    def compute_loss(self, model: Any, inputs: dict[str, Any], *positional: Any, **others: Any) -> Any:
        self.seen.append(inputs["pixel_values"].clone())
        assert inputs["pixel_values"].dtype == torch.float32
        return super().compute_loss(model, inputs, *positional, **others)


class CrashError(Exception):
    """What a test raises in mid-training."""


class CrashAfter(TrainerCallback):
    """Ends training without a goodbye after some steps; the checkpoint of the step before is there."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.steps:
            raise CrashError


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    return TrainingArguments(str(folder), **quiet | {"num_train_epochs": 2} | settings)


def expected(data: dict[str, Any], epochs: int = 2) -> list[torch.Tensor]:
    """Valid pixels of every batch, in order, straight from the loader."""
    loader = Loader.from_config(data)
    batches = [(batch["pixel_values"], batch["valid"]) for _ in range(epochs) for batch in loader]
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(1, 3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(1, 3, 1, 1)
    return [(pixels[valid] / 255 - mean) / std for pixels, valid in batches]


def test_train_uses_the_loaders_batches_as_they_are(data: dict[str, Any], clip: Any, tmp_path: Path):
    trainer = Watched(data, model=clip, args=arguments(tmp_path))
    before = [parameter.clone() for parameter in clip.parameters()]
    result = trainer.train()
    assert len(trainer.seen) == 2 * STEPS
    for seen, wanted in zip(trainer.seen, expected(data), strict=True):
        torch.testing.assert_close(seen, wanted)
    assert sum(len(seen) for seen in trainer.seen) == 2 * ROWS
    assert math.isfinite(result.training_loss)
    assert any(not torch.equal(a, b) for a, b in zip(before, clip.parameters(), strict=True))
    assert trainer.num_examples(trainer.get_train_dataloader()) == ROWS
    assert trainer.args.per_device_train_batch_size == 8


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_train_resumes_with_the_batch_that_follows(data: dict[str, Any], clip: Any, tmp_path: Path, stop: int):
    saving = {"save_strategy": "steps", "save_steps": 1}
    first = Watched(data, model=clip, args=arguments(tmp_path, **saving), callbacks=[CrashAfter(stop)])
    with pytest.raises(CrashError):
        first.train()
    second = Watched(data, model=clip, args=arguments(tmp_path, **saving))
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 2 * STEPS
    whole = expected(data)
    for seen, wanted in zip(first.seen + second.seen, whole, strict=True):
        torch.testing.assert_close(seen, wanted)
    assert len(first.seen) == stop


def test_train_accumulates_over_the_loaders_batches(data: dict[str, Any], clip: Any, tmp_path: Path):
    trainer = Watched(data, model=clip, args=arguments(tmp_path, gradient_accumulation_steps=2))
    trainer.train()
    assert trainer.state.global_step == 4  # two batches and one, twice
    assert len(trainer.seen) == 2 * STEPS


def test_evaluate_sees_val_shards_in_the_same_batches_each_time(data: dict[str, Any], clip: Any, tmp_path: Path):
    trainer = Watched(data | {"val": {"shards": data["shards"]}}, model=clip, args=arguments(tmp_path))
    losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    assert losses[0] == losses[1] > 0
    assert [len(seen) for seen in trainer.seen] == 2 * [8, 8, 6]
    for first, second in zip(trainer.seen[:STEPS], trainer.seen[STEPS:], strict=True):
        assert torch.equal(first, second)


def test_evaluate_without_val_shards_names_the_setting(data: dict[str, Any], clip: Any, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data\.val is not set: there is nothing to evaluate on"):
        LoaderTrainer(data, model=clip, args=arguments(tmp_path)).evaluate()
    with pytest.raises(ValueError, match=r"evaluates on data\.val: eval_dataset is not used"):
        LoaderTrainer(data, model=clip, args=arguments(tmp_path)).evaluate(eval_dataset=[1])


def test_trainer_refuses_files_that_the_device_would_decode(data: dict[str, Any], clip: Any, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^accelerate moves a LoaderTrainer's batches, and decodes no files: set "):
        LoaderTrainer(data | {"decode": "device"}, model=clip, args=arguments(tmp_path))
