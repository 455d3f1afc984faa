"""The model card of an exported run: README.md, in the form that Hugging Face shows."""

from __future__ import annotations

from typing import Any

import yaml

from mmdata.config import DataConfig
from mmdata.config.images import ImagesConfig
from mmdata.trained.run import TrainedRun

MIXED = " The weights are those of WiSE-FT (arXiv:2109.01903): {} of the trained ones, the rest of those before."
PHOTO = """
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGBA")
photo = Image.alpha_composite(Image.new("RGBA", photo.size, "white"), photo).convert("RGB")
"""
TRANSFORMERS = (
    """from PIL import Image, ImageOps
from transformers import {names}

model = {kind}.from_pretrained("{folder}").eval()
processor = AutoImageProcessor.from_pretrained("{folder}")
tokenizer = {tokenizer}.from_pretrained("{folder}")""",
    """images = processor(photo, return_tensors="pt")
texts = tokenizer(["a dog", "a cat"], padding={padding}, truncation=True, return_tensors="pt")
print(model(**texts, **images).logits_per_image)""",
)
USAGE = {
    "open_clip": (
        """import open_clip
from PIL import Image, ImageOps

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:{folder}")
tokenizer = open_clip.get_tokenizer("local-dir:{folder}")""",
        """images = model.eval().encode_image(preprocess(photo)[None], normalize=True)
texts = model.encode_text(tokenizer(["a dog", "a cat"]), normalize=True)
print(model.logit_scale.exp() * images @ texts.T)""",
    ),
    "onnx": (
        """from onnxruntime import InferenceSession
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoTokenizer

image_model, text_model = (InferenceSession(f"{folder}/{{name}}.onnx") for name in ("image", "text"))
processor = AutoImageProcessor.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")""",
        """pixels = processor(photo, return_tensors="np")["pixel_values"]
tokens = tokenizer(["a dog", "a cat"], padding=True, truncation=True, return_tensors="np")
images = image_model.run(None, {{"pixel_values": pixels}})[0]
texts = text_model.run(None, {{name: tokens[name] for name in ("input_ids", "attention_mask")}})[0]
print(images @ texts.T)""",
    ),
}
"""Python around PHOTO that compares a photo with texts, for a kind of folder."""
SHARES = ("_r1", "_r5", "_r10")
"""Ends of the names of scores that are shares of images or texts."""


def model_card(run: TrainedRun, kind: str, name: str, scores: dict[str, Any]) -> str:
    """The text of README.md.

    Args:
        run: the trained model.
        kind: what loads it: a class of transformers, "open_clip" or "onnx".
        name: of the model.
        scores: of `mmdata evaluate`; may be empty.
    """
    library = kind if kind in USAGE else "transformers"
    head = {"library_name": library, "pipeline_tag": "zero-shot-image-classification", "tags": ["mmdata"]}
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {name}",
        f"A dual encoder of images and texts ({run.embed_dim} features), trained with mmdata: "
        f"{run.step:,} steps, {run.epoch} epochs." + (MIXED.format(run.alpha) if run.alpha < 1 else ""),
        "## Use",
        f"```python\n{usage(kind, 'FOLDER')}\n```",
        *_facts(run, kind),
        *_score_table(scores),
        "## Settings",
        f"```yaml\n{yaml.safe_dump(_settings(run), sort_keys=False, allow_unicode=True)}```",
    ]
    return "\n\n".join(parts) + "\n"


def usage(kind: str, folder: str) -> str:
    """Python that loads the folder and compares an image with texts; `kind` as for `model_card`."""
    before, after = USAGE.get(kind, TRANSFORMERS)
    # AutoTokenizer takes Siglip2Tokenizer for every model of this type, whatever the folder says.
    tokenizer = "PreTrainedTokenizerFast" if kind == "Siglip2Model" else "AutoTokenizer"
    padding = '"max_length"' if kind.startswith("Siglip") else "True"
    names = ", ".join(sorted(["AutoImageProcessor", kind, tokenizer]))
    said = {"kind": kind, "names": names, "tokenizer": tokenizer, "padding": padding, "folder": folder}
    return (before + PHOTO + after).format(**said)


def _facts(run: TrainedRun, kind: str) -> list[str]:
    """What a user of the folder must know of images and texts."""
    lines = [
        "Images are resized in another order and with other rounding than in training. The image "
        "processor neither turns images upright by their EXIF orientation nor composites transparent ones on white, as "
        "the training did: the code above does both.",
    ]
    if run.tokenizer.cleaning is not None:
        lines.append(
            "In training, HTML entities in texts were decoded (`salt &amp; pepper`). The tokenizer of this folder does "
            "not decode them: call `html.unescape` first."
        )
    if kind == "open_clip" and run.tokenizer.max_length < getattr(run.model.text_tower, "length", 0):
        lines.append(
            f"Texts were cut to {run.tokenizer.max_length} tokens in training; open_clip does not cut them there."
        )
    if kind == "onnx":
        bias = "" if run.logit_bias is None else f", to which {run.logit_bias:.6g} is added"
        lines.append(
            "image.onnx takes normalised float32 pixels, of this size alone; both models take any number of rows, and "
            f"text.onnx texts of any length up to the tokenizer's. Features are L2-normalised. Their products times "
            f"{run.logit_scale:.6g}{bias}, are the logits."
        )
    if kind.startswith("Siglip"):
        lines.append('Texts must be padded to the full length: `padding="max_length"`.')
    return ["\n".join(f"- {line}" for line in lines)]


def _score_table(scores: dict[str, Any]) -> list[str]:
    names = [name for name in scores if name.endswith(SHARES) or name.startswith(("chance_", "zero_shot_"))]
    shares = {name: f"{100 * scores[name]:.1f} %" for name in names}
    counts = {name: f"{scores[name]:,}" for name in ("images", "texts") if name in scores}
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in {**counts, **shares}.items()]
    return ["## Scores", "\n".join(["| | |", "|---|---|", *rows])] if rows else []


def _settings(run: TrainedRun) -> dict[str, Any]:
    """Settings that differ from the defaults: of the model, of the training, and of `data` those of images."""
    shown = {*ImagesConfig.model_fields, "max_length"}
    hidden = {"model": {"init_from"}, "train": {"output"}, "data": {*DataConfig.model_fields} - shown}
    return run.config.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
