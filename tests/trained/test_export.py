from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, CLIPModel, SiglipModel

import mmdata
from mmdata import cli
from mmdata.errors import ConfigError
from mmdata.text.tokenizer import Tokenizer
from mmdata.train.models.clip_sizes import CLIP_SIZES
from mmdata.trained import TrainedRun
from mmdata.trained.export import export_to_open_clip, export_to_transformers
from tests.trained.conftest import MakeRun
from tests.trained.test_load_run import PATCHES

LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**LAYERS, "vocab_size": 400, "max_position_embeddings": 16}
VISION = {**LAYERS, "image_size": 32, "patch_size": 8}
CLIP = {"model_type": "clip", "projection_dim": 24, "text_config": TEXT, "vision_config": VISION}
SIGLIP = {
    "model_type": "siglip",
    "text_config": {**TEXT, "pad_token_id": 1, "projection_size": 16},
    "vision_config": VISION,
}
AT_24 = {"vision_config": {**VISION, "image_size": 24}}
TEXTS = ["a round dog", "picture 3", "a text that is longer than the sixteen tokens which this model takes at most"]


def pretrained(**settings: Any) -> dict[str, Any]:
    return {"name": "pretrained", **settings}


@pytest.fixture(scope="module")
def export(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory):
    """`export(model, **data)`: the run and the folder."""

    def make(model: dict[str, Any], **data: Any) -> tuple[TrainedRun, Path]:
        run = mmdata.load_run(make_run(model, **data), device="cpu")
        folder = tmp_path_factory.mktemp("exports") / "photos"
        export_to_transformers(run, folder)
        return run, folder

    return make


