"""A CLIP that is fine-tuned with LoRA and patch dropout, from its resumption to its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPModel

import mmdata
from mmdata.config import Config
from mmdata.config.strict_yaml import parse
from mmdata.train import DualEncoder
from mmdata.train.run.checkpoint import load_checkpoint
from mmdata.trained.export import export_to_transformers
from mmdata.trained.training import train
from tests.train.small_run import go_back
from tests.trained.conftest import MakeRun
from tests.trained.test_export import CLIP, TEXTS, features_of, pretrained

LORA = {"r": 2, "alpha": 64, "dropout": 0.2}


@pytest.fixture(scope="module")
def settings(make_run: MakeRun, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, shards = tmp_path_factory.mktemp("folder") / "clip", f"{photos}/shards"
    export_to_transformers(mmdata.load_run(make_run(pretrained(clip=CLIP)), "cpu"), folder)
    data = {"shards": shards, "tokenizer": f"{shards}/tokenizer", "global_batch_size": 4, "image_size": 32}
    data |= {"max_length": 16, "loading": {"num_workers": 1}}
    model = pretrained(clip=str(folder), lora=LORA, patch_dropout=0.5)
    learning = {"steps": 4, "checkpoint_every_steps": 2, "lr": 0.05, "warmup_steps": 1}
    return {"data": data, "model": model, "train": learning}


@pytest.fixture(scope="module")
def run(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "lora"
    assert train(parse(Config, settings, origin="test"), folder, torch.device("cpu")) == 0
    return folder


def unmerged(settings: dict[str, Any], run: Path) -> DualEncoder:
    """The model as it was trained, from the newest checkpoint."""
    model = DualEncoder.from_config(settings["model"])
    model.load_state_dict(load_checkpoint(run / "checkpoints" / "step-0000000004")["model"])
    return model.eval()


def test_lora_trains_adapters_alone_and_resumes_bit_for_bit(settings: dict[str, Any], run: Path):
    before = unmerged(settings, run).state_dict()
    start = DualEncoder.from_config(settings["model"]).state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, start[name])}
    assert changed == {name for name in before if "lora_" in name} | {"logit_scale"}
    go_back(run, 2)
    assert train(parse(Config, settings, origin="test"), run, torch.device("cpu")) == 0
    torch.testing.assert_close(unmerged(settings, run).state_dict(), before, rtol=0, atol=0)


def test_lora_is_merged_by_load_run_and_in_the_export(
    settings: dict[str, Any], run: Path, photos: Path, tmp_path: Path
):
    model, loaded = unmerged(settings, run), mmdata.load_run(run, "cpu")
    images = sorted((photos / "raw").glob("*.png"))
    pixels = torch.stack([loaded.preprocess(path) for path in images])
    with torch.no_grad():
        expected = model.encode_image(pixels)
    torch.testing.assert_close(loaded.embed_images(images), expected, rtol=0, atol=1e-5)
    export_to_transformers(loaded, tmp_path / "out")
    clip, report = CLIPModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    image_features, text_features = features_of(clip.eval(), loaded, tmp_path / "out", pixels)
    torch.testing.assert_close(image_features, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(text_features, loaded.embed_texts(TEXTS), rtol=0, atol=1e-5)
    adapters = [name for name, _ in model.named_parameters() if "lora_B" in name]
    assert adapters
    with torch.no_grad():
        for name in adapters:
            model.get_parameter(name).zero_()
        assert (model.encode_image(pixels) - expected).norm(dim=1).min() > 0.01  # they are not without effect


def test_init_from_a_lora_run_begins_with_its_merged_weights(settings: dict[str, Any], run: Path):
    expected = mmdata.load_run(run, "cpu").model.state_dict()
    for lora in (None, LORA):
        model = DualEncoder.from_config({**settings["model"], "lora": lora, "init_from": str(run)})
        found = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
        torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=1e-6)
        assert all("lora_" in name for name in {*found} - {*expected})
