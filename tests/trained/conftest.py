"""Runs for the tests of trained models: a checkpoint as `mmdata train` writes it, without the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmdata.config import Config
from mmdata.config.strict_yaml import parse
from mmdata.convert import ConvertConfig, convert
from mmdata.recognize import CHECKPOINTS
from mmdata.text.tokenizer import Tokenizer
from mmdata.train import DualEncoder
from mmdata.train.run.checkpoint import Share, save_checkpoint
from mmdata.trained.carried import keep_classes
from tests.conftest import make_photo

MakeRun = Callable[..., Path]

SHAPES = [(40, 40), (90, 60), (48, 130), (200, 300)]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with raw/ (images of many kinds, captions and class names) and shards/ of them."""
    folder = tmp_path_factory.mktemp("photos")
    raw = folder / "raw"
    raw.mkdir()
    lines: list[dict[str, Any]] = []
    for i, (height, width) in enumerate(SHAPES * 2):
        name = f"{i:02d}.{'png' if i % 3 == 1 else 'jpg'}"
        (raw / name).write_bytes(make_photo(height, width, seed=i, format="PNG" if i % 3 == 1 else "JPEG"))
        lines.append({"path": name, "caption": f"picture {i} of a round dog", "label": ("dog", "cat")[i % 2]})
    odd = Image.open(raw / "07.png" if (raw / "07.png").exists() else raw / "07.jpg").convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    odd.save(raw / "turned.jpg", exif=exif)
    odd.convert("CMYK").save(raw / "cmyk.jpg")
    grey = torch.arange(64 * 50, dtype=torch.int32).reshape(64, 50) * 20
    Image.fromarray(grey.numpy().astype("uint16")).save(raw / "sixteen.png")
    clear = odd.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    clear.save(raw / "clear.png")
    for name in ("turned.jpg", "cmyk.jpg", "sixteen.png", "clear.png"):
        lines.append({"path": name, "caption": f"an odd one, {name}", "label": "cat"})
    (raw / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    convert(raw / "captions.jsonl", folder / "shards", ConvertConfig(train_tokenizer=300))
    return folder


def write_run(folder: Path, photos: Path, model: dict[str, Any], **data: Any) -> Path:
    """A run of random weights, saved after step 3 of epoch 1."""
    shards = str(photos / "shards")
    settings: dict[str, Any] = {"shards": shards, "val": {"shards": shards}, "tokenizer": f"{shards}/tokenizer"}
    settings |= {"global_batch_size": 4, "image_size": 32, "max_length": 16, "loading": {"num_workers": 1}, **data}
    train = {"epochs": 1}
    config = parse(Config, {"data": settings, "model": model, "train": train}, origin="test")
    tokenizer = Tokenizer.load(config.data.tokenizer, max_length=config.data.max_length)
    torch.manual_seed(0)
    encoder = DualEncoder.from_config(config.model, vocab_size=tokenizer.vocab_size)
    with torch.no_grad():  # features that differ from text to text, unlike those of an untrained model
        for parameter in encoder.parameters():
            parameter += 0.02 * torch.randn_like(parameter) * (parameter.ndim > 0)
    state = {"step": 3, "epoch": 1, "settings": config.model_dump(mode="json"), "model": encoder.state_dict()}
    save_checkpoint(folder / CHECKPOINTS, Share.of({**state, "total_steps": 3}), keep=2)
    keep_classes(folder, ["dog", "cat"])
    return folder


@pytest.fixture(scope="session")
def make_run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """`make_run(model={...}, **data) -> folder` of a run on `photos`; equal ones are made once."""
    made: dict[str, Path] = {}

    def make(model: dict[str, Any] | None = None, **data: Any) -> Path:
        name = repr((model, data))
        if name not in made:
            made[name] = write_run(tmp_path_factory.mktemp("run"), photos, model or {"name": "micro"}, **data)
        return made[name]

    return make
