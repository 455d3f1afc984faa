"""Adapters: models of the transformers library as image and text towers. Each takes any shape its positions allow."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPVisionEmbeddings
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer, SiglipVisionEmbeddings
from transformers.models.siglip2.modeling_siglip2 import Siglip2EncoderLayer
from transformers.utils.hub import cached_file

from mmdata.errors import ConfigError
from mmdata.train.models.region_pooling import pool_boxes
from mmdata.train.models.towers import PatchConv, autocast_dtype, drop_patches, masked_mean, patches_left

ATTENTION = "sdpa_masked"
"""torch's attention, with the mask of every batch. The library's "sdpa" asks first whether there is padding at all, and
waits for a GPU to answer.
"""


def _mask_of_any_batch(*, attention_mask: Tensor | None = None, **settings: Any) -> Tensor | None:
    if attention_mask is not None:
        settings |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(attention_mask=attention_mask, **settings)


AttentionInterface.register(ATTENTION, sdpa_attention_forward)
AttentionMaskInterface.register(ATTENTION, _mask_of_any_batch)


def faster_on_a_gpu(model: nn.Module) -> None:
    """Replace the layers of CLIP and SigLIP, and maps of patches, by modules with the same parameters and names."""
    # Before transformers 5 a layer took the causal mask as an argument of its own.
    takes_one_mask = "causal_attention_mask" not in inspect.signature(CLIPEncoderLayer.forward).parameters
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, (CLIPEncoderLayer, SiglipEncoderLayer, Siglip2EncoderLayer)) and takes_one_mask:
                setattr(parent, name, Layer(part))
            elif type(part) is nn.Conv2d and PatchConv.can_be(part):
                setattr(parent, name, PatchConv.of(part))


class Layer(CLIPEncoderLayer):
    """A layer of CLIP or SigLIP. Under autocast its weights are cast together, and q, k and v are one product."""

    def __init__(self, theirs: nn.Module) -> None:
        nn.Module.__init__(self)
        for name, part in theirs.named_children():
            setattr(self, name, part)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **settings: Any) -> Tensor:
        attention: Any = self.self_attn
        mlp = self.mlp
        maps = ((attention.q_proj, attention.k_proj, attention.v_proj), (attention.out_proj,), (mlp.fc1,), (mlp.fc2,))
        are_plain = all(type(part) is nn.Linear for group in maps for part in group)  # others may be adapters
        uses_sdpa = attention.config._attn_implementation in ("sdpa", ATTENTION)
        # None also where FSDP2 has cast the weights: it frees them until backward, as it could not free these copies.
        dtype = autocast_dtype(attention.q_proj.weight)
        if dtype is None or not are_plain or not uses_sdpa:
            return super().forward(hidden_states, cast(Tensor, attention_mask), **settings)
        qkv, out, fc1, fc2 = cast_together(maps, dtype)
        values = F.linear(self.layer_norm1(hidden_states), *qkv).chunk(3, -1)
        heads = (attention.num_heads, -1)
        q, k, v = (value.unflatten(2, heads).transpose(1, 2) for value in values)  # (B, heads, T, d)
        dropout = attention.dropout if attention.training else 0.0
        settings |= {"dropout": dropout, "scaling": attention.scale}
        settings.setdefault("is_causal", False)
        x, _ = sdpa_attention_forward(attention, q, k, v, attention_mask, **settings)  # (B, T, heads, d)
        hidden_states = hidden_states + F.linear(x.flatten(2), *out)
        x = mlp.activation_fn(F.linear(self.layer_norm2(hidden_states), *fc1))
        return hidden_states + F.linear(x, *fc2)


def cast_together(groups: Sequence[Sequence[nn.Linear]], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each group of maps as one map, in `dtype`: views of one tensor, so that one cast makes all."""
    maps = [part for group in groups for part in group]
    parameters = [part.weight.flatten() for part in maps] + [part.bias for part in maps]
    shapes = [(sum(part.out_features for part in group), group[0].in_features) for group in groups]
    sizes = [rows * columns for rows, columns in shapes] + [rows for rows, _ in shapes]
    views = torch.cat(parameters).to(dtype).split(sizes)
    weights, biases = views[: len(shapes)], views[len(shapes) :]
    return [(weight.view(shape), bias) for shape, weight, bias in zip(shapes, weights, biases, strict=True)]


