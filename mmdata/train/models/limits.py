"""What a model takes, as far as its settings tell it: known before weights are loaded or downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmdata.config import DataConfig, ModelConfig
from mmdata.config.images import ImagesConfig
from mmdata.train.models.clip_sizes import CLIP_SIZES, TEXT_POSITIONS
from mmdata.train.models.towers import PRESETS


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Shapes that the towers take, and what losses ask for; None: any, or not known from the settings.

    Attributes:
        patch_size: sides of whole images must be multiples of it.
        takes_patches: whether the image tower takes patches at native resolution.
        native_patch_size: side of such patches.
        positions: longest text in tokens.
        vocab_size: entries of the text tower's vocabulary.
        has_bias: whether the model has a logit_bias.
    """

    patch_size: int | None = None
    takes_patches: bool | None = None
    native_patch_size: int | None = None
    positions: int | None = None
    vocab_size: int | None = None
    has_bias: bool | None = None


def limits_of(config: ModelConfig) -> ModelLimits:
    """The limits of the towers that settings name; of a model on the Hugging Face hub nothing is known."""
    bias_is_set = config.logit_bias_init is not None
    own = ModelLimits(takes_patches=False, has_bias=bias_is_set)
    if config.name in PRESETS:
        return replace(own, patch_size=PRESETS[config.name].patch_size)
    if config.name in CLIP_SIZES:
        return replace(own, patch_size=CLIP_SIZES[config.name].patch_size, positions=TEXT_POSITIONS)
    image, text = config_of(config.clip or config.vision), config_of(config.clip or config.text)
    if image is None or text is None:
        # Two towers have no bias of their own. Which kind of model `clip` names is not known.
        return ModelLimits(has_bias=True if bias_is_set else None if config.clip else False)
    words = getattr(text, "text_config", text)
    native = image.vision_config.patch_size if image.model_type == "siglip2" else None
    return ModelLimits(
        patch_size=native,
        takes_patches=native is not None,
        native_patch_size=native,
        positions=getattr(words, "max_position_embeddings", None) or None,
        vocab_size=getattr(words, "vocab_size", None),
        has_bias=bias_is_set or (config.clip is not None and image.model_type in ("siglip", "siglip2")),
    )


def shape_problems(limits: ModelLimits, data: DataConfig) -> list[str]:
    """What a section `data` asks for and the towers do not take, one message each."""
    problems: list[str] = []
    if data.image_patches is not None:
        if limits.takes_patches is False:
            problems.append(
                "data.image_patches: the image tower takes whole images: set data.image_size or data.image_buckets in "
                "its place, or choose a SigLIP 2 NaFlex model (model_type siglip2)"
            )
        elif limits.native_patch_size not in (None, data.patch_size):
            problems.append(
                f"data.patch_size {data.patch_size}: the model's patches are {limits.native_patch_size} pixels wide; "
                f"set data.patch_size={limits.native_patch_size}"
            )
    elif limits.patch_size is not None:
        problems += _side_problems(limits.patch_size, data)
    # With a number of text_buckets the longest caption decides, which the plan knows: see `length_problem`.
    if isinstance(data.text_buckets, list):
        problems += length_problem(data.text_buckets[-1], limits.positions)
    return problems


def length_problem(longest: int, positions: int | None) -> list[str]:
    """A message if texts of `longest` tokens are too long for a text tower, else nothing."""
    if positions is None or longest <= positions:
        return []
    return [
        f"data.max_length: texts of up to {longest} tokens are longer than the {positions} positions of the text "
        f"tower; set data.max_length={positions}"
    ]


def _side_problems(patch_size: int, data: ImagesConfig) -> list[str]:
    """Messages for image sides that are no multiples of the model's patch size."""
    if isinstance(data.image_buckets, int):
        if data.patch_size % patch_size == 0:
            return []
        return [
            f"data.patch_size {data.patch_size}: the shapes that image_buckets chooses are multiples of it, and the "
            f"model's patches are {patch_size} pixels wide; set data.patch_size={patch_size}"
        ]
    if data.image_buckets is None:
        if data.image_size % patch_size == 0:
            return []
        near = max(1, round(data.image_size / patch_size)) * patch_size
        return [
            f"data.image_size {data.image_size}: not a multiple of the model's patch size {patch_size}; "
            f"set data.image_size={near}"
        ]
    wrong = [list(shape) for shape in data.image_buckets if any(side % patch_size for side in shape)]
    if not wrong:
        return []
    return [f"data.image_buckets {wrong}: sides must be multiples of the model's patch size {patch_size}"]


def config_of(source: str | dict[str, Any] | None) -> Any:
    """The transformers config of a folder or a dictionary; None for a name on the hub, and where it cannot be read."""
    if source is None or (isinstance(source, str) and not Path(source).is_dir()):
        return None
    # Imported here: transformers takes seconds to import, and the built-in towers do not need it.
    from transformers import AutoConfig

    try:
        if isinstance(source, str):
            return AutoConfig.from_pretrained(source)
        settings = dict(source)
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except Exception:  # the model is loaded next, and that says what is wrong
        return None