def features_of(model: Any, run: TrainedRun, folder: Path, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """L2-normalised features as a user of transformers computes them, from the run's pixels."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    padding = "max_length" if "siglip" in model.config.model_type else True
    inputs = tokenizer(TEXTS, padding=padding, truncation=True, return_tensors="pt")
    normalised = (pixels.float() / 255 - run.model.pixel_mean / 255) / (run.model.pixel_std / 255)
    with torch.no_grad():
        output = model(**inputs, pixel_values=normalised)
    return output.image_embeds, output.text_embeds


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (pretrained(clip=CLIP), CLIPModel),
        (pretrained(clip={**CLIP, **AT_24}), CLIPModel),
        (pretrained(clip=SIGLIP), SiglipModel),
        (pretrained(clip={**SIGLIP, **AT_24}), SiglipModel),
    ],
    ids=["clip", "clip at another size", "siglip", "siglip at another size"],
)
@pytest.mark.sweep(keep=1)
def test_export_is_loaded_by_the_class_of_the_architecture(export, photos: Path, model: dict[str, Any], kind: Any):
    run, folder = export(model)
    images = sorted((photos / "raw").glob("*.png"))
    pixels = torch.stack([run.preprocess(path) for path in images])
    loaded, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    image_features, text_features = features_of(loaded.eval(), run, folder, pixels)
    torch.testing.assert_close(image_features, run.embed_images(images), rtol=0, atol=1e-5)
    torch.testing.assert_close(text_features[:2], run.embed_texts(TEXTS[:2]), rtol=0, atol=1e-5)
    if kind is CLIPModel:  # SigLIP's texts are padded to all positions, so its tokenizer cuts there
        torch.testing.assert_close(text_features, run.embed_texts(TEXTS), rtol=0, atol=1e-5)
    assert (text_features[0] - text_features[1]).norm() > 0.01
    assert loaded.logit_scale.exp().item() == pytest.approx(run.logit_scale)
    assert (loaded.logit_bias.item() if kind is SiglipModel else None) == run.logit_bias


def test_export_of_siglip2_takes_patches(export, photos: Path):
    run, folder = export(pretrained(clip=PATCHES), image_patches=[9, 25], patch_size=8, max_length=16)
    loaded = transformers.Siglip2Model.from_pretrained(folder).eval()
    assert AutoImageProcessor.from_pretrained(folder).max_num_patches == 25
    inputs = run.preprocess.inputs(photos / "raw" / "03.jpg")
    normalised = (inputs["pixel_values"].float() / 255 - 0.5) / 0.5
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    assert "PreTrainedTokenizerFast.from_pretrained" in (folder / "README.md").read_text()
    with torch.no_grad():
        output = loaded(**tokens, **{**inputs, "pixel_values": normalised})
    torch.testing.assert_close(output.image_embeds, run.embed_images([photos / "raw" / "03.jpg"]), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.text_embeds, run.embed_texts(TEXTS), rtol=0, atol=1e-5)


def test_export_works_in_the_pipeline(export, tmp_path: Path):
    run, folder = export(pretrained(clip=CLIP))
    Image.linear_gradient("L").resize((32, 32)).convert("RGB").save(tmp_path / "photo.png")  # needs no resizing
    classify = transformers.pipeline("zero-shot-image-classification", model=str(folder))
    assert type(classify.model) is CLIPModel
    found = classify(str(tmp_path / "photo.png"), candidate_labels=["dog", "cat"], hypothesis_template="a {}")
    expected = run.zero_shot([tmp_path / "photo.png"], ["dog", "cat"], templates=["a {}"]).probabilities[0]
    scores = {line["label"]: line["score"] for line in found}
    assert [scores["dog"], scores["cat"]] == pytest.approx(expected.tolist(), abs=1e-4)


def test_export_has_an_image_processor_near_the_loaders(export, photos: Path):
    """transformers resizes whole images and then crops, in another order of roundings; the loader scales large JPEGs
    while it decodes them."""
    run, folder = export(pretrained(clip=CLIP))
    processor = AutoImageProcessor.from_pretrained(folder)
    for name in ("00.jpg", "01.png", "02.jpg", "03.jpg"):
        image = Image.open(photos / "raw" / name)
        found = processor(image, return_tensors="pt")["pixel_values"][0] * run.model.pixel_std + run.model.pixel_mean
        assert found.shape == (3, 32, 32)
        assert (found - run.preprocess(photos / "raw" / name)).abs().mean() < 2, name
    both = AutoProcessor.from_pretrained(folder)
    inputs = both(text=["a dog"], images=image, return_tensors="pt", padding=True)
    assert {"input_ids", "attention_mask", "pixel_values"} <= set(inputs)


def test_exported_tokenizer_gives_the_ids_of_the_run_and_ends_where_clip_looks(export):
    run, folder = export(pretrained(clip=CLIP))
    before, after = run.tokenizer, AutoTokenizer.from_pretrained(folder)
    for loaded in (after, AutoProcessor.from_pretrained(folder).tokenizer):
        ids, _ = before.encode(TEXTS[:1], before.count(TEXTS[:1])[0])
        assert loaded(TEXTS[0])["input_ids"] == ids[0].tolist()
    assert (after.eos_token, after.bos_token, after.pad_token) == ("<end>", "<start>", "<pad>")
    assert after.model_max_length == 16
    assert CLIPModel.from_pretrained(folder).config.text_config.eos_token_id == ids[0][-1] == 1


def test_export_refuses_a_tokenizer_whose_end_clip_would_not_look_for(make_run: MakeRun, photos: Path, tmp_path: Path):
    saved = json.loads((photos / "shards" / "tokenizer" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer").mkdir()
    for name, content in (("tokenizer.json", saved), ("tokenizer_config.json", None)):
        source = photos / "shards" / "tokenizer" / name
        (tmp_path / "tokenizer" / name).write_text(source.read_text() if content is None else json.dumps(content))
    saved["post_processor"]["single"].pop()  # texts end with their last word
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(saved))
    run = mmdata.load_run(make_run(pretrained(clip=CLIP), tokenizer=str(tmp_path / "tokenizer")), device="cpu")
    with pytest.raises(
        ConfigError,
        match=r"its texts end with the tokens \[\d+, \d+\], and transformers' CLIPModel reads a text at one end token, "
        r"whose number is not 2; use the run with mmdata.load_run, or train a new one with a tokenizer that `mmdata ",
    ):
        export_to_transformers(run, tmp_path / "out")
    with pytest.raises(
        ConfigError, match=r"and open_clip's CLIP reads a text at one end token; use the run with mmdata"
    ):
        export_to_open_clip(run, tmp_path / "out")


def test_export_has_a_card_with_settings_and_scores_and_no_paths(make_run: MakeRun, photos: Path, tmp_path: Path):
    place = f"{photos}/a"
    places = {"join": [{"table": f"{place}.csv"}], "select": f"{place}.txt", "groups": {"source": place, "size": 2}}
    folder = make_run(pretrained(clip=CLIP, embed_dim=None), shuffle=False, **places)
    scores = {
        "step": 3,
        "image_to_text_r1": 0.25,
        "chance_r1": 0.1,
        "loss": 2.31,  # of an evaluation of one's own
        "median_rank": 7.0,
        "images": 1234,
        "texts": 5,
    }
    (folder / "evaluation.json").write_text(json.dumps(scores))
    run = mmdata.load_run(folder, device="cpu")
    model = run.config.model.model_copy(update={"init_from": place})
    run = replace(run, config=run.config.model_copy(update={"model": model}))
    export_to_transformers(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for said in (
        "library_name: transformers",
        "# out",
        'CLIPModel.from_pretrained("FOLDER")',
        "| images | 1,234 |",
        "| image to text r1 | 25.0 % |",
        "image_size: 32",
        "model_type: clip",
    ):
        assert said in card
    assert "loss" not in card.partition("## Scores")[2].partition("## Settings")[0]
    assert "median" not in card
    assert str(photos) not in card
    (folder / "evaluation.json").write_text(json.dumps({**scores, "step": 2}))
    export_to_transformers(run, tmp_path / "other")
    assert "25.0 %" not in (tmp_path / "other" / "README.md").read_text()


@pytest.mark.sweep
def test_export_of_clips_tokenizer_says_that_it_does_not_decode_html(make_run: MakeRun, tmp_path: Path):
    text = {**TEXT, "vocab_size": 49408, "bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 49407}
    model = pretrained(clip={**CLIP, "text_config": text})
    run = mmdata.load_run(make_run(model, tokenizer="clip"), device="cpu")
    written, meant = run.embed_texts(["salt &amp; pepper", "salt & pepper"])
    assert torch.equal(written, meant)
    export_to_transformers(run, tmp_path / "out")
    assert "does not decode them: call `html.unescape` first." in (tmp_path / "out" / "README.md").read_text()
    of_card = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert of_card("salt & pepper")["input_ids"] == [49406, 6611, 261, 8253, 49407]
    assert len(of_card("salt &amp; pepper")["input_ids"]) == 7
    assert Tokenizer.load(tmp_path / "out").count(["salt &amp; pepper"]) == [5]


def test_export_refuses_a_folder_that_holds_files_and_towers_without_a_form(make_run: MakeRun, tmp_path: Path):
    run = mmdata.load_run(make_run(pretrained(clip=CLIP)), device="cpu")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()
    with pytest.raises(ConfigError, match=r"full': is there already; remove it, or give another folder"):
        export_to_transformers(run, tmp_path / "full")
    mixed = pretrained(vision=CLIP, text={"model_type": "bert", **TEXT})
    for model, towers in ((mixed, "ClipImageTower, AnyTextTower"), ({"name": "micro"}, "ImageTower, TextTower")):
        run = mmdata.load_run(make_run(model), device="cpu")
        with pytest.raises(ConfigError, match=rf"\({towers}\) cannot be exported: transformers has classes for"):
            export_to_transformers(run, tmp_path / "mixed")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_export_program_says_how_to_load_the_folder(
    make_run: MakeRun,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    words = ["export", str(make_run(pretrained(clip=CLIP))), "exports/photos", "--to", "transformers"]
    assert cli.main(words) == 0
    said, _, code = capsys.readouterr().out.partition("\n\n")
    assert re.search(r"step-0000000003 → exports/photos \(CLIPModel, 0.1 MB\); to load it:$", said)
    Image.open(photos / "raw" / "00.jpg").save("photo.jpg")
    exec(code, {})
    assert re.fullmatch(r"tensor\(\[\[.*, .*\]\], grad_fn=<.*>\)\n", capsys.readouterr().out)
    Image.new("RGBA", (9, 9), (200, 0, 0, 0)).save("photo.jpg", "PNG")  # the loader composites it on white, too
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["photo"].getextrema() == ((255, 255),) * 3


def test_export_of_a_size_by_name_is_a_clip(export, photos: Path, monkeypatch: pytest.MonkeyPatch):
    small = {**LAYERS, "hidden_act": "gelu"}
    towers = {"vision_config": {**small, "patch_size": 8}, "text_config": small}
    monkeypatch.setitem(CLIP_SIZES, "vit_b_32", {"projection_dim": 12, **towers})
    run, folder = export({"name": "vit_b_32"})
    images = sorted((photos / "raw").glob("*.png"))
    loaded = CLIPModel.from_pretrained(folder).eval()
    assert (loaded.config.vision_config.image_size, loaded.config.text_config.hidden_act) == (32, "gelu")
    pixels = torch.stack([run.preprocess(path) for path in images])
    for found, expected in zip(
        features_of(loaded, run, folder, pixels), (run.embed_images(images), run.embed_texts(TEXTS)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
