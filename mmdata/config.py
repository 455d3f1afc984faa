"""Settings: one YAML file with the sections data, model and train."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mmdata.compare_config import CompareConfig
from mmdata.data_config import DataConfig
from mmdata.settings import BelowOne, Positive, Settings, parse, read_yaml
from mmdata.train_config import TrainConfig


class ModelConfig(Settings):
    """Which towers, and how they meet."""

    name: Literal["micro", "tiny", "small", "vit_b_16", "pretrained"] = "tiny"
    """Built-in towers of a size; or pretrained: those that `clip`, or `vision` and `text`, name (transformers)."""
    clip: str | dict[str, Any] | None = None
    """CLIP, SigLIP or SigLIP 2: a folder, a Hugging Face name, or a config {model_type: clip, …} for random weights."""
    vision: str | dict[str, Any] | None = None
    """Any AutoModel for images: a folder or name, or a config with a model_type."""
    text: str | dict[str, Any] | None = None
    """Any AutoModel for text, likewise."""
    embed_dim: Positive | None = None
    """Features of the common space; default: the size's own, or 512 over `vision` and `text`. `clip` brings its own."""
    vocab_size: Positive | None = None
    """Entries of the built-in text tower's vocabulary; default: the tokenizer's."""
    freeze_image: bool = False
    """The image tower keeps its weights and runs in eval mode; a new projection above it is still trained (LiT)."""
    freeze_text: bool = False
    """The same for the text tower."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    dropout: BelowOne = 0.0
    """Of the built-in towers; those of transformers have theirs in their config."""
    logit_scale_init: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """Multiplier of cosine similarities at the start; default: the pretrained model's, else 1 / 0.07."""
    logit_bias_init: float | None = None
    """Bias of the logits at the start, for the siglip loss (in the paper -10); default: the pretrained, else none."""


class Config(Settings):
    """The whole file."""

    data: DataConfig
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    compare: CompareConfig | None = None
    """For `mmdata compare`, which trains several times; all other programs leave it alone."""

    @field_validator("compare", mode="before")
    @classmethod
    def _absent(cls, compare: object) -> object:
        return compare or None  # a run's config.yaml says `compare: null`


def load_config(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Config:
    """Read a YAML file into a `Config`.

    Args:
        path: the file.
        overrides: "section.key=value" strings, e.g. "data.num_workers=4"; values are parsed as YAML.

    Raises:
        ConfigError: no such file, not YAML, an unknown key (the nearest known one is named), a value out of range.
    """
    return parse(Config, read_yaml(path, overrides), origin=str(path))
