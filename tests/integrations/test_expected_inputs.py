"""Pixels, image sizes and text lengths are those that the model was trained with, by transformers' own processors."""

from __future__ import annotations

import logging
import shutil
import socket
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from mmdata.batch import normalized
from mmdata.errors import ConfigError
from mmdata.integrations.adapt import pixel_stats
from mmdata.loader import Loader

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'mmdata[huggingface]'")

from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from mmdata.integrations.huggingface import LoaderTrainer

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {**SMALL, "image_size": 24, "patch_size": 8}
TEXT = {**SMALL, "vocab_size": 300, "max_position_embeddings": 16}
SIZE = {"height": 24, "width": 24}


class Watched(LoaderTrainer):
    """Keeps the pixels of every batch that reached the model."""

    def __init__(self, *positional: Any, **others: Any) -> None:
        super().__init__(*positional, **others)
        self.seen: list[torch.Tensor] = []

    def compute_loss(self, model: Any, inputs: dict[str, Any], *positional: Any, **others: Any) -> Any:
        self.seen.append(inputs["pixel_values"].clone())
        return super().compute_loss(model, inputs, *positional, **others)


def vit() -> Any:
    return ViTForImageClassification(ViTConfig(**VISION, num_labels=5))


def siglip() -> Any:
    return SiglipModel(SiglipConfig(text_config={**TEXT, "projection_size": 32}, vision_config=VISION))


def arguments(folder: Path) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    return TrainingArguments(str(folder), max_steps=1, **quiet)


