"""Settings of the section model: the towers and the space they meet in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mmdata.config.settings import BelowOne, MayChange, Positive, Settings


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
    gradient_checkpointing: MayChange[bool] = False
    """Recompute activations in backward: less memory, about a third more time."""
    dropout: BelowOne = 0.0
    """Of the built-in towers; those of transformers have theirs in their config."""
    logit_scale_init: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """Multiplier of cosine similarities at the start; default: the pretrained model's, else 1 / 0.07."""
    logit_bias_init: float | None = None
    """Bias of the logits at the start, for the siglip loss (in the paper -10); default: the pretrained, else none."""
