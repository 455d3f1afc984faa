"""Towers of the transformers library: CLIP, SigLIP, SigLIP 2, or any vision and text AutoModel; open_clip's as a CLIP.

Weights come from a local folder or a Hugging Face name, as safetensors only; a config alone gives random weights. No
code from a repository is run.
"""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from mmdata.config import ModelConfig
from mmdata.config.wrong_place import other_setting
from mmdata.errors import ConfigError
from mmdata.train.models.expected_inputs import IMAGENET_STATS, PixelStats, expected_inputs, of_one_rank
from mmdata.train.models.open_clip import read_open_clip
from mmdata.train.models.towers import Towers
from mmdata.train.models.transformers_towers import (
    AnyImageTower,
    AnyTextTower,
    ClipImageTower,
    ClipTextTower,
    Siglip2ImageTower,
    SiglipTextTower,
    add_patch_dropout,
    faster_on_a_gpu,
    sentence_pooling,
)
from mmdata.train.models.weights import difference

logger = logging.getLogger("mmdata")

Source = str | dict[str, Any]

CLIP_TYPES = ("clip", "siglip", "siglip2")
"""Values of model_type with both towers in one model."""


def load(config: ModelConfig) -> Towers:
    """The towers that settings name: both of `clip` or `open_clip`, which end in one space, or `vision` and `text`.

    Of a CLIP or SigLIP in `vision` or `text`, its tower of that kind is taken.

    Raises:
        ConfigError: nothing to load there, a model of another type, or one whose width cannot be told.
    """
    if config.open_clip is not None:
        return _of_open_clip(config, config.open_clip)
    keys = ("model.clip", "model.clip") if config.clip is not None else ("model.vision", "model.text")
    vision, text = config.clip or config.vision, config.clip or config.text
    assert vision is not None, "checked before"
    assert text is not None, "checked before"
    vision_model = text_model = _load(vision, key=keys[0], gradient_checkpointing=config.gradient_checkpointing)
    scale, bias = None, None
    if config.clip is None:
        text_model = _load(text, key=keys[1], gradient_checkpointing=config.gradient_checkpointing)
    else:
        scale, bias = _scale_and_bias(vision_model, is_new=not isinstance(config.clip, str))
    image = _image_tower(vision_model, keys[0])
    if config.patch_dropout:
        add_patch_dropout(image[0], config.patch_dropout, key=keys[0])
    return Towers(
        *image,
        *_text_tower(text_model, keys[1]),
        embed_dim=512 if config.clip is None else None,
        pixel_stats=_pixel_stats(vision, vision_model),
        vocab_size=int(getattr(text_model.config, "text_config", text_model.config).vocab_size),
        logit_scale=scale,
        logit_bias=bias,
    )


def _of_open_clip(config: ModelConfig, source: str) -> Towers:
    key = "model.open_clip"
    found = read_open_clip(source, quick_gelu=config.quick_gelu)
    model = _load(found.config, key=key, gradient_checkpointing=config.gradient_checkpointing)
    model.load_state_dict(found.weights())
    heads = [found.config[part]["num_attention_heads"] for part in ("vision_config", "text_config")]
    kind = found.config["text_config"]["hidden_act"]
    level = logging.INFO if found.has_config else of_one_rank()
    said = "model.open_clip '%s': taken with %d heads for images and %d for texts, activation %s"
    logger.log(level, said, source, *heads, kind)
    return Towers(
        *_image_tower(model, key),
        *_text_tower(model, key),
        embed_dim=None,
        pixel_stats=found.pixel_stats,
        vocab_size=model.config.text_config.vocab_size,
        logit_scale=math.exp(model.logit_scale.item()),
        logit_bias=found.logit_bias,
        has_clips_tokenizer=not found.has_own_tokenizer,
    )


def _scale_and_bias(model: Any, *, is_new: bool) -> tuple[float, float | None]:
    kind = model.config.model_type
    if kind not in CLIP_TYPES:
        raise ConfigError(
            f"model.clip: model_type '{kind}'; expected {', '.join(CLIP_TYPES)}. "
            "Other towers go to model.vision and model.text"
        )
    if kind == "clip":
        return math.exp(model.config.logit_scale_init_value if is_new else model.logit_scale.item()), None
    # The library leaves scale 1 and bias 0 in a SigLIP without weights; the paper starts at 10 and -10.
    return (10.0, -10.0) if is_new else (math.exp(model.logit_scale.item()), model.logit_bias.item())


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


def _load(source: Source, *, key: str, gradient_checkpointing: bool) -> Any:
    """The model, in float32."""
    loaded: dict[str, Any] = {}
    if isinstance(source, str) and (other := other_setting(Path(source), key=key)):
        raise ConfigError(other)
    try:
        if isinstance(source, str):
            # transformers 5 keeps the dtype of the file; an optimizer on float16 weights loses small updates silently.
            model, loaded = AutoModel.from_pretrained(
                source,
                dtype=torch.float32,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        else:
            settings = dict(source)
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
            model = AutoModel.from_config(config, dtype=torch.float32)
    except KeyError as error:
        raise ConfigError(f"{key}: a config needs a model_type, such as clip; got {source!r}") from error
    except (OSError, ValueError, StrictDataclassError) as error:  # the last: a value of a wrong type
        why = textwrap.shorten(str(error), 200)
        raise ConfigError(
            f"{key}: cannot load {source!r}: give a folder with config.json and model.safetensors, a Hugging Face "
            f"name, or a config with a known model_type ({why})"
        ) from error
    if isinstance(source, str):
        _check_whole(model, loaded, source, key)
    if key == "model.text" and isinstance(source, str) and (pooling := sentence_pooling(source)):
        model.config.sentence_pooling = pooling
    faster_on_a_gpu(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _check_whole(model: PreTrainedModel, loaded: dict[str, Any], source: str, key: str) -> None:
    """Refuse weights of another architecture. Of towers on their own the pooling may be new, as that of ViT's is."""
    own: dict[str, Sequence[object]] = {name: value.shape for name, value in model.state_dict().items()}
    # Before transformers 5 these are names without shapes.
    others = dict((key, "?") if isinstance(key, str) else key[:2] for key in loaded["mismatched_keys"])
    missing = loaded["missing_keys"] if model.config.model_type in CLIP_TYPES else ()
    if why := difference(own, {name: others.get(name, shape) for name, shape in own.items() if name not in missing}):
        raise ConfigError(
            f"{key} '{source}': its weights are not those of its config.json: {why}; use the folder as "
            "save_pretrained wrote it"
        )


def _width(model: PreTrainedModel, key: str) -> int:
    if isinstance(width := getattr(model.config, "hidden_size", None), int):
        return width
    sizes = getattr(model.config, "hidden_sizes", None)  # of a convolutional net's stages; the last is the output
    if sizes:
        return int(sizes[-1])
    raise ConfigError(f"{key}: {type(model).__name__} has no hidden_size in its config; choose another model")


def _pixel_stats(source: Source, model: Any) -> PixelStats:
    """What preprocessor_config.json beside the weights says, else what models of this kind are trained with."""
    folder = source if isinstance(source, str) else None
    stats = expected_inputs(model.config, source=folder).pixel_stats
    if folder is not None and stats is None:
        logger.log(
            of_one_rank(),
            "'%s': no preprocessor_config.json, so that pixels get ImageNet's mean and deviation; if the model expects "
            "others, save its image processor into the folder",
            folder,
        )
    return stats or IMAGENET_STATS