def unset(data: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that the model decides."""
    return {name: value for name, value in data.items() if name not in ("image_size", "max_length")}


PROCESSORS = {
    "vit": (vit, lambda: ViTImageProcessor(size=SIZE)),
    "siglip": (siglip, lambda: SiglipImageProcessor(size=SIZE)),
    "other numbers": (vit, lambda: ViTImageProcessor(size=SIZE, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6])),
    "from -1 to 1": (vit, lambda: ViTImageProcessor(size=SIZE, rescale_factor=1 / 127.5, image_mean=[1.0] * 3)),
    "not normalised": (vit, lambda: ViTImageProcessor(size=SIZE, do_normalize=False)),
    "cropped": (siglip, lambda: CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SIZE)),
}


@pytest.mark.parametrize("where", ["folder", "argument"])
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.sweep(keep=5)
def test_trainer_normalises_as_the_models_image_processor(
    labelled: dict[str, Any], tmp_path: Path, name: str, where: str, caplog: pytest.LogCaptureFixture
):
    model, processor = (make() for make in PROCESSORS[name])
    given: dict[str, Any] = {"processing_class": processor}
    if where == "folder":
        model.save_pretrained(tmp_path / "model")
        processor.save_pretrained(tmp_path / "model")
        model, given = type(model).from_pretrained(tmp_path / "model"), {}
    has_texts = isinstance(model, SiglipModel)
    data = unset(labelled) | ({} if has_texts else {"tokenizer": None})
    trainer = Watched(data, model=model, args=arguments(tmp_path), **given)
    trainer.train()
    batch = next(iter(Loader.from_config({**data, "image_size": 24, "max_length": trainer.data.max_length})))
    images = list(batch["pixel_values"][batch["valid"]])
    expected = processor(images, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(trainer.seen[0], expected)
    assert trainer.data.max_length == (16 if has_texts else 77)
    assert [record for record in caplog.records if record.name == "mmdata"] == []
    stats = pixel_stats(model, **({"processor": processor} if given else {}))  # for loops that normalise themselves
    torch.testing.assert_close(normalized(torch.stack(images), *stats), expected)


@pytest.mark.parametrize("make", [vit, siglip])
def test_trainer_knows_the_mean_of_a_kind_without_a_folder(labelled: dict[str, Any], tmp_path: Path, make: Any):
    data = {**unset(labelled), "tokenizer": labelled["tokenizer"] if make is siglip else None}
    trainer = Watched(data, model=make(), args=arguments(tmp_path))
    trainer.train()
    batch = next(iter(Loader.from_config({**data, "image_size": 24, "max_length": trainer.data.max_length})))
    torch.testing.assert_close(trainer.seen[0], (batch["pixel_values"][batch["valid"]] / 255 - 0.5) / 0.5)


def test_trainer_warns_of_settings_that_are_not_the_models(
    data: dict[str, Any], clip: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    clip.save_pretrained(tmp_path / "clip")
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(processor, AutoTokenizer.from_pretrained(data["tokenizer"])).save_pretrained(tmp_path / "clip")
    model = CLIPModel.from_pretrained(tmp_path / "clip")
    other = {**data, "image_size": 48, "max_length": 24}
    with caplog.at_level(logging.WARNING, "mmdata"):
        trainer = LoaderTrainer(other, model=model, args=arguments(tmp_path))
    assert (trainer.data.image_size, trainer.data.max_length) == (48, 24)
    assert [record.getMessage() for record in caplog.records if "says" in record.getMessage()] == [
        "data.image_size is 48, and the model says 32: leave it out, unless you mean it",
        "data.max_length is 24, and the model says 32: leave it out, unless you mean it",
    ]


def test_a_model_that_does_not_say_its_mean_is_refused(data: dict[str, Any], tmp_path: Path):
    class Own(torch.nn.Module):
        def forward(self, pixel_values: Any, **others: Any) -> Any:
            return pixel_values

    said = (
        r"Own does not say which mean and deviation of pixels it expects: give its image processor \(LoaderTrainer: p"
    )
    with pytest.raises(ValueError, match=said):
        pixel_stats(Own())
    with pytest.raises(ValueError, match=said):
        LoaderTrainer(data, model=Own(), args=arguments(tmp_path))
    processor = ViTImageProcessor(image_mean=[0.1, 0.2, 0.3])
    trainer = LoaderTrainer(data, model=Own(), args=arguments(tmp_path), processing_class=processor)
    found = trainer._prepare_inputs({"pixel_values": torch.zeros(1, 3, 1, 1, dtype=torch.uint8)})["pixel_values"]
    torch.testing.assert_close(found.flatten(), torch.tensor([-0.2, -0.4, -0.6]))


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{broken", r"cannot be read as the settings of an image processor \(Expecting property name .*; save the im"),
        (b"\xff\xff", r"cannot be read as the settings of an image processor \('utf-8' codec can't decode "),
        (b"[1]", r"cannot be read as the settings of an image processor \(expected an object, got a list\); save"),
    ],
)
def test_an_image_processor_that_cannot_be_read_is_an_error(tmp_path: Path, name: str, content: bytes, message: str):
    vit().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^'.*/{name}': {message}"):
        pixel_stats(ViTForImageClassification.from_pretrained(tmp_path))


def test_an_image_processor_may_have_one_number_for_all_channels(tmp_path: Path):
    vit().save_pretrained(tmp_path)
    model = ViTForImageClassification.from_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 0, "image_std": [0.25]}')
    assert pixel_stats(model) == ((0.0,) * 3, (0.25,) * 3)
    for wrong in ('[1, 2], "image_std": 1', '1, "image_std": "many"', '1, "image_std": 1, "size": [[1], [1]]'):
        (tmp_path / "preprocessor_config.json").write_text(f'{{"image_mean": {wrong}}}')
        with pytest.raises(ConfigError, match=r"^the image processor of '.*' has settings that are not those of "):
            pixel_stats(model)


def test_a_loaded_models_name_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vit().save_pretrained(tmp_path / "model")
    model = ViTForImageClassification.from_pretrained(tmp_path / "model")
    asked: list[Any] = []

    def no_network(host: Any, *others: Any, **named: Any) -> Any:
        asked.append(host)
        raise RuntimeError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)  # it asks on its own account
    shutil.move(tmp_path / "model", tmp_path / "moved")
    for name in (str(tmp_path / "model"), "secret/project"):
        model.config._name_or_path = name
        assert pixel_stats(model) == ((0.5,) * 3, (0.5,) * 3)
    assert asked == []
