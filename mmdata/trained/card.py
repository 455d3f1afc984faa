"""The model card of an exported run: README.md, in the form that Hugging Face shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mmdata.config import DataConfig
from mmdata.config.images import ImagesConfig
from mmdata.trained.run import TrainedRun

AVERAGED = "; the weights are a moving average"
MIXED = " The weights are those of WiSE-FT (arXiv:2109.01903): {} of the trained ones, the rest of those before."
USAGE = Path(__file__).parent / "usage"
"""A file of Python for each library that loads an exported folder."""
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
    head = {"library_name": _library(kind), "pipeline_tag": "zero-shot-image-classification", "tags": ["mmdata"]}
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {name}",
        f"A dual encoder of images and texts ({run.embed_dim} features), trained with mmdata: "
        f"{run.step:,} steps, {run.epoch} epochs{AVERAGED if run.is_average else ''}."
        f"{MIXED.format(run.alpha) if run.alpha < 1 else ''}",
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
    # AutoTokenizer takes Siglip2Tokenizer for every model of this type, whatever the folder says.
    tokenizer = "PreTrainedTokenizerFast" if kind == "Siglip2Model" else "AutoTokenizer"
    padding = '"max_length"' if kind.startswith("Siglip") else "True"
    names = ", ".join(sorted(["AutoImageProcessor", kind, tokenizer]))
    template = (USAGE / f"{_library(kind)}.txt").read_text(encoding="utf-8").rstrip()
    return template.format(folder=folder, kind=kind, names=names, padding=padding, tokenizer=tokenizer)


def _library(kind: str) -> str:
    return kind if kind in ("open_clip", "onnx") else "transformers"


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
        bias = "" if run.logit_bias is None else f", to which {run.logit_bias:.6g} is added,"
        lines.append(
            "image.onnx takes normalised float32 pixels, of this size alone; both models take any number of rows, and "
            f"text.onnx texts of any length up to the tokenizer's. Features are L2-normalised. Their products times "
            f"{run.logit_scale:.6g}{bias} are the logits."
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
    hidden: Any = {"model": {"init_from", "open_clip"}, "train": {"output": True, "distill": {"teacher"}}}
    hidden["data"] = {*DataConfig.model_fields} - shown
    return run.config.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
