"""The examples of other tasks run as a user would run them, on models that are made here from configs."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    pipeline,
)
from transformers.trainer_utils import get_last_checkpoint

from mmdata import cli
from mmdata.text.tokenizer import train_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGE = {"image_size": 32, "patch_size": 16}
COLOURS = {"blue": (30, 60, 220), "green": (20, 200, 60), "red": (220, 40, 40)}
Run = Callable[..., None]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`example("captioning", …)` runs an example in an empty folder."""

    def run(name: str, *arguments: object) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        torch.manual_seed(0)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return run


def paint(colour: str, number: int) -> Image.Image:
    noise = np.random.default_rng(number).integers(-20, 20, (32, 32, 3))
    return Image.fromarray((np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of three classes, in train/ and val/, with the names of the classes."""
    folder = tmp_path_factory.mktemp("classes")
    for colour in COLOURS:
        (folder / "raw" / colour).mkdir(parents=True)
        for number in range(10):
            paint(colour, number).save(folder / "raw" / colour / f"{number}.png")
    command = ["convert", folder / "raw", folder / "shards", "--val-share", 0.3, "--workers", 1]
    assert cli.main([*map(str, command)]) == 0
    return folder / "shards"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards whose captions are a question and its answer, and their tokenizer."""
    folder = tmp_path_factory.mktemp("questions")
    (folder / "raw").mkdir()
    lines = ["filepath,caption"]
    for number in range(18):
        colour = sorted(COLOURS)[number % 3]
        paint(colour, number).save(folder / "raw" / f"{number}.png")
        lines.append(f"{number}.png,what colour is it? {colour}")
    (folder / "raw" / "table.csv").write_text("\n".join(lines) + "\n")
    command = ["convert", folder / "raw" / "table.csv", folder / "shards", "--workers", 1]
    assert cli.main([*map(str, command), "keep_duplicates=true"]) == 0
    return folder / "shards"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT of 1,000 other classes, and an image processor that is not the usual one."""
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(**SMALL, **IMAGE, num_labels=2)).save_pretrained(folder)
    processor = CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size=32, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "extra"),
    [("classify_huggingface", []), ("classify_lightning", ["--image-size", 32])],
)
def test_classifier_knows_the_names_and_keeps_its_image_processor(
    name: str, extra: list[object], example: Run, classes: Path, classifier: Path, tmp_path: Path
):
    pytest.importorskip("accelerate" if name == "classify_huggingface" else "lightning")
    arguments = [classes / "train", classes / "val", classifier, "--batch-size", 4, "--lr", 0.01, *extra]
    for epochs in (5, 6):  # the second call resumes
        example(name, *arguments, "--epochs", epochs, "--out", "out")
    saved = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert saved["id2label"] == {"0": "blue", "1": "green", "2": "red"}
    assert saved["label2id"] == {"blue": 0, "green": 1, "red": 2}
    assert json.loads((tmp_path / "out" / "model" / "preprocessor_config.json").read_text())["image_std"] == [
        0.2,
        0.3,
        0.4,
    ]
    judge = pipeline("image-classification", str(tmp_path / "out" / "model"), device="cpu")
    found = [judge(paint(colour, 99))[0]["label"] for colour in COLOURS]
    assert found == list(COLOURS)


@pytest.mark.filterwarnings("ignore")
def test_trainer_goes_on_with_all_weights(example: Run, classes: Path, classifier: Path, tmp_path: Path):
    pytest.importorskip("accelerate")
    found, sizes = [], ["--batch-size", 4, "--epochs", 2]
    for _ in range(2):
        example("classify_huggingface", classes / "train", classes / "val", classifier, *sizes, "--out", "out")
        found.append(load_file(tmp_path / "out" / "model" / "model.safetensors"))
        shutil.rmtree(get_last_checkpoint(tmp_path / "out"))  # as if it had been killed in the second epoch
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.filterwarnings("ignore")
def test_captioning_learns_to_write(example: Run, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "model"
    train_tokenizer(["what colour is it? red green blue"] * 3, folder, vocab_size=300, max_length=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=32,
        n_embd=32,
        n_layer=1,
        n_head=2,
        add_cross_attention=True,
        is_decoder=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = VisionEncoderDecoderModel(encoder=ViTModel(ViTConfig(**SMALL, **IMAGE)), decoder=GPT2LMHeadModel(text))
    model.config.decoder_start_token_id = tokenizer.bos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    arguments = ["--epochs", 15, "--batch-size", 6, "--max-length", 32, "--lr", 0.01]
    example("captioning", questions, questions, folder, *arguments)
    losses = [float(loss) for loss in re.findall(r"validation (\S+)", capsys.readouterr().out)]
    assert losses[-1] < 0.5 * losses[0]
    written = (tmp_path / "runs" / "captioning" / "captions.txt").read_text().splitlines()
    assert len(written) == 12
    assert sum(one == two.removeprefix("  true: ") for one, two in zip(written[::2], written[1::2], strict=True)) >= 4


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    """A LLaVA with a chat template."""
    folder = tmp_path / "llava"
    train_tokenizer(["what colour is it? red green blue"] * 3, folder, vocab_size=300, max_length=64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = ["<image>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SMALL, **IMAGE),
        text_config=LlamaConfig(**SMALL, vocab_size=len(tokenizer), max_position_embeddings=64),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    LlavaProcessor(
        images,
        tokenizer,
        chat_template=TEMPLATE,
        patch_size=16,
        vision_feature_select_strategy="default",
        image_token="<image>",
    ).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_question_answering_trains_the_answers_only(
    example: Run, questions: Path, llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given: list[Any] = []
    forward = LlavaForConditionalGeneration.forward

    def spy(self: Any, **inputs: Any) -> Any:
        given.append(inputs)
        return forward(self, **inputs)

    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", spy)
    sizes = ["--image-tokens", 4, "--max-length", 48, "--batch-size", 6]
    example("answer_questions", questions, llava, *sizes, "--epochs", 6, "--lr", 0.01)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs" / "answers")
    for inputs in (given[0], given[-1]):
        for ids, labels in zip(inputs["input_ids"], inputs["labels"], strict=True):
            whole = tokenizer.decode(ids)
            assert whole.count("<image>") == 4
            answer = tokenizer.decode(labels[labels != -100])
            assert re.search(r"(blue|green|red) ?<\|end\|>", answer)
            assert "colour" in whole
            assert "colour" not in answer
    assert given[-1]["pixel_values"].dtype == torch.float32


def test_linear_probe_tells_classes_apart_and_keeps_its_features(
    example: Run, classes: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train_tokenizer(["what colour is it? red green blue"] * 3, tmp_path / "tokenizer", vocab_size=300, max_length=32)
    settings = {
        "data": {
            "shards": str(questions),
            "tokenizer": str(tmp_path / "tokenizer"),
            "global_batch_size": 6,
            "image_size": 32,
            "max_length": 32,
        },
        "model": {"name": "micro"},
        "train": {"epochs": 2, "warmup_steps": 1, "output": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    assert cli.main(["train", str(tmp_path / "run.yaml")]) == 0
    capsys.readouterr()
    made: set[int] = set()
    for penalty in (1e-4, 1e-2):
        example("linear_probe", tmp_path / "run", classes / "train", classes / "val", "--penalty", penalty)
        said = r"^linear probe: 100\.0% of 7 images, 3 classes, 23 to learn from$"
        assert re.search(said, capsys.readouterr().out, re.MULTILINE)
        times = {path.stat().st_mtime_ns for path in (tmp_path / "runs" / "features").iterdir()}
        assert len(times) == 2
        made = made or times
        assert made == times
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    example("linear_probe", tmp_path / "other", classes / "train", classes / "val")
    assert len([*(tmp_path / "runs" / "features").iterdir()]) == 4
