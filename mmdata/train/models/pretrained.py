"""Towers of the transformers library: CLIP, SigLIP, SigLIP 2, or any vision and text AutoModel.

Weights come from a local folder or a Hugging Face name, as safetensors only; a config alone gives random weights. No
code from a repository is run.
"""

from __future__ import annotations

import logging
import math
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from mmdata.errors import ConfigError
from mmdata.train.models.expected_inputs import PixelStats, expected_inputs, of_one_rank
from mmdata.train.models.transformers_towers import (
    AnyImageTower,
    AnyTextTower,
    ClipImageTower,
    ClipTextTower,
    Siglip2ImageTower,
    SiglipTextTower,
    faster_on_a_gpu,
)

logger = logging.getLogger("mmdata")

Source = str | dict[str, Any]

CLIP_TYPES = ("clip", "siglip", "siglip2")
"""Values of model_type with both towers in one model."""


@dataclass(frozen=True, kw_only=True)
class TransformersTowers:
    """What `DualEncoder` is made of.

    Attributes:
        image: (B, 3, H, W) floats to (B, image_width).
        text: (B, L) input_ids and attention_mask to (B, text_width).
        image_width: features of the image tower.
        text_width: features of the text tower.
        projected: the towers end in one common space already (CLIP, SigLIP).
        vocab_size: entries of the text tower's vocabulary.
        pixel_stats: mean and standard deviation of each channel that the image tower expects.
        logit_scale: learned multiplier, where the model has one.
        logit_bias: learned bias, where the model has one.
    """

    image: nn.Module
    text: nn.Module
    image_width: int
    text_width: int
    projected: bool
    vocab_size: int
    pixel_stats: PixelStats
    logit_scale: float | None = None
    logit_bias: float | None = None


def load_clip(source: Source, *, gradient_checkpointing: bool = False) -> TransformersTowers:
    """Both towers of one model of type clip, siglip or siglip2.

    Args:
        source: folder, Hugging Face name, or config with a model_type.
        gradient_checkpointing: recompute activations in backward.

    Raises:
        ConfigError: nothing to load there, or a model of another type.
    """
    model = _load(source, key="model.clip", gradient_checkpointing=gradient_checkpointing)
    kind = model.config.model_type
    if kind not in CLIP_TYPES:
        raise ConfigError(
            f"model.clip: model_type '{kind}'; expected {', '.join(CLIP_TYPES)}. "
            "Other towers go to model.vision and model.text"
        )
    image, image_width = _image_tower(model, "model.clip")
    text, text_width = _text_tower(model, "model.clip")
    if not isinstance(source, str):
        # The library leaves scale 1 and bias 0 in a SigLIP without weights; the paper starts at 10 and -10.
        scale, bias = (math.exp(model.config.logit_scale_init_value), None) if kind == "clip" else (10.0, -10.0)
    else:
        scale, bias = math.exp(model.logit_scale.item()), None if kind == "clip" else model.logit_bias.item()
    return TransformersTowers(
        image=image,
        text=text,
        image_width=image_width,
        text_width=text_width,
        projected=True,
        vocab_size=_vocab_size(model),
        pixel_stats=_pixel_stats(source, model),
        logit_scale=scale,
        logit_bias=bias,
    )


def load_pair(vision: Source, text: Source, *, gradient_checkpointing: bool = False) -> TransformersTowers:
    """A vision model and a text model; they still need projections to a common space.

    Args:
        vision: folder, Hugging Face name, or config with a model_type; of a CLIP or SigLIP, its image tower.
        text: likewise; of a CLIP or SigLIP, its text tower.
        gradient_checkpointing: recompute activations in backward.

    Raises:
        ConfigError: nothing to load there, or a model whose width cannot be told.
    """
    vision_model = _load(vision, key="model.vision", gradient_checkpointing=gradient_checkpointing)
    text_model = _load(text, key="model.text", gradient_checkpointing=gradient_checkpointing)
    image_tower, image_width = _image_tower(vision_model, "model.vision")
    text_tower, text_width = _text_tower(text_model, "model.text")
    return TransformersTowers(
        image=image_tower,
        text=text_tower,
        image_width=image_width,
        text_width=text_width,
        projected=False,
        vocab_size=_vocab_size(text_model),
        pixel_stats=_pixel_stats(vision, vision_model),
    )


def _image_tower(model: Any, key: str) -> tuple[nn.Module, int]:
    """The image tower of any model, and its number of features."""
    kind = model.config.model_type
    if kind == "clip":
        return ClipImageTower(model), int(model.config.projection_dim)
    if kind == "siglip":
        return AnyImageTower(model.vision_model), int(model.config.vision_config.hidden_size)
    if kind == "siglip2":
        return Siglip2ImageTower(model), int(model.config.vision_config.hidden_size)
    return AnyImageTower(model), _width(model, key)


def _text_tower(model: Any, key: str) -> tuple[nn.Module, int]:
    """The text tower of any model, and its number of features."""
    kind = model.config.model_type
    if kind == "clip":
        return ClipTextTower(model), int(model.config.projection_dim)
    if kind in CLIP_TYPES:
        return SiglipTextTower(model), int(model.text_model.head.out_features)
    return AnyTextTower(model), _width(model, key)


def _vocab_size(model: Any) -> int:
    return int(getattr(model.config, "text_config", model.config).vocab_size)


def _load(source: Source, *, key: str, gradient_checkpointing: bool) -> Any:
    """The model, in float32."""
    try:
        if isinstance(source, str):
            # transformers 5 keeps the dtype of the file; an optimizer on float16 weights loses small updates silently.
            model = AutoModel.from_pretrained(source, dtype=torch.float32, use_safetensors=True)
        else:
            settings = dict(source)
            model = AutoModel.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    except KeyError as error:
        raise ConfigError(f"{key}: a config needs a model_type, such as clip; got {source!r}") from error
    except (OSError, ValueError, StrictDataclassError) as error:  # the last: a value of a wrong type
        why = textwrap.shorten(str(error), 200)
        raise ConfigError(
            f"{key}: cannot load {source!r}: give a folder with config.json and model.safetensors, a Hugging Face "
            f"name, or a config with a known model_type ({why})"
        ) from error
    faster_on_a_gpu(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _width(model: PreTrainedModel, key: str) -> int:
    for name in ("hidden_size", "d_model", "dim", "n_embd"):
        if isinstance(width := getattr(model.config, name, None), int):
            return width
    sizes = getattr(model.config, "hidden_sizes", None)  # of a convolutional net's stages; the last is the output
    if sizes:
        return int(sizes[-1])
    raise ConfigError(f"{key}: {type(model).__name__} has no hidden_size in its config; choose another model")


def _pixel_stats(source: Source, model: Any) -> PixelStats:
    """What preprocessor_config.json beside the weights says, else what models of this kind are trained with."""
    folder = source if isinstance(source, str) else None
    expected = expected_inputs(model.config, source=folder)
    if folder is not None and not expected.are_stats_known:
        logger.log(
            of_one_rank(),
            "'%s': no preprocessor_config.json, so that pixels get ImageNet's mean and deviation; if the model expects "
            "others, save its image processor into the folder",
            folder,
        )
    return expected.pixel_stats
