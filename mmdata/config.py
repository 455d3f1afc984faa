"""Settings: one YAML file with the sections data, model and train."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmdata.data_config import DataConfig
from mmdata.settings import BelowOne, Count, Integer, Location, Positive, Settings, parse, read_yaml


class ModelConfig(Settings):
    """Which towers, and how they meet."""

    name: Literal["tiny", "small", "vit_b_16", "pretrained"] = "tiny"
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


class MinerConfig(Settings):
    """Which in-batch negatives enter the loss."""

    name: Literal["top_k"]
    """top_k: the hardest negatives of each row, in both directions."""
    k: Positive = 64
    """Negatives kept for each row."""
    after_steps: Count = 0
    """Updates with all negatives first: an untrained model's hardest negatives are noise, and it collapses on them."""


class TrainConfig(Settings):
    """How the towers are trained."""

    output: Location | None = None
    """Folder of the run; runs/NAME for configs/NAME.yaml unless given. A run found there is resumed."""
    epochs: Positive | None = None
    """Passes over the data; this or `steps` is required to train."""
    steps: Positive | None = None
    """Optimizer updates in all, in place of `epochs`."""
    overfit_batches: Positive | None = None
    """Train on the first so many batches of epoch 0 again and again: can the model learn them? null: on all."""
    lr: Annotated[float, Field(gt=0.0)] = 5e-4
    """Learning rate at the end of the warm-up; falls to 0 along a half cosine."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.2
    """AdamW's, on matrices only: not on biases, norms, logit_scale and logit_bias."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.98)
    warmup_steps: Count = 100
    """Updates over which the learning rate rises linearly from 0."""
    grad_clip_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Largest norm of the whole gradient; null leaves it as it is."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast type of the towers; fp16 brings a gradient scaler."""
    micro_batch_size: Positive | None = None
    """Rows per forward on a rank; the gradients are those of the whole batch. null: all rows at once."""
    loss: Literal["clip", "siglip"] = "clip"
    miner: MinerConfig | None = None
    mask_false_negatives: bool = False
    """Rows with the same image or caption are no negatives of each other; sets `data.hashes`."""
    log_every_steps: Positive = 10
    checkpoint_every_steps: Positive = 1000
    """One is also written at the end and when a signal stops the run."""
    keep_checkpoints: Positive = 2
    """The newest ones; older ones are deleted."""
    evaluate_every_epochs: Count = 1
    """On `data.val_shards`; 0: only at the end."""
    seed: Integer = 0
    """Of the weights and of dropout; rank r draws from its own stream."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU of the rank where there is one."""
    tensorboard: bool = False
    """Also write scalars for TensorBoard into the run's folder."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs ({self.epochs}) and steps ({self.steps}) exclude each other: give one")
        return self


class Config(Settings):
    """The whole file."""

    data: DataConfig
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()


def load_config(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Config:
    """Read a YAML file into a `Config`.

    Args:
        path: the file.
        overrides: "section.key=value" strings, e.g. "data.num_workers=4"; values are parsed as YAML.

    Raises:
        ConfigError: no such file, not YAML, an unknown key (the nearest known one is named), a value out of range.
    """
    return parse(Config, read_yaml(path, overrides), origin=str(path))
