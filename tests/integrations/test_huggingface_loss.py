"""The Hugging Face Trainer's losses on our batches: of accumulated batches, and of evaluations during training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmdata.batch import normalized, valid_inputs
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError, DataError
from mmdata.images import ImageInfo
from mmdata.loader import Loader
from mmdata.tars.write import Sample
from tests.shard_writer import ShardWriter

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'mmdata[huggingface]'")

from transformers import CLIPImageProcessor, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

from mmdata.integrations.huggingface import LoaderTrainer


class KeepGradients(TrainerCallback):
    """The gradient of each update."""

    def __init__(self) -> None:
        self.kept: list[list[Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.kept.append([p.grad.clone() for p in model.parameters()])


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    return TrainingArguments(str(folder), **quiet | {"num_train_epochs": 1, "max_grad_norm": 0.0} | settings)


def losses(clip: Any, loader: Loader) -> list[Tensor]:
    """CLIP's loss of each batch, without the Trainer."""
    found: list[Tensor] = []
    for batch in loader:
        inputs = valid_inputs(batch)
        inputs["pixel_values"] = normalized(inputs["pixel_values"])
        found.append(clip(**inputs, return_loss=True).loss)
    return found


@pytest.mark.parametrize("corpus", ["data", "labelled"])
def test_accumulated_gradient_is_the_mean_of_the_batches(
    request: pytest.FixtureRequest, clip: Any, tmp_path: Path, corpus: str
):
    data = request.getfixturevalue(corpus)
    assert ("labels" in next(iter(Loader.from_config(data)))) == (corpus == "labelled")
    of_batches = losses(clip, Loader.from_config(data))
    for start, stop in ((0, 2), (2, 3)):  # an epoch of three batches is an update of two and one of the last
        wanted = torch.stack(of_batches[start:stop]).mean()
        gradient = torch.autograd.grad(wanted, list(clip.parameters()), retain_graph=True)
        keep = KeepGradients()
        settings = {"gradient_accumulation_steps": 2, "learning_rate": 0.0, "weight_decay": 0.0}
        trainer = LoaderTrainer(data, model=clip, args=arguments(tmp_path, **settings), callbacks=[keep])
        trainer.train()
        found = keep.kept[start // 2]
        torch.testing.assert_close(found, list(gradient), rtol=0, atol=1e-5)
        assert max(float(g.abs().max()) for g in gradient) > 0.01  # a factor of two would be seen
        logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert logged[start // 2] == pytest.approx(wanted.item(), abs=1e-4)


def test_evaluation_during_training_finds_the_best_model_and_loads_it(
    labelled: dict[str, Any], clip: Any, tmp_path: Path
):
    data = labelled | {"val": {"shards": labelled["shards"]}}
    during = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    wanted = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "learning_rate": 1e-3}
    args = arguments(tmp_path, num_train_epochs=3, **during, **wanted)
    trainer = LoaderTrainer(data, model=clip, args=args)
    trainer.train()
    evaluated = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    assert list(evaluated) == [3, 6, 9]
    best = max(evaluated, key=evaluated.__getitem__)
    saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    for name, value in clip.state_dict().items():
        assert torch.equal(value, saved.get(name, value))
    loader = Loader.from_config(evaluation_data(DataConfig(**data)))
    with torch.no_grad():
        mean = torch.stack(losses(clip.eval(), loader)).mean().item()
    assert evaluated[best] == pytest.approx(mean, abs=1e-4)


class PlainLoss(torch.nn.Module):
    """Takes no `return_loss`, and `labels` that it does not need; gives its loss in any case."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> Any:
        inputs = {"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask}
        return {"loss": self.clip(**inputs, return_loss=True).loss}


@pytest.mark.parametrize("corpus", ["data", "labelled"])
def test_evaluation_has_a_loss_whatever_the_model_takes(
    request: pytest.FixtureRequest, clip: Any, tmp_path: Path, corpus: str
):
    data = request.getfixturevalue(corpus)
    args = arguments(tmp_path, prediction_loss_only=True)
    given = data | {"val": {"shards": data["shards"]}}
    trainer = LoaderTrainer(given, model=PlainLoss(clip), args=args, processing_class=CLIPImageProcessor())
    found = trainer.evaluate()
    assert found["eval_loss"] > 0
    # Both figures are rounded: the seconds to 1e-4, the samples a second to 1e-3.
    seconds, speed = found["eval_runtime"], found["eval_samples_per_second"]
    rows = trainer.num_examples(trainer.get_eval_dataloader())
    assert speed * seconds == pytest.approx(rows, rel=0, abs=1e-4 * speed + 1e-3 * seconds)


def cross_entropy_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """As a user gives it: the Trainer then takes the labels out of the inputs."""
    return cross_entropy(outputs["logits"], labels)


@pytest.mark.parametrize("own_loss", [None, cross_entropy_of])
def test_rows_without_a_label_are_left_out_of_a_classifiers_loss(tmp_path: Path, photo: Any, own_loss: Any):
    with ShardWriter(tmp_path / "shards", shard_rows=12) as writer:
        for i in range(12):  # batches of 4: two labels, none, four
            label = None if i in (0, 2, 4, 5, 6, 7) else i % 5
            writer.write(Sample(f"{i:04d}", photo(40, 40, seed=i), ImageInfo("JPEG", 40, 40, 1), ["x"], label=label))
    data = {"shards": str(tmp_path / "shards"), "global_batch_size": 4, "image_size": 32}
    data |= {"shuffle": False, "transform": "eval"}
    sizes: dict[str, Any] = {"image_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=16, patch_size=16, num_labels=5))
    wanted: list[float] = []
    for batch in Loader.from_config(data):
        labelled = batch["labels"] >= 0
        pixels = normalized(batch["pixel_values"], (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # ViT's
        logits = model(pixel_values=pixels).logits[labelled]
        wanted.append(float(cross_entropy(logits, batch["labels"][labelled])) if labelled.any() else 0.0)
    keep = KeepGradients()
    args = arguments(tmp_path, learning_rate=0.0, logging_nan_inf_filter=False)
    trainer = LoaderTrainer(data, model=model, args=args, callbacks=[keep], compute_loss_func=own_loss)
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx(wanted, abs=1e-4)
    assert [any(float(g.abs().max()) for g in kept) for kept in keep.kept] == [True, False, True]
    assert all(bool(g.isfinite().all()) for kept in keep.kept for g in kept)


@pytest.mark.parametrize("asked", [{"eval_strategy": "epoch"}, {"eval_strategy": "steps"}, {"eval_on_start": True}])
def test_evaluation_without_val_shards_is_refused_before_training(
    data: dict[str, Any], clip: Any, tmp_path: Path, asked: dict[str, Any]
):
    with pytest.raises(ConfigError, match=r"data\.val is not set: there is nothing to evaluate on"):
        LoaderTrainer(data, model=clip, args=arguments(tmp_path, **asked))


def test_evaluation_that_cannot_be_is_refused_before_training(data: dict[str, Any], clip: Any, tmp_path: Path):
    gone = {"val": {"shards": str(tmp_path / "gone")}}
    with pytest.raises(DataError, match="gone"):
        LoaderTrainer(data | gone, model=clip, args=arguments(tmp_path, eval_strategy="epoch"))


@pytest.mark.parametrize("name", ["train_dataset", "data_collator", "eval_dataset"])
def test_other_data_sets_are_refused_not_ignored(data: dict[str, Any], clip: Any, tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=rf"from data\.shards and data\.val: leave {name} out"):
        LoaderTrainer(data, model=clip, args=arguments(tmp_path), **{name: [1]})


@pytest.mark.parametrize("given", [[1], {"a": [1]}])
def test_evaluation_of_other_data_sets_is_refused(data: dict[str, Any], clip: Any, tmp_path: Path, given: Any):
    with pytest.raises(ValueError, match=r"evaluates and predicts on data\.val: set it, and give no other data set"):
        LoaderTrainer(data, model=clip, args=arguments(tmp_path)).evaluate(given)


def test_trainer_that_is_alone_in_a_launchers_process_is_refused(
    data: dict[str, Any], clip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    args = arguments(tmp_path)
    assert args.world_size == 1  # found out here, and kept
    assert not {"RANK", "WORLD_SIZE"} & os.environ.keys()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"rank 1 of 2 .*the Hugging Face Trainer has a world of 1: .*use_cpu=True"):
        LoaderTrainer(data, model=clip, args=args)
