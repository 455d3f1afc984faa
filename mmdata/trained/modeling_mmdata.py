"""mmdata's dual encoders as a model of transformers, for towers that transformers has no class for.

`mmdata export` puts this file beside the weights, with the towers that it imports, so that
`AutoModel.from_pretrained(FOLDER, trust_remote_code=True)` needs no mmdata. Weights have the names of DualEncoder's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from mmdata.train.models.towers import ImageTower, Preset, TextTower, TransformerSize
from mmdata.train.models.transformers_towers import AnyImageTower, AnyTextTower


class MmdataConfig(PretrainedConfig):
    """Towers and their common space.

    Args:
        preset: sizes of built-in towers, the fields of `Preset`; None: the towers are those of the two configs.
        vision_config: config of a vision model of transformers, with its model_type.
        text_config: config of a text model of transformers, likewise.
        vocab_size: entries of a built-in text tower.
        embed_dim: features of the common space.
        image_width: features of the image tower.
        text_width: features of the text tower.
        has_logit_bias: whether the model was trained with a bias (sigmoid loss).
        max_logit_scale: bound of the multiplier; None: no bound.
    """

    model_type = "mmdata"

    def __init__(
        self,
        preset: dict[str, Any] | None = None,
        vision_config: dict[str, Any] | None = None,
        text_config: dict[str, Any] | None = None,
        vocab_size: int = 0,
        embed_dim: int = 512,
        image_width: int = 0,
        text_width: int = 0,
        has_logit_bias: bool = False,
        max_logit_scale: float | None = 100.0,
        **kwargs: Any,
    ) -> None:
        self.preset, self.vision_config, self.text_config = preset, vision_config, text_config
        self.vocab_size, self.embed_dim = vocab_size, embed_dim
        self.image_width, self.text_width = image_width, text_width
        self.has_logit_bias, self.max_logit_scale = has_logit_bias, max_logit_scale
        super().__init__(**kwargs)


@dataclass
class MmdataOutput(ModelOutput):
    """What the model gives; the names are those of transformers' CLIPOutput.

    Attributes:
        logits_per_image: (N, T), scaled similarities, with the bias where there is one.
        logits_per_text: (T, N).
        image_embeds: (N, D), L2-normalised.
        text_embeds: (T, D), L2-normalised.
    """

    logits_per_image: Tensor | None = None
    logits_per_text: Tensor | None = None
    image_embeds: Tensor | None = None
    text_embeds: Tensor | None = None


def _preset(saved: dict[str, Any]) -> Preset:
    sizes: dict[str, Any] = {name: TransformerSize(**saved[name]) for name in ("image", "text")}
    fields: dict[str, Any] = {**saved, **sizes, "stem": tuple(saved["stem"])}
    return Preset(**fields)


class MmdataModel(PreTrainedModel):
    """An image tower, a text tower, their projections, scale and bias."""

    config_class = MmdataConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.preset is not None:
            preset = _preset(config.preset)
            self.image_tower: nn.Module = ImageTower(preset)
            self.text_tower: nn.Module = TextTower(preset, config.vocab_size)
        else:
            vision, text = (AutoConfig.for_model(**part) for part in (config.vision_config, config.text_config))
            self.image_tower = AnyImageTower(AutoModel.from_config(vision))
            self.text_tower = AnyTextTower(AutoModel.from_config(text))
        self.image_projection = nn.Linear(config.image_width, config.embed_dim, bias=False)
        self.text_projection = nn.Linear(config.text_width, config.embed_dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(0.0))
        self.logit_bias = nn.Parameter(torch.tensor(0.0)) if config.has_logit_bias else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The towers initialise themselves."""

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Normalised pixels (N, 3, H, W) to (N, D), before L2-normalisation."""
        return self.image_projection(self.image_tower(pixel_values))

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Token numbers (T, L) and mask to (T, D), before L2-normalisation."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.text_projection(self.text_tower(input_ids, mask))

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> MmdataOutput:
        """Similarities of all images to all texts."""
        images = F.normalize(self.get_image_features(pixel_values), dim=-1)
        texts = F.normalize(self.get_text_features(input_ids, attention_mask), dim=-1)
        scale = self.logit_scale.exp()
        if self.config.max_logit_scale is not None:
            scale = scale.clamp(max=self.config.max_logit_scale)
        logits = scale * images @ texts.T
        logits = logits if self.logit_bias is None else logits + self.logit_bias
        return MmdataOutput(logits_per_image=logits, logits_per_text=logits.T, image_embeds=images, text_embeds=texts)