def add_patch_dropout(tower: nn.Module, share: float, *, key: str) -> None:
    """Let an image tower leave out a share of each image's patches in training; see `drop_patches`.

    Args:
        tower: changed in place.
        share: of the patches.
        key: the setting that names the tower, for the message.

    Raises:
        ConfigError: the tower is none of CLIP, SigLIP and SigLIP 2.
    """
    if isinstance(tower, Siglip2ImageTower):
        tower.patch_dropout = share
        return
    for part in tower.modules():
        if isinstance(part, (CLIPVisionEmbeddings, SiglipVisionEmbeddings)):
            prefix = int(hasattr(part, "class_embedding"))
            part.register_forward_hook(partial(_after_embeddings, share=share, prefix=prefix))
            return
    model: Any = getattr(tower, "model", tower)
    raise ConfigError(
        f"model.patch_dropout {share}: {type(model).__name__}, which {key} names, has none; set it to 0, or take an "
        "image tower that has: CLIP, SigLIP, SigLIP 2, or model.name micro, tiny, small or base"
    )


def _after_embeddings(
    embeddings: nn.Module, _: object, x: Tensor, *, share: float, prefix: int = 0, valid: Tensor | None = None
) -> Tensor:
    return drop_patches(x, share, prefix=prefix, valid=valid) if embeddings.training else x


