from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

import mmdata
from mmdata.cli.data.plan import plan_of
from mmdata.config import Config, ModelConfig
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError, DataError
from mmdata.train import DualEncoder
from mmdata.train.run.checkpoint import find_checkpoint, load_checkpoint
from mmdata.trained.carried import keep_model
from mmdata.trained.export import export_to_transformers
from mmdata.trained.training import train
from tests.trained.conftest import MakeRun
from tests.trained.test_export import CLIP, SIGLIP, TEXTS, pretrained


def build(model: dict[str, Any], source: Path, **settings: Any) -> DualEncoder:
    """A model of 300 entries, as many as the tokenizer of `photos` has."""
    config = ModelConfig.model_validate({**model, **settings, "init_from": str(source)})
    return DualEncoder.from_config(config, vocab_size=300)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(find_checkpoint(run))["model"]


@pytest.mark.parametrize("model", [{"name": "micro"}, pretrained(clip=CLIP), pretrained(clip=SIGLIP)])
@pytest.mark.sweep(keep=1)
def test_init_from_a_run_or_its_checkpoint_and_clip_of_its_export_are_its_weights(
    make_run: MakeRun, tmp_path: Path, model: dict[str, Any]
):
    run = make_run(model)
    expected, exported = weights_of(run), tmp_path / "out"
    sources = [run, find_checkpoint(run)]
    if "clip" in model:
        export_to_transformers(mmdata.load_run(run, "cpu"), exported)
        sources.append(exported)
    for source in sources:
        settings: dict[str, Any] = {**model, "init_from": str(source)}
        if source is exported:
            with pytest.raises(ConfigError, match=r"this is a model of transformers; set model\.name=pre"):
                build(model, source)
            settings = {**model, "clip": str(source)}
        found = DualEncoder.from_config(settings, vocab_size=300).state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_init_from_keeps_a_scale_and_a_bias_that_are_set(make_run: MakeRun):
    run = make_run({"name": "micro"})
    model = build({"name": "micro"}, run, logit_scale_init=20.0, logit_bias_init=-10.0)
    assert model.logit_scale.exp().item() == pytest.approx(20.0)
    assert model.logit_bias is not None
    assert model.logit_bias.item() == -10.0
    biased = make_run({"name": "micro", "logit_bias_init": -7.0})
    assert build({"name": "micro"}, biased).logit_bias is None
    model = build({"name": "micro"}, biased, logit_scale_init=20.0)
    assert model.logit_scale.item() == pytest.approx(math.log(20.0))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"name": "micro", "embed_dim": 32},
            r"image_projection: 1 of another shape \(image_projection\.weight is \[64, 64\], in the model \[32, 64\]\)",
        ),
        (
            pretrained(clip=CLIP),
            r"image_tower: \d+ missing \(image_tower\.projection\.weight\), \d+ unknown to the model \(image_tower\.pa",
        ),
    ],
)
def test_init_from_weights_that_do_not_fit_names_the_parts_and_the_settings(
    make_run: MakeRun, model: dict[str, Any], said: str
):
    run = make_run({"name": "micro"})
    of_run = r'set the section model and the tok.*: model {"name": "micro"}, .* \'.*/shards/tokenizer\'$'
    with pytest.raises(
        ConfigError, match=rf"^checkpoint '{run}/.*': its weights do not fit .*\(.*{said}.*\); {of_run}"
    ):
        build(model, run)


def test_init_from_nothing_says_so(tmp_path: Path):
    with pytest.raises(DataError, match="no such run"):
        build({"name": "micro"}, tmp_path / "none")


