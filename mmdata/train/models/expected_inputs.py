"""What a model of transformers expects of its inputs: mean and deviation of pixels, image size, text length.

A processor tells it, else preprocessor_config.json beside the weights, else the model's config.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from mmdata.batch import CLIP_MEAN, CLIP_STD
from mmdata.config import Config, DataConfig
from mmdata.errors import ConfigError, excerpt
from mmdata.launcher import launched

logger = logging.getLogger("mmdata")

PixelStats = tuple[tuple[float, ...], tuple[float, ...]]

CLIP_STATS: PixelStats = (CLIP_MEAN, CLIP_STD)
HALF_STATS: PixelStats = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET_STATS: PixelStats = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
KINDS = {"clip": CLIP_STATS, "siglip": HALF_STATS, "siglip2": HALF_STATS}
STATS_OF_KINDS = {**KINDS, **{f"{kind}_vision_model": stats for kind, stats in KINDS.items()}, "vit": HALF_STATS}
"""Mean and deviation with which models of a model_type are published, where all of them have the same."""
TEXT_KINDS = {*KINDS, *(f"{kind}_text_model" for kind in KINDS)}
"""Values of model_type whose positions are the text length that the model was trained with, not only a bound."""
NUMBERS = ("image_mean", "image_std", "rescale_factor", "size", "crop_size")
"""Settings of an image processor that are read here."""
UNBOUNDED = 1_000_000
"""A tokenizer without a longest text has a larger model_max_length."""


@dataclass(frozen=True, kw_only=True)
class ExpectedInputs:
    """Inputs with which a model was trained.

    Attributes:
        pixel_stats: mean and standard deviation of each channel, on the scale 0 to 1; None: neither a processor nor the
            kind of model tells them.
        image_size: side of square images, in pixels; None: any, or not known.
        max_length: longest text in tokens; None: any, or not known.
    """

    pixel_stats: PixelStats | None
    image_size: int | None
    max_length: int | None


def expected_inputs(
    config: Any, *, source: str | None = None, processor: Any = None, is_loaded: bool = False
) -> ExpectedInputs:
    """What a model expects.

    Args:
        config: of the model, of transformers; None: not known.
        source: folder or Hugging Face name of the model, where its image processor may be saved.
        processor: a processor, image processor or tokenizer of transformers; it comes before the folder.
        is_loaded: the model is in memory; the hub is not asked for what is not on this machine.

    Raises:
        ConfigError: a saved image processor cannot be read, or its settings are no numbers for RGB images.
    """
    settings = _image_settings(source, processor, is_loaded=is_loaded)
    vision, text = (getattr(config, f"{name}_config", config) for name in ("vision", "text"))
    try:
        stats, size = _stats(settings), _image_size(settings, getattr(vision, "image_size", None))
    except (AttributeError, TypeError, ValueError) as error:
        shown = {name: settings[name] for name in NUMBERS if name in settings}
        origin = f" of '{source}'" if source else ""
        raise ConfigError(
            f"the image processor{origin} has settings that are not those of RGB images: {error}; "
            f"got {excerpt(str(shown))}; save it again with transformers"
        ) from error
    stats = stats or STATS_OF_KINDS.get(str(getattr(vision, "model_type", "")))
    is_joint = getattr(text, "model_type", None) in TEXT_KINDS
    positions = getattr(text, "max_position_embeddings", None) if is_joint else None
    tokenizer = getattr(processor, "tokenizer", processor)
    lengths = [length for length in (positions, getattr(tokenizer, "model_max_length", None)) if length]
    longest = min(lengths, default=UNBOUNDED)
    return ExpectedInputs(pixel_stats=stats, image_size=size, max_length=int(longest) if longest < UNBOUNDED else None)


def inputs_of(model: Any, processor: Any = None) -> ExpectedInputs:
    """What a model that is loaded already expects; `processor` as for `expected_inputs`.

    Its image processor is looked for in its folder or among the downloaded files; nothing is downloaded.
    """
    config = getattr(model, "config", None)
    source = getattr(config, "_name_or_path", None)
    return expected_inputs(config, source=source, processor=processor, is_loaded=True)


def with_inputs_of_model(config: Config) -> Config:
    """The settings with image size and `max_length` of the folders that the section `model` names; see `fitted`."""
    model = config.model
    if model.open_clip is not None:
        # Imported here: other models do not need it.
        from mmdata.train.models.open_clip import read_open_clip

        clip = read_open_clip(model.open_clip, quick_gelu=model.quick_gelu).config
        size, length = clip["vision_config"]["image_size"], clip["text_config"]["max_position_embeddings"]
    else:
        image, text = (_expected_of_folder(model.clip or source) for source in (model.vision, model.text))
        size, length = image and image.image_size, text and text.max_length
    origin = "the folder of the model" if model.open_clip is None else "model.open_clip"
    data = fitted(config.data, image_size=size, max_length=length, origin=origin)
    return config.model_copy(update={"data": data})


def fitted(data: DataConfig, *, image_size: int | None, max_length: int | None, origin: str) -> DataConfig:
    """A section `data` with the image size and `max_length` of a model where they are not set.

    Where they are set to other values, they stay, and a warning says so.

    Args:
        data: settings.
        image_size: side of square images that the model expects; None: not known.
        max_length: longest text that the model expects; None: not known.
        origin: who says so, for messages.
    """
    expected: dict[str, int | None] = {}
    if data.image_buckets is None and data.image_patches is None:
        expected["image_size"] = image_size
    if isinstance(data.text_buckets, int) and data.tokenizer is not None:
        expected["max_length"] = max_length
    taken: dict[str, int] = {}
    for name, value in expected.items():
        own = getattr(data, name)
        if value is None or own == value:
            continue
        if name in data.model_fields_set:
            line = "data.%s is %s, and %s says %s: leave it out, unless you mean it"
            logger.log(of_one_rank(), line, name, own, origin, value)
        else:
            logger.info("data.%s is %s, as %s says", name, value, origin)
            taken[name] = value
    return data.model_copy(update=taken) if taken else data


def of_one_rank() -> int:
    """The level of a warning that all ranks would log: that of a message on all but one."""
    ranks = launched()
    return logging.INFO if ranks is not None and ranks.rank > 0 else logging.WARNING


def _expected_of_folder(source: Any) -> ExpectedInputs | None:
    if not isinstance(source, str) or not Path(source).is_dir():
        return None
    # Imported here: transformers takes seconds to import, and built-in towers come without it.
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source)
    except Exception:  # the model is loaded next, and that says what is wrong
        return None
    return expected_inputs(config, source=source)


def _image_settings(source: str | None, processor: Any, *, is_loaded: bool) -> dict[str, Any]:
    """The settings of an image processor; {} where there is none."""
    images = getattr(processor, "image_processor", processor)
    if hasattr(images, "image_mean"):
        return images.to_dict()
    if not source:
        return {}
    from transformers.utils.hub import cached_file

    for name in ("processor_config.json", "preprocessor_config.json"):
        try:
            file = cached_file(source, name, local_files_only=is_loaded)
        except OSError:  # there is none
            continue
        try:
            saved = json.loads(Path(str(file)).read_bytes())
            if not isinstance(saved, dict):
                raise ValueError(f"expected an object, got a {type(saved).__name__}")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"'{file}': cannot be read as the settings of an image processor ({error}); save the image processor "
                "again, or remove the file: pixels then get the mean and deviation of models of this kind"
            ) from error
        settings = cast("dict[str, Any]", saved)
        found = settings.get("image_processor") if name == "processor_config.json" else settings
        if isinstance(found, dict):
            return cast("dict[str, Any]", found)
    return {}


def _stats(settings: dict[str, Any]) -> PixelStats | None:
    """Mean and deviation of pixels from 0 to 1, by which a processor's own steps are done at once."""
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if settings.get("do_normalize") is False:
        mean, std = 0.0, 1.0
    if mean is None or std is None:
        return None
    factor = 1.0 if settings.get("do_rescale") is False else settings.get("rescale_factor") or 1 / 255
    scale = round(255 * factor, 9)
    # A processor may have one number for all channels.
    values = (np.broadcast_to(np.asarray(value, dtype=float), 3) for value in (mean, std))
    mean, std = (tuple((value / scale).tolist()) for value in values)
    return mean, std


def _image_size(settings: dict[str, Any], of_config: Any) -> int | None:
    size: Any = of_config
    if settings.get("do_resize", True) and settings.get("size"):
        size = settings["size"]
    if settings.get("do_center_crop") and settings.get("crop_size"):
        size = settings["crop_size"]
    if isinstance(size, dict):
        size = size.get("shortest_edge") or (size.get("height"), size.get("width"))
    if isinstance(size, (list, tuple)):
        size = size[0] if len(set(size)) == 1 else None
    return size if isinstance(size, int) else None
