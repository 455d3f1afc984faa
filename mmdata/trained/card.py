"""The model card of an exported run: README.md, in the form that Hugging Face shows."""

from __future__ import annotations

from typing import Any

import yaml

from mmdata.config import DataConfig
from mmdata.config.images import ImagesConfig
from mmdata.trained.run import TrainedRun

SHARES = ("_r1", "_r5", "_r10")
"""Ends of the names of scores that are shares of images or texts."""


def model_card(run: TrainedRun, kind: str, name: str, scores: dict[str, Any]) -> str:
    """The text of README.md.

    Args:
        run: the trained model.
        kind: name of the class that loads it.
        name: of the model.
        scores: of `mmdata evaluate`; may be empty.
    """
    head = {"library_name": "transformers", "pipeline_tag": "zero-shot-image-classification", "tags": ["mmdata"]}
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {name}",
        f"A dual encoder of images and texts ({run.embed_dim} features), trained with mmdata: "
        f"{run.step:,} steps, {run.epoch} epochs.",
        "## Use",
        f"```python\n{usage(kind, 'FOLDER')}\n```",
        *_facts(run, kind),
        *_score_table(scores),
        "## Settings",
        f"```yaml\n{yaml.safe_dump(_settings(run), sort_keys=False, allow_unicode=True)}```",
    ]
    return "\n\n".join(parts) + "\n"


def usage(kind: str, folder: str) -> str:
    """Python that loads the folder and compares an image with texts."""
    # AutoTokenizer takes Siglip2Tokenizer for every model of this type, whatever the folder says.
    tokenizer = "PreTrainedTokenizerFast" if kind == "Siglip2Model" else "AutoTokenizer"
    padding = '"max_length"' if kind.startswith("Siglip") else "True"
    return "\n".join(
        [
            "from PIL import Image, ImageOps",
            f"from transformers import {', '.join(sorted(['AutoImageProcessor', kind, tokenizer]))}",
            "",
            f'model = {kind}.from_pretrained("{folder}").eval()',
            f'processor = AutoImageProcessor.from_pretrained("{folder}")',
            f'tokenizer = {tokenizer}.from_pretrained("{folder}")',
            'photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGBA")',
            'photo = Image.alpha_composite(Image.new("RGBA", photo.size, "white"), photo).convert("RGB")',
            'images = processor(photo, return_tensors="pt")',
            f'texts = tokenizer(["a dog", "a cat"], padding={padding}, truncation=True, return_tensors="pt")',
            "print(model(**texts, **images).logits_per_image)",
        ]
    )


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
