from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import mmdata
from mmdata import Loader
from mmdata.cli import main
from mmdata.config.data import evaluation_data
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import DataError
from mmdata.train.evaluation.embedding import embed
from mmdata.train.evaluation.evaluate import zero_shot
from mmdata.train.evaluation.prompts import Classes, read_classes
from mmdata.trained import TrainedRun
from mmdata.trained.evaluation import evaluate_shards, named_classes
from tests.conftest import make_photo
from tests.trained.conftest import MakeRun, write_run

PATCHES = {
    "model_type": "siglip2",
    "text_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 400,
        "max_position_embeddings": 16,
        "pad_token_id": 1,
        "projection_size": 16,
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 8,
        "num_patches": 4,
    },
}


def paths_in_order(run: TrainedRun, photos: Path) -> list[Path]:
    """The images of the corpus in the order of its rows: captions.jsonl keeps it."""
    import json

    lines = (photos / "raw" / "captions.jsonl").read_text().splitlines()
    return [photos / "raw" / json.loads(line)["path"] for line in lines]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (None, {}),
        (None, {"decode": "exact"}),
        (None, {"image_buckets": [[32, 32], [24, 48], [48, 24]], "global_batch_size": 1}),
        (None, {"image_buckets": 2, "patch_size": 8, "global_batch_size": 1}),
        ({"name": "pretrained", "clip": PATCHES}, {"image_patches": [9, 25], "patch_size": 8, "global_batch_size": 1}),
    ],
    ids=["square", "exact", "shapes", "auto", "native"],
)
@pytest.mark.sweep(keep=1)
def test_load_run_gives_the_evaluations_pixels_and_features(make_run: MakeRun, photos: Path, model, data):
    run = mmdata.load_run(make_run(model, **data), device="cpu")
    paths = paths_in_order(run, photos)
    loader = Loader.from_config(evaluation_data(run.config.data), rank=0, world_size=1)
    seen = 0
    for batch in loader:
        for pixels, row, valid in zip(batch["pixel_values"], batch["rows"].tolist(), batch["valid"], strict=True):
            if valid:
                found = run.preprocess.inputs(paths[row])
                assert torch.equal(found["pixel_values"][0], pixels), paths[row].name
                seen += 1
    assert seen == len(paths) == 12
    loader.set_epoch(0)
    expected = embed(run.model, loader)
    features = run.embed_images(paths, batch_size=5)
    assert (features.dtype, features.shape, features.device.type) == (torch.float32, (12, run.embed_dim), "cpu")
    torch.testing.assert_close(features[expected.rows], expected.image, rtol=0, atol=1e-6)
    captions = [f"picture {i} of a round dog" for i in range(8)]
    captions += [f"an odd one, {path.name}" for path in paths[8:]]
    torch.testing.assert_close(run.embed_texts(captions)[expected.rows], expected.text, rtol=0, atol=1e-6)


def test_load_run_takes_paths_bytes_pillow_images_and_tensors_alike(make_run: MakeRun, photos: Path):
    run = mmdata.load_run(make_run(decode="exact"), device="cpu")
    paths = paths_in_order(run, photos)
    expected = run.embed_images(paths)
    images = [Image.open(path) for path in paths]
    for given in (map(str, paths), [path.read_bytes() for path in paths], images):
        assert torch.equal(run.embed_images(given), expected)
    pixels = torch.stack([run.preprocess(path) for path in paths])
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (12, 3, 32, 32))
    assert torch.equal(run.embed_images(pixels), expected)
    with pytest.raises(ValueError, match="embed_images got no image: does the pattern of the paths match any file"):
        run.embed_images(photos.glob("*.webp"))
    with pytest.raises(ValueError, match="embed_texts got no text"):
        run.embed_texts([])


def test_load_run_loaded_image_of_a_large_jpeg_differs_little(make_run: MakeRun, photos: Path):
    run = mmdata.load_run(make_run(), device="cpu")
    path = photos / "raw" / "03.jpg"
    image = Image.open(path)
    image.load()
    fast, full = run.preprocess(path).float(), run.preprocess(image).float()
    assert 0 < (fast - full).abs().mean() < 2


def test_evaluate_names_the_classes_of_captioned_shards_by_itself(make_run: MakeRun):
    run = mmdata.load_run(make_run(), "cpu", precision=None)
    classes = named_classes(run.config.data)
    assert classes == Classes(classes=["dog", "cat"], templates=["{}"])
    scores = evaluate_shards(run, classes=classes)
    assert scores["templates"] == ["{}"]
    assert (scores["zero_shot_chance"], scores["texts"]) == (0.5, 12)