class AnyImageTower(nn.Module):
    """A vision model's own pooling where it has one, else the mean over its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        # Models without the option, such as ConvNeXt and DINOv2, take images of any size.
        self.options: dict[str, Any] = (
            {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in accepted else {}
        )
        self.takes_boxes = model.config.model_type in ("clip_vision_model", "siglip_vision_model")

    def forward(self, pixel_values: Tensor, boxes: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        output = self.model(pixel_values=pixel_values, **self.options)
        pooled = getattr(output, "pooler_output", None)
        hidden: Tensor = output.last_hidden_state  # (B, T, width), or (B, width, h, w) of a convolutional net
        if pooled is None:
            pooled = hidden.mean(1) if hidden.ndim == 3 else hidden.mean((2, 3))
        pooled = pooled.flatten(1)  # (B, width)
        if boxes is None:
            return pooled
        size = int(self.model.config.patch_size)
        rows, columns = (side // size for side in pixel_values.shape[2:])
        patches = hidden[:, -rows * columns :]  # behind the class token
        if self.model.config.model_type == "clip_vision_model":  # normalises the class token alone
            patches = self.model.post_layernorm(patches)
        return pooled, _pool_regions(self.model, patches, boxes / size, (rows, columns))


def _pool_regions(model: Any, patches: Tensor, boxes: Tensor, shapes: tuple[int, int] | Tensor) -> Tensor:
    """Features (B, M, width) of regions from patches (B, N, width) behind the last norm.

    SigLIP's pooling attends to the patches of a whole image. It takes the mean of a region as its only patch: what is
    left are its values and its MLP, which lead to the common space (as MaskCLIP does, arXiv:2112.01071).
    """
    regions, head = pool_boxes(patches, boxes, shapes), getattr(model, "head", None)
    return regions if head is None else head(regions.flatten(0, 1)[:, None]).unflatten(0, regions.shape[:2])


class ClipImageTower(nn.Module):
    """CLIP's vision model and its projection."""

    takes_boxes = True

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower = AnyImageTower(model.vision_model)
        self.projection = model.visual_projection
        self.patch_size = int(model.config.vision_config.patch_size)

    def forward(self, pixel_values: Tensor, boxes: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if boxes is None:
            return self.projection(self.tower(pixel_values))  # (B, D)
        pooled, regions = self.tower(pixel_values, boxes)
        return self.projection(pooled), self.projection(regions)  # (B, D) and (B, M, D)


class Siglip2ImageTower(nn.Module):
    """SigLIP 2 with native aspect ratios (NaFlex): takes patches; whole images are cut into patches here."""

    takes_patches = takes_boxes = True

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.vision_model
        _never_ask(self.model)
        self.patch_size = int(model.config.vision_config.patch_size)
        self.patch_dropout = 0.0

    def forward(
        self,
        pixel_values: Tensor,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        boxes: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if pixel_attention_mask is None or spatial_shapes is None:
            pixel_values, pixel_attention_mask, spatial_shapes = self._cut(pixel_values)
        size, values = self.patch_size, pixel_values.shape[2]
        if values != size * size * 3:
            side = math.isqrt(values // 3)
            raise ValueError(
                f"patches of {side} x {side} pixels: the model's are {size} x {size}; set data.patch_size={size}"
            )
        # The library reads shapes one by one, and would wait for a GPU at each. A `Batch` has them on the CPU.
        shapes = spatial_shapes.cpu()
        if not (self.patch_dropout and self.training):
            output = self.model(pixel_values, pixel_attention_mask, shapes)
            pooled: Tensor = output.pooler_output  # (B, D)
            if boxes is None:
                return pooled
            return pooled, _pool_regions(self.model, output.last_hidden_state, boxes / size, shapes)
        # Positions are added in the embeddings, and need the shapes of whole images: patches are dropped behind them.
        drop = partial(_after_embeddings, share=self.patch_dropout, valid=pixel_attention_mask.bool())
        with self.model.embeddings.register_forward_hook(drop):
            return self.model(pixel_values, self._mask_of_kept(pixel_attention_mask), shapes).pooler_output  # (B, D)

    def _mask_of_kept(self, mask: Tensor) -> Tensor:
        """The mask (B, K) of the patches that stay: of each image the same share of those that it has, in front.

        K depends on the N places of the mask (B, N) alone, so that batches of one shape keep one shape.
        """
        found = mask.sum(1, keepdim=True)  # (B, 1)
        staying = (found * (1 - self.patch_dropout)).long().clamp(min=1).minimum(found)
        places = torch.arange(patches_left(mask.shape[1], self.patch_dropout), device=mask.device)
        return (places < staying).to(mask.dtype)

    def _cut(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images (B, 3, H, W) as patches (B, T, size * size * 3), their mask and their shapes."""
        batch, channels, height, width = images.shape
        size = self.patch_size
        if height % size or width % size:
            raise ValueError(
                f"images of {height} x {width} pixels: sides must be multiples of the patch size {size}; set "
                "data.image_size or data.image_buckets, or data.image_patches for images in their own aspect ratio"
            )
        grid = images.reshape(batch, channels, height // size, size, width // size, size)
        patches = grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, T, size * size * 3)
        mask = torch.ones(patches.shape[:2], dtype=torch.long, device=patches.device)  # (B, T)
        return patches, mask, torch.tensor([[height // size, width // size]]).expand(batch, 2)


class ClipTextTower(nn.Module):
    """CLIP's text model and its projection; the last token of each text is the text.

    The library looks for the end-of-text token by its number, which a tokenizer of one's own may not share and
    then silently reads the first position. The last attended token is the same one, whatever its number.

    Padding is on the right, and a token attends to those before it alone: so the mask is not needed, attention takes
    its causal kernel, and nobody asks the device whether there is padding.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.text_model
        self.projection = model.text_projection
        self.length = int(model.config.text_config.max_position_embeddings)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        _check_length(input_ids, self.length)
        hidden = self.model(input_ids=input_ids).last_hidden_state  # (B, L, width)
        last = (attention_mask.sum(1) - 1).clamp(min=0)  # (B,)
        rows = torch.arange(len(last), device=last.device)
        return self.projection(hidden[rows, last])  # (B, D)


class SiglipTextTower(nn.Module):
    """SigLIP's text model. It was trained on texts padded to one length, padding attended, and reads the last position:
    so texts of every bucket are padded to that length here.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config.text_config
        self.model = model.text_model
        self.length = int(config.max_position_embeddings)
        self.pad_token_id = int(1 if config.pad_token_id is None else config.pad_token_id)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        _check_length(input_ids, self.length)
        tokens = input_ids.where(attention_mask.bool(), self.pad_token_id)
        tokens = F.pad(tokens, (0, self.length - tokens.shape[1]), value=self.pad_token_id)  # (B, length)
        return self.model(input_ids=tokens).pooler_output  # (B, D)


def sentence_pooling(source: str) -> str | None:
    """How sentence-transformers pools the tokens of a model, "mean" or "cls"; None: it is not one of its models.

    Args:
        source: folder or Hugging Face name of the model.

    Raises:
        ConfigError: it pools them otherwise.
    """
    try:
        file = cached_file(source, "1_Pooling/config.json")
    except OSError:  # there is none
        return None
    settings: dict[str, Any] = json.loads(Path(str(file)).read_bytes())
    # Before version 5.4 each way was a key of its own.
    ways = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
    way = settings.get("pooling_mode") or [key for key, on in settings.items() if key.startswith("pooling_") and on]
    for name, key in ways.items():
        if way in (name, [name], [key]):
            return name
    raise ConfigError(f"'{file}': tokens are pooled by {way}; mmdata has mean and cls: choose another text model")


class AnyTextTower(nn.Module):
    """The pooling of sentence-transformers where a model is one of its; else its own; else the mean over its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.pooling: str | None = getattr(model.config, "sentence_pooling", None)
        if self.pooling is not None and hasattr(model, "pooler"):
            model.pooler = None  # left from the pretraining of a BERT, and never used
        self.length = int(getattr(model.config, "max_position_embeddings", 0)) or None
        _never_ask(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if self.length is not None:
            _check_length(input_ids, self.length)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        if self.pooling == "cls":
            return output.last_hidden_state[:, 0]
        pooled = getattr(output, "pooler_output", None)
        return masked_mean(output.last_hidden_state, attention_mask) if pooled is None else pooled  # (B, width)


def _never_ask(model: Any) -> None:
    """Let a model whose attention is torch's take the mask of every batch."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)


def _check_length(input_ids: Tensor, length: int) -> None:
    if input_ids.shape[1] > length:
        raise ValueError(
            f"texts of {input_ids.shape[1]} tokens: the text tower has {length} positions; set data.max_length"
        )
