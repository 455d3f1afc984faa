"""Settings of the section model: the towers and the space they meet in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mmdata.config.settings import BelowOne, Location, MayChange, Positive, Settings


class ModelConfig(Settings):
    """Which towers, and how they meet."""

    name: Literal["micro", "tiny", "small", "base", "vit_b_32", "vit_b_16", "vit_l_14", "pretrained"] = "tiny"
    """Which towers. micro, tiny, small and base: this library's own, for any image shape and text length. vit_b_32,
    vit_b_16 and vit_l_14: CLIP's, of open_clip's sizes, for texts of at most 77 tokens. pretrained: those that `clip`,
    or `vision` and `text`, name (transformers)."""
    clip: str | dict[str, Any] | None = None
    """CLIP, SigLIP or SigLIP 2: a folder, a Hugging Face name, or a config {model_type: clip, …} for random weights."""
    vision: str | dict[str, Any] | None = None
    """Any AutoModel for images: a folder or name, or a config with a model_type."""
    text: str | dict[str, Any] | None = None
    """Any AutoModel for text, likewise."""
    init_from: Location | None = None
    """Weights to begin with: a run, one of its checkpoints, an exported folder, or a folder with a CLIP, SigLIP or
    SigLIP 2 that transformers has saved, of the architecture that these settings name. The run begins at step 0."""
    embed_dim: Positive | None = None
    """Features of the common space; default: the size's own, or 512 over `vision` and `text`. `clip` brings its own."""
    vocab_size: Positive | None = None
    """Entries of the text tower's vocabulary, unless the towers are pretrained; default: the tokenizer's."""
    freeze_image: bool = False
    """The image tower keeps its weights and runs in eval mode; a new projection above it is still trained (LiT)."""
    freeze_text: bool = False
    """The same for the text tower."""
    gradient_checkpointing: MayChange[bool] = False
    """Recompute activations in backward: less memory, about a third more time."""
    dropout: BelowOne = 0.0
    """Share of activations that are dropped in training, in micro, tiny, small and base; the towers of transformers
    have theirs in their config."""
    logit_scale_init: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """Multiplier of cosine similarities at the start; default: the pretrained model's, else 1 / 0.07."""
    logit_bias_init: float | None = None
    """Bias of the logits at the start, for the siglip loss (in the paper -10); default: the pretrained, else none."""