def siglip_folder(folder: Path) -> Path:
    """A SigLIP for images of 24 × 24 and texts of 16 tokens whose image processor has its own mean."""
    vision = {**SIGLIP["vision_config"], "image_size": 24}
    config = SiglipConfig(text_config=SIGLIP["text_config"], vision_config=vision)
    SiglipModel(config).save_pretrained(folder)
    size = {"height": 24, "width": 24}
    SiglipImageProcessor(size=size, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained(folder)
    return folder


def test_run_of_a_folder_has_its_size_length_and_mean_from_plan_to_export(photos: Path, tmp_path: Path):
    shards, folder = f"{photos}/shards", siglip_folder(tmp_path / "siglip")
    data = {"shards": shards, "tokenizer": f"{shards}/tokenizer", "global_batch_size": 4, "loading": {"num_workers": 1}}
    content = {"data": data, "model": pretrained(clip=str(folder)), "train": {"steps": 1}}
    content["train"]["loss"] = "siglip"
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(content))
    planned = plan_of(str(tmp_path / "a.yaml"), []).data
    assert train(parse(Config, content, origin="test"), tmp_path / "run", torch.device("cpu")) == 0
    run = mmdata.load_run(tmp_path / "run", "cpu")
    for found in (planned, run.config.data):
        assert (found.image_size, found.max_length) == (24, 16)
    export_to_transformers(run, tmp_path / "out")
    image = run.preprocess(photos / "raw" / "00.jpg")
    expected = AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"]
    exported = AutoImageProcessor.from_pretrained(tmp_path / "out")(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close((image - run.model.pixel_mean) / run.model.pixel_std, expected[0])
    torch.testing.assert_close(exported, expected)


def test_clip_that_is_fine_tuned_from_a_folder_is_loaded_by_clip_again(make_run: MakeRun, photos: Path, tmp_path: Path):
    export_to_transformers(mmdata.load_run(make_run(pretrained(clip=CLIP)), "cpu"), tmp_path / "first")
    shards = str(photos / "shards")
    data = {"shards": shards, "tokenizer": str(tmp_path / "first"), "global_batch_size": 4, "image_size": 32}
    data |= {"max_length": 16, "loading": {"num_workers": 1}}
    model = pretrained(clip=str(tmp_path / "first"))
    settings = {"data": data, "model": model, "train": {"steps": 2}}
    config = parse(Config, settings, origin="test")
    assert train(config, tmp_path / "run", torch.device("cpu")) == 0
    run = mmdata.load_run(tmp_path / "run", "cpu")
    assert run.step == 2
    export_to_transformers(run, tmp_path / "second")
    loaded = CLIPModel.from_pretrained(tmp_path / "second").eval()

    inputs = AutoTokenizer.from_pretrained(tmp_path / "second")(
        TEXTS, padding=True, truncation=True, return_tensors="pt"
    )
    pixels = torch.stack([run.preprocess(path) for path in sorted((photos / "raw").glob("*.png"))])
    with torch.no_grad():
        output = loaded(**inputs, pixel_values=(pixels.float() - run.model.pixel_mean) / run.model.pixel_std)
    torch.testing.assert_close(output.image_embeds, run.embed_images(pixels), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.text_embeds, run.embed_texts(TEXTS), rtol=0, atol=1e-5)


def test_load_run_needs_no_folder_of_transformers_that_the_run_was_trained_from(photos: Path, tmp_path: Path):
    CLIPModel(CLIPConfig(**{name: part for name, part in CLIP.items() if name != "model_type"})).half().save_pretrained(
        tmp_path / "clip"
    )
    CLIPImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained(tmp_path / "clip")
    data = {"shards": str(photos / "shards"), "tokenizer": str(photos / "shards" / "tokenizer"), "global_batch_size": 4}
    data |= {"image_size": 32, "max_length": 16, "loading": {"num_workers": 1}}
    training = {"steps": 1}
    pictures = sorted((photos / "raw").glob("*.png"))
    for towers in ({"clip": "clip"}, {"vision": "clip", "text": "clip"}):
        output = tmp_path / f"run-{len(towers)}"
        model = {"name": "pretrained", **{name: str(tmp_path / folder) for name, folder in towers.items()}}
        config = parse(Config, {"data": data, "model": model, "train": training}, origin="test")
        assert train(config, output, torch.device("cpu")) == 0
        before = mmdata.load_run(output, "cpu")
        kept = (output / "model.json").read_bytes()
        (output / "model.json").unlink()
        expected = mmdata.load_run(output, "cpu").embed_images(pictures)  # with the towers of the folder
        (output / "model.json").write_bytes(kept)
        (tmp_path / "clip").rename(tmp_path / "gone")
        after = mmdata.load_run(output, "cpu")
        (tmp_path / "gone").rename(tmp_path / "clip")
        assert after.config == before.config
        assert {value.dtype for value in after.model.parameters()} == {torch.float32}
        torch.testing.assert_close(after.model.pixel_mean.flatten(), torch.tensor([0.1, 0.2, 0.3]) * 255)
        assert torch.equal(after.embed_texts(["a dog"]), before.embed_texts(["a dog"]))
        torch.testing.assert_close(after.embed_images(pictures), expected, rtol=0, atol=1e-6)
    (output / "model.json").write_text("{}")
    with pytest.raises(DataError, match=r"model.json': not the towers of a run .*KeyError.* remove the file"):
        mmdata.load_run(output, "cpu")
    keep_model(output, ModelConfig(name="micro"), after.model)
    assert not (output / "model.json").exists()
