"""The Hugging Face Trainer runs our loader: each row once an epoch, another order each epoch, and resumes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata.batch import normalized, valid_inputs
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError
from mmdata.loader import Loader

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'mmdata[huggingface]'")

from transformers import TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

from mmdata.integrations.huggingface import LoaderTrainer

ROWS, STEPS = 22, 3  # of the fixture `data`
NOT_EMBEDDINGS = ["logits_per_image", "logits_per_text", "text_model_output", "vision_model_output"]


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


@pytest.mark.parametrize(("repeat", "rows"), [(3, 9 * 8), (0.5, 2 * 8)])
def test_train_counts_a_row_as_often_as_it_is_trained(
    data: dict[str, Any], clip: Any, tmp_path: Path, repeat: float, rows: int
):
    repeated = data | {"shards": [{"shards": data["shards"], "repeat": repeat}]}
    trainer = LoaderTrainer(repeated, model=clip, args=arguments(tmp_path))
    assert trainer.num_examples(trainer.get_train_dataloader()) == rows
    assert trainer.args.per_device_train_batch_size == 8


@pytest.mark.parametrize(("accumulate", "stop"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 3)])
@pytest.mark.sweep(keep=2)
def test_train_resumes_with_the_batch_that_follows(
    data: dict[str, Any], clip: Any, tmp_path: Path, accumulate: int, stop: int
):
    saving = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": accumulate}
    first = Watched(data, model=clip, args=arguments(tmp_path, **saving), callbacks=[CrashAfter(stop)])
    with pytest.raises(CrashError):
        first.train()
    second = Watched(data, model=clip, args=arguments(tmp_path, **saving))
    second.train(resume_from_checkpoint=True)
    updates = math.ceil(STEPS / accumulate)  # of an epoch
    assert second.state.global_step == 2 * updates
    whole = expected(data)
    for seen, wanted in zip(first.seen + second.seen, whole, strict=True):
        torch.testing.assert_close(seen, wanted)
    assert len(first.seen) == stop // updates * STEPS + stop % updates * accumulate


def test_train_with_boxes_resumes_and_evaluates_on_shards_without(
    data: dict[str, Any], boxed: dict[str, Any], clip: Any, tmp_path: Path
):
    given = boxed | {"val": {"shards": data["shards"]}}
    test_train_resumes_with_the_batch_that_follows(given, clip, tmp_path, accumulate=1, stop=2)
    trainer = LoaderTrainer(given, model=clip, args=arguments(tmp_path, eval_strategy="epoch"))
    assert math.isfinite(trainer.evaluate()["eval_loss"])


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
    with pytest.raises(ValueError, match=r"evaluates and predicts on data\.val: set it, and give no"):
        LoaderTrainer(data, model=clip, args=arguments(tmp_path)).evaluate(eval_dataset=[1])


def vit() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**sizes, intermediate_size=16, patch_size=16, num_labels=5)).eval()


def logits_of(model: Any, data: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of the evaluation's valid rows, in the order of its batches, without a trainer."""
    rows = evaluation_data(DataConfig(**data, val={"shards": data["shards"]}))
    batches = [valid_inputs(batch) for batch in Loader.from_config(rows)]
    with torch.no_grad():
        found = [model(normalized(inputs["pixel_values"], [0.5] * 3, [0.5] * 3)).logits for inputs in batches]
    return torch.cat(found), torch.cat([inputs["labels"] for inputs in batches])


def test_predict_and_evaluate_give_the_rows_of_the_loader(labelled: dict[str, Any], tmp_path: Path):
    labelled = labelled | {"tokenizer": None}
    model, data = vit(), labelled | {"val": {"shards": labelled["shards"]}}
    trainer = LoaderTrainer(data, model=model, args=arguments(tmp_path), compute_metrics=accuracy)
    logits, labels = logits_of(model, labelled)
    right = (logits.argmax(1) == labels).double().mean().item()
    for found in (trainer.predict(trainer.eval_dataset), trainer.predict(None)):
        torch.testing.assert_close(torch.tensor(found.predictions), logits)
        assert found.label_ids.tolist() == labels.tolist()
        assert found.metrics["test_accuracy"] == pytest.approx(right)
    for scores in (trainer.evaluate(), trainer.evaluate(trainer.eval_dataset)):
        assert scores["eval_accuracy"] == pytest.approx(right)
    with pytest.raises(ValueError, match=r"evaluates and predicts on data\.val: set it, and give no other data set"):
        trainer.predict([1])


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()}


def test_predict_of_a_clip_gives_its_embeddings(data: dict[str, Any], clip: Any, tmp_path: Path):
    given = data | {"val": {"shards": data["shards"]}}
    found = LoaderTrainer(given, model=clip, args=arguments(tmp_path)).predict(None, ignore_keys=NOT_EMBEDDINGS)
    batches = [valid_inputs(batch) for batch in Loader.from_config(evaluation_data(DataConfig(**given)))]
    with torch.no_grad():
        outputs = [clip(**inputs | {"pixel_values": normalized(inputs["pixel_values"])}) for inputs in batches]
    texts, images = (torch.tensor(values) for values in found.predictions)
    torch.testing.assert_close(texts, torch.cat([output.text_embeds for output in outputs]))
    torch.testing.assert_close(images, torch.cat([output.image_embeds for output in outputs]))