def test_evaluate_without_a_label_among_its_rows_scores_retrieval(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lines: list[dict[str, str]] = [{"path": f"{i}.jpg", "caption": f"picture {i}"} for i in range(12)]
    for i, line in enumerate(lines):
        (tmp_path / line["path"]).write_bytes(make_photo(40, 40, seed=i))
    lines[0]["label"] = "dog"  # the only label, of a row that data.val.share leaves to the training
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shards = str(tmp_path / "shards")
    convert(tmp_path / "captions.jsonl", shards, ConvertConfig(train_tokenizer=300))
    data = {"shards": shards, "tokenizer": f"{shards}/tokenizer", "val": {"share": 0.4}}
    run = mmdata.load_run(write_run(tmp_path, photos, {"name": "micro"}, **data), "cpu", precision=None)
    classes = named_classes(run.config.data)
    assert classes == Classes(classes=["dog"])
    scores = evaluate_shards(run, classes=classes)
    assert scores["texts"] == scores["rows"] > 0
    assert "zero_shot_top1" not in scores
    assert re.search(r"none of the \d+ rows that were loaded has a label; zero-shot accuracy is left out", caplog.text)


def test_load_run_scores_are_those_of_evaluate(make_run: MakeRun, photos: Path):
    run = mmdata.load_run(make_run(), device="cpu")
    assert (run.class_names, run.step, run.epoch, run.logit_bias) == (["dog", "cat"], 3, 1, None)
    paths = paths_in_order(run, photos)
    labels = torch.tensor([i % 2 for i in range(8)] + [1] * 4)
    found = run.zero_shot(paths, templates=["a photo of a {}.", "{}"])
    assert found.classes == ["dog", "cat"]
    assert found.probabilities.shape == (12, 2)
    torch.testing.assert_close(found.probabilities.sum(1), torch.ones(12))
    assert found.labels == [found.classes[i] for i in found.probabilities.argmax(1)]
    classes = Classes(classes=["dog", "cat"], templates=["a photo of a {}.", "{}"])
    scores = evaluate_shards(run, classes=classes)
    correct = sum(name == ("dog", "cat")[label] for name, label in zip(found.labels, labels.tolist(), strict=True))
    assert scores["zero_shot_top1"] == pytest.approx(correct / 12)
    features = run.embed_images(paths)
    prompts = run.embed_prompts(classes)
    assert zero_shot(features, labels, prompts)["zero_shot_top1"] == pytest.approx(correct / 12)
    again = run.zero_shot(features, ["dog", "cat"], templates=["a photo of a {}.", "{}"])
    torch.testing.assert_close(again.probabilities, found.probabilities)


def test_load_run_of_a_sigmoid_model_gives_independent_probabilities(make_run: MakeRun, photos: Path):
    run = mmdata.load_run(make_run({"name": "micro", "logit_bias_init": -10.0}), device="cpu")
    images, names = [photos / "raw" / "00.jpg"], ["dog", "cat", "tree"]
    logits = run.logit_scale * run.embed_images(images) @ run.embed_texts(names).T - 10.0
    torch.testing.assert_close(run.zero_shot(images, names).probabilities, logits.sigmoid())


def test_load_run_in_half_precision_is_near(make_run: MakeRun, photos: Path):
    images = sorted((photos / "raw").glob("*.jpg"))
    folder = make_run()
    full, half = (mmdata.load_run(folder, "cpu", precision=kind) for kind in ("fp32", "bf16"))
    features = half.embed_images(images)
    assert features.dtype == torch.float32
    assert (features - full.embed_images(images)).abs().max() < 0.03
    with pytest.raises(ValueError, match="precision 'int8': expected bf16, fp16, tf32, fp32"):
        mmdata.load_run(folder, precision="int8")  # pyright: ignore[reportArgumentType]


def test_load_run_unreadable_image_is_named_or_gives_zeros(
    make_run: MakeRun, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = mmdata.load_run(make_run(), device="cpu")
    good, cut, text = photos / "raw" / "00.jpg", tmp_path / "cut.jpg", tmp_path / "text.jpg"
    cut.write_bytes(good.read_bytes()[:-200])
    text.write_text("no image")
    for bad, said in ((cut, f"image '{cut}': corrupt_image"), (text, f"image '{text}': not_an_image: starts with")):
        with pytest.raises(DataError, match=said):
            run.embed_images([good, bad])
    with pytest.raises(DataError, match=f"image '{cut}': corrupt_image"):
        run.embed_images([Image.open(cut)])
    with pytest.raises(FileNotFoundError, match=r"none\.jpg"):
        run.embed_images([tmp_path / "none.jpg"])
    with pytest.raises(DataError, match="is a folder"):
        run.embed_images([tmp_path])
    features = run.embed_images([cut, good, tmp_path / "none.jpg"], on_error="zeros")
    assert features.norm(dim=1).tolist() == pytest.approx([0, 1, 0])
    assert torch.equal(features[1:2], run.embed_images([good]))
    assert any(str(cut) in line for line in caplog.messages)
    assert run.embed_images([cut], on_error="zeros").tolist() == [[0.0] * 64]


def test_zero_shot_takes_classes_and_templates_by_name_or_file(make_run: MakeRun, tmp_path: Path):
    run = mmdata.load_run(make_run(), device="cpu")
    features, path, shipped = torch.eye(3, run.embed_dim), tmp_path / "classes.json", read_classes("imagenet")
    path.write_text('{"classes": ["dog", "cat"], "templates": "imagenet"}')
    expected = run.zero_shot(features, ["dog", "cat"], templates=shipped.templates)
    for found in (run.zero_shot(features, str(path)), run.zero_shot(features, ["dog", "cat"], templates="imagenet")):
        assert found.classes == ["dog", "cat"]
        torch.testing.assert_close(found.probabilities, expected.probabilities)
    found = run.zero_shot(features, path, templates=["{}"])
    torch.testing.assert_close(found.probabilities, run.zero_shot(features, ["dog", "cat"]).probabilities)
    assert run.zero_shot(features, "imagenet", templates=["{}"]).classes == shipped.classes


def test_load_run_says_what_is_no_list_of_images_or_texts(make_run: MakeRun, photos: Path):
    run = mmdata.load_run(make_run(), device="cpu")
    for given in (str(photos), photos, Image.new("RGB", (4, 4))):
        with pytest.raises(TypeError, match=r"embed_images takes a list of images: got .*; write \[image\]"):
            run.embed_images(given)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"embed_texts takes a list of strings: got str; write \[text\]"):
        run.embed_texts("a dog")
    with pytest.raises(TypeError, match=r"an image is a path, the bytes of a file, .*: got int"):
        run.embed_images([3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"an image tensor is uint8 \(3, H, W\) in RGB: got torch.float32 \(3, 4, 4\)"):
        run.embed_images(torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match="on_error 'raise' or 'zeros': got 64, 'skip'"):
        run.embed_images([], on_error="skip")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="text 1 is int, not a string"):
        run.embed_texts(["a", 1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"zero_shot needs classes: a list of names, .*, or those in the classes"):
        run.zero_shot([], [])
    with pytest.raises(
        DataError, match=r"classes 'dog': no such file; .*; known by name: imagenet; in Python a list of"
    ):
        run.zero_shot([], "dog")
    with pytest.raises(ValueError, match=r"template 'a photo' has no {} where the class name goes"):
        run.zero_shot([], ["dog"], templates=["a photo"])
    with pytest.raises(ValueError, match=r"'a {}' is no shipped list \(imagenet\): write a list, \[\"a {}\"\]"):
        run.zero_shot([], ["dog"], templates="a {}")


def test_load_run_reads_as_a_line(make_run: MakeRun):
    run = mmdata.load_run(make_run(), device="cpu")
    assert repr(run) == (f"TrainedRun('{run.checkpoint}': micro, epoch 1, step 3, fp32 on cpu)")


def test_load_run_names_what_is_no_run(make_run: MakeRun, photos: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_run()
    (tmp_path / "photos.yaml").write_text("data: {shards: s, tokenizer: clip, global_batch_size: 8}\n")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "checkpoints").symlink_to(folder / "checkpoints")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").touch()
    (tmp_path / "empty").mkdir()
    for given, said in (
        (
            "photos.yaml",
            r"a config, and a run is expected; its run is 'runs/photos', unless train.output names another",
        ),
        ("none", r"no such run; `mmdata train CONFIG` makes one, the folder runs/NAME for NAME.yaml"),
        ("runs", r"a folder of runs; give one of them: one$"),
        ("begun", r"a run that has no checkpoint yet; `mmdata train` writes the first after train.checkpoint_every"),
        (str(photos / "shards"), r"a folder of shards, and a run is expected; `mmdata train CONFIG` makes one"),
        (str(folder / "checkpoints"), rf"a part of the run '{folder}': give '{folder}'"),
        ("other", r"a folder, and a run is expected; `mmdata train CONFIG` makes one"),
        ("empty", r"a folder, and a run is expected; `mmdata train CONFIG` makes one"),
    ):
        with pytest.raises(DataError, match=f"^'{given}': {said}"):
            mmdata.load_run(given)


def test_evaluate_takes_a_set_with_one_image_a_pair(
    make_run: MakeRun, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "images").symlink_to(photos / "raw")
    texts = {"caption": "picture 0 of a round dog", "negative_caption": "an odd one, cmyk.jpg"}
    entries = {str(i): {"filename": f"0{i}.jpg", **texts} for i in (0, 2, 3)}
    (tmp_path / "add_att.json").write_text(json.dumps(entries))
    run = make_run()
    words = [
        run,
        "--pairs",
        tmp_path / "add_att.json",
        "--shards",
        photos / "shards",
        "--out",
        tmp_path / "scores.json",
    ]
    assert main(["evaluate", *map(str, words), "--device", "cpu"]) == 0
    loaded = mmdata.load_run(run, "cpu")
    images = loaded.embed_images([photos / "raw" / f"0{i}.jpg" for i in (0, 2, 3)])
    true, false = loaded.embed_texts(list(texts.values()))
    expected = ((images @ true) > (images @ false)).double().mean().item()
    found = json.loads((tmp_path / "scores.json").read_text())
    assert found["compositional"] == {kind: {"accuracy": expected, "pairs": 3} for kind in ("add_att", "mean")}
    printed = capsys.readouterr().out
    assert f"add_att │ 3     │ {100 * expected:.1f} %" in printed
    (chance,) = [line for line in printed.splitlines() if "50.0 %" in line and "chance" in line]
    assert chance.replace("│", " ").split() == ["chance", "50.0", "%"]
