"""DualEncoder: an image tower and a text tower that meet in one space of L2-normalised features."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from mmdata.batch import Batch, standardized
from mmdata.config import ModelConfig
from mmdata.config.model import LoraConfig
from mmdata.config.strict_yaml import parse
from mmdata.config.wrong_place import other_setting
from mmdata.errors import ConfigError
from mmdata.train.models.clip_sizes import CLIP_SIZES, clip_config
from mmdata.train.models.towers import PRESETS, ImageTower, TextTower, Towers

logger = logging.getLogger("mmdata")

MAX_LOGIT_SCALE = 100.0
"""CLIP's bound of the scale. Models with a bias, for sigmoid losses, have none: SigLIP's own scales are above it."""
LOGIT_SCALE_INIT = 1 / 0.07
"""CLIP's initial scale."""
PIXEL_STATS = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Mean and standard deviation of each channel for the built-in towers, on the scale 0 to 1."""


class DualEncoderOutput(NamedTuple):
    """What a model gives for a batch; a tuple in this order.

    Attributes:
        image_features: (B, D), L2-normalised, float32 also under autocast.
        text_features: (B, D), likewise.
        logit_scale: scalar, exponentiated, at most the model's `max_logit_scale`; None from a model of your own whose
            loss takes no scale, such as triplet.
        logit_bias: scalar; None from a model without bias.
        negative_text_features: (B, D) of the batch's negative captions, likewise; None if the batch has none.
        region_features: (B, M, D) of the batch's boxes, likewise; None if it has none, or the model does not compare
            regions (`DualEncoder.compare_regions`).
        phrase_features: (B, M, D) of their phrases, likewise.

    Example:
        The forward of a model of your own may return DualEncoderOutput(image_features, text_features, scale.exp()).
    """

    image_features: Tensor
    text_features: Tensor
    logit_scale: Tensor | None = None
    logit_bias: Tensor | None = None
    negative_text_features: Tensor | None = None
    region_features: Tensor | None = None
    phrase_features: Tensor | None = None


class DualEncoder(nn.Module):
    """Two towers, their projections, a learned scale and, for sigmoid losses, a learned bias.

    Args:
        image_tower: (B, 3, H, W) floats to (B, width). One that has `takes_patches = True` also takes batches of native
            resolution: (B, N, patch_size² · 3) floats, pixel_attention_mask and spatial_shapes. One that has
            `takes_boxes = True` also takes boxes=(B, M, 4) in pixels, and then gives features of the images and of the
            boxes, (B, width) and (B, M, width).
        text_tower: (B, L) input_ids and attention_mask to (B, width).
        image_projection: (B, width) to (B, D).
        text_projection: (B, width) to (B, D).
        logit_scale_init: multiplier at the start; `max_logit_scale` where it is larger.
        logit_bias_init: bias at the start; None: no bias.
        pixel_stats: mean and standard deviation of each channel, on the scale 0 to 1.

    Attributes:
        max_logit_scale: bound of the multiplier: 100 in a model without bias, as in CLIP; inf, no bound, in one with a
            bias, as in SigLIP. May be set to another one.
        compares_regions: `compare_regions` was called.
        embed_dim: D, of a model from settings; None: known from its outputs only.

    Source: the bound: Radford et al. 2021, section 2.5 (arXiv:2103.00020); none: Zhai et al. 2023, algorithm 1
    (arXiv:2303.15343).
    """

    def __init__(
        self,
        image_tower: nn.Module,
        text_tower: nn.Module,
        *,
        image_projection: nn.Module | None = None,
        text_projection: nn.Module | None = None,
        logit_scale_init: float = LOGIT_SCALE_INIT,
        logit_bias_init: float | None = None,
        pixel_stats: tuple[tuple[float, ...], tuple[float, ...]] = PIXEL_STATS,
    ) -> None:
        super().__init__()
        self.image_tower = image_tower
        self.text_tower = text_tower
        self.image_projection = image_projection or nn.Identity()
        self.text_projection = text_projection or nn.Identity()
        self.max_logit_scale = MAX_LOGIT_SCALE if logit_bias_init is None else math.inf
        self.logit_scale = nn.Parameter(torch.tensor(math.log(logit_scale_init)))
        self.clamp_logit_scale_()
        self.logit_bias = None if logit_bias_init is None else nn.Parameter(torch.tensor(float(logit_bias_init)))
        self.set_pixel_stats(*pixel_stats)
        self._frozen: list[nn.Module] = []
        self.compares_regions = False
        self.embed_dim: int | None = None
        self.pixel_mean: Tensor
        self.pixel_std: Tensor

    @classmethod
    def from_config(cls, config: ModelConfig | dict[str, Any], *, vocab_size: int | None = None) -> Self:
        """Build the towers that a configuration names.

        Args:
            config: the section `model`, or a dictionary of it.
            vocab_size: entries of the tokenizer; a built-in text tower gets as many, any other must have at least as
                many.

        Raises:
            ConfigError: no vocabulary size for a built-in text tower, a vocabulary smaller than the tokenizer's,
                settings that do not go together, or weights that cannot be loaded.
        """
        if isinstance(config, dict):
            config = parse(ModelConfig, config, origin="model")
        elif not isinstance(config, ModelConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            example = config if isinstance(config, str) else "tiny"
            raise ConfigError(f"a model is a section of settings, such as {{'name': '{example}'}}: got {config!r}")
        if config.name in PRESETS:
            towers = _built_in(config, _entries(vocab_size))
        else:
            # Imported here: transformers takes seconds to import, and the built-in towers do not need it.
            from mmdata.train.models.pretrained import load

            if config.name in CLIP_SIZES:
                clip = clip_config(config.name, vocab_size=_entries(vocab_size), embed_dim=config.embed_dim)
                config = config.model_copy(update={"clip": clip, "embed_dim": None})
            towers = load(config)
        if vocab_size is not None and towers.vocab_size < vocab_size:
            raise ConfigError(
                f"the text tower's vocabulary has {towers.vocab_size} entries, the tokenizer {vocab_size}: use the "
                "tokenizer that belongs to the model"
            )
        if towers.has_clips_tokenizer and vocab_size not in (None, towers.vocab_size):
            raise ConfigError(
                f"model.open_clip '{config.open_clip}': its vocabulary of {towers.vocab_size} entries is that of "
                f"CLIP's tokenizer, and the tokenizer has {vocab_size}: set data.tokenizer=clip"
            )
        dim = config.embed_dim or towers.embed_dim
        model = cls(
            towers.image,
            towers.text,
            image_projection=None if dim is None else _projection(towers.image_width, dim),
            text_projection=None if dim is None else _projection(towers.text_width, dim),
            logit_scale_init=config.logit_scale_init or towers.logit_scale or LOGIT_SCALE_INIT,
            logit_bias_init=towers.logit_bias if config.logit_bias_init is None else config.logit_bias_init,
            pixel_stats=towers.pixel_stats,
        )
        if config.init_from is not None:
            _init_from(model, config, Path(config.init_from))
        if config.lora is not None:
            # Imported here: models without adapters do not need it.
            from mmdata.train.models.lora import add_adapters

            add_adapters(model, config.lora, frozen=config.freeze)
        model.freeze(*config.freeze)
        model.embed_dim = dim or towers.image_width
        return model

    def set_pixel_stats(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Set mean and standard deviation of each channel, on the scale 0 to 1, by which pixels are normalised."""
        for name, values in (("pixel_mean", mean), ("pixel_std", std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1) * 255, persistent=False)

    def compare_regions(self) -> None:
        """Give features of regions and phrases too, for batches that have them (`train.regions`).

        A region is the mean of its patches (RoIAlign) behind the image tower's last norm, and goes into the common
        space through the projection, or the pooling of SigLIP, of whole images: no weight is new.

        Raises:
            ConfigError: the image tower has no patches to pool.

        Source: regions against phrases: RegionCLIP (arXiv:2112.09106), FG-CLIP (arXiv:2505.05071); patches of a ViT
        pooled by RoIAlign: CLIPSelf (arXiv:2310.01403).
        """
        if not getattr(self.image_tower, "takes_boxes", False):
            tower: Any = getattr(self.image_tower, "model", self.image_tower)
            raise ConfigError(
                f"train.regions: {type(tower).__name__} has no patches that boxes can be pooled from; take a CLIP, "
                "SigLIP or SigLIP 2 as the image tower, or model.name micro, tiny, small or base"
            )
        self.compares_regions = True

    def freeze(self, *parts: Literal["image", "text", "logit_scale"]) -> None:
        """Freeze towers: no gradients, and eval mode (no dropout) even while the rest trains. Or the scale.

        The projection above a tower is trained on, unless it is part of the tower (CLIP, SigLIP).

        Source: Zhai et al. 2022, LiT (arXiv:2111.07991).
        """
        towers = {"image": self.image_tower, "text": self.text_tower}
        self._frozen = [tower for name, tower in towers.items() if name in parts]
        for tower in self._frozen:
            tower.requires_grad_(False)
        self.logit_scale.requires_grad_("logit_scale" not in parts)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, except for frozen towers."""
        super().train(mode)
        for tower in self._frozen:
            tower.eval()
        return self

    def forward(self, batch: Batch) -> DualEncoderOutput:
        """Features of a batch; rows that are not valid get finite features too.

        Raises:
            ValueError: the batch has no texts, or its images are not decoded yet.
        """
        if "input_ids" not in batch or "attention_mask" not in batch:
            raise ValueError(
                "the batch has no texts, and a dual encoder compares images with texts: set data.tokenizer"
            )
        native = batch.get("pixel_attention_mask"), batch.get("spatial_shapes")
        regions = phrases = None
        if self.compares_regions and "boxes" in batch and "box_input_ids" in batch and "box_attention_mask" in batch:
            images, regions = self.encode_regions(batch["pixel_values"], batch["boxes"], *native)
            ids, mask = (batch[name].flatten(0, 1) for name in ("box_input_ids", "box_attention_mask"))  # (B * M, T)
            phrases = self.encode_text(ids, mask).unflatten(0, batch["boxes"].shape[:2])
        else:
            images = self.encode_image(batch["pixel_values"], *native)
        return DualEncoderOutput(
            images,
            self.encode_text(batch["input_ids"], batch["attention_mask"]),
            self.logit_scale.exp().clamp(max=self.max_logit_scale),
            None if self.logit_bias is None else self.logit_bias * 1.0,
            self.encode_text(batch["negative_input_ids"], batch["negative_attention_mask"])
            if "negative_input_ids" in batch and "negative_attention_mask" in batch
            else None,
            regions,
            phrases,
        )

    def encode_image(
        self, pixel_values: Tensor, pixel_attention_mask: Tensor | None = None, spatial_shapes: Tensor | None = None
    ) -> Tensor:
        """Images to L2-normalised (B, D).

        Args:
            pixel_values: (B, 3, H, W), or patches (B, N, patch_size² · 3): uint8 in RGB is normalised here, floats are
                taken as they are.
            pixel_attention_mask: (B, N), given with patches only.
            spatial_shapes: (B, 2), given with patches only.

        Raises:
            ValueError: patches, but the image tower takes whole images.
        """
        return _normalize(self.image_projection(self._tower_of(pixel_values, pixel_attention_mask, spatial_shapes)))

    def encode_regions(
        self,
        pixel_values: Tensor,
        boxes: Tensor,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Images and what is in their boxes, (B, M, 4) in pixels: L2-normalised (B, D) and (B, M, D).

        The others are as for `encode_image`; see `compare_regions` for the image towers that can do it.
        """
        found = self._tower_of(pixel_values, pixel_attention_mask, spatial_shapes, boxes=boxes)
        images, regions = (_normalize(self.image_projection(each)) for each in found)
        return images, regions

    def _tower_of(self, pixel_values: Tensor, mask: Tensor | None, shapes: Tensor | None, **boxes: Tensor) -> Any:
        """What the image tower gives."""
        pixels = standardized(pixel_values, self.pixel_mean, self.pixel_std)
        if mask is None:
            return self.image_tower(pixels, **boxes)
        if not getattr(self.image_tower, "takes_patches", False):
            raise ValueError(
                "the batch has patches (data.image_patches), and the image tower takes whole images: set "
                "data.image_size or data.image_buckets in its place, or choose a SigLIP 2 NaFlex model "
                "(model_type siglip2)"
            )
        return self.image_tower(pixels, mask, shapes, **boxes)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, L) token numbers and mask to L2-normalised (B, D)."""
        return _normalize(self.text_projection(self.text_tower(input_ids, attention_mask)))

    @torch.no_grad()
    def clamp_logit_scale_(self) -> None:
        """Bring the scale parameter back below `max_logit_scale` after an optimizer step; `train_step` does it.

        Without it a step beyond the bound would leave the parameter where it has no gradient.
        """
        # A little below, as the exponential in float32 may exceed the bound, and has no gradient there.
        self.logit_scale.clamp_(max=math.log(self.max_logit_scale) - 1e-5)


def _normalize(features: Tensor) -> Tensor:
    if features.dtype in (torch.float16, torch.bfloat16):
        features = features.float()
    return F.normalize(features, dim=-1)


def _built_in(config: ModelConfig, vocab_size: int) -> Towers:
    preset = PRESETS[config.name]
    checkpointing = config.gradient_checkpointing
    image = ImageTower(
        preset, dropout=config.dropout, patch_dropout=config.patch_dropout, gradient_checkpointing=checkpointing
    )
    text = TextTower(preset, vocab_size, dropout=config.dropout, gradient_checkpointing=checkpointing)
    return Towers(image, image.width, text, text.width, preset.embed_dim, PIXEL_STATS, vocab_size)


def _projection(width: int, dim: int) -> nn.Linear:
    layer = nn.Linear(width, dim, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer


def _init_from(model: DualEncoder, config: ModelConfig, source: Path) -> None:
    """Put the weights of a run into a model; its scale and its bias unless the settings have their own.

    Raises:
        ConfigError: the weights are of another architecture, or `source` is a model of another library.
        DataError: nothing is there, or it is damaged.
    """
    # Imported here: `run` imports models, and those without adapters need no `lora`.
    from mmdata.train.models.lora import add_adapters, merge_adapters
    from mmdata.train.run.checkpoint import find_checkpoint, load_trained, load_weights

    if other := other_setting(source, key="model.init_from"):
        raise ConfigError(other)
    path = find_checkpoint(source)
    state = load_trained(path)
    of_run = state.get("settings", {}).get("model", {})
    has_adapters = of_run.get("lora") is not None
    if has_adapters:
        add_adapters(model, parse(LoraConfig, of_run["lora"], origin=str(path)), frozen=of_run["freeze"])
    weights, own = dict(state["model"]), model.state_dict()
    for name, given in (("logit_scale", config.logit_scale_init), ("logit_bias", config.logit_bias_init)):
        if name not in own:  # features do not depend on the bias
            weights.pop(name, None)
        elif given is not None or name not in weights:
            weights[name] = own[name]
    load_weights(model, {**state, "model": weights}, origin=str(path))
    if has_adapters:
        merge_adapters(model)
    model.clamp_logit_scale_()
    logger.info("the weights are those of '%s'", path)


def _entries(tokenizer: int | None) -> int:
    """Entries of the vocabulary of a text tower that is built for a tokenizer."""
    if tokenizer is None:
        raise ConfigError("vocab_size is missing: DualEncoder.from_config(…, vocab_size=tokenizer.vocab_size)")
    return tokenizer
