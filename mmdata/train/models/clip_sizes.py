"""CLIP's architecture by the names of its sizes, as open_clip builds ViT-B-32, ViT-B-16 and ViT-L-14.

Class token, pre-norm, learned positions, causal text that is read at its last token, GELU. The towers are those of
transformers' CLIPModel, so a trained model is one of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmdata.train.models.towers import TransformerSize

TEXT_POSITIONS = 77
IMAGE_SIZE = 224
"""Side of the images whose patches have positions of their own; those of other sizes are interpolated."""


@dataclass(frozen=True, kw_only=True)
class ClipSize:
    """A pair of CLIP's towers; `embed_dim` is D of the common space."""

    image: TransformerSize
    text: TransformerSize
    embed_dim: int
    patch_size: int


CLIP_SIZES = {
    "vit_b_32": ClipSize(
        image=TransformerSize(width=768, depth=12, heads=12),
        text=TransformerSize(width=512, depth=12, heads=8),
        embed_dim=512,
        patch_size=32,
    ),
    "vit_b_16": ClipSize(
        image=TransformerSize(width=768, depth=12, heads=12),
        text=TransformerSize(width=512, depth=12, heads=8),
        embed_dim=512,
        patch_size=16,
    ),
    "vit_l_14": ClipSize(
        image=TransformerSize(width=1024, depth=24, heads=16),
        text=TransformerSize(width=768, depth=12, heads=12),
        embed_dim=768,
        patch_size=14,
    ),
}


def clip_config(name: str, *, vocab_size: int, embed_dim: int | None = None) -> dict[str, Any]:
    """The CLIPConfig of a size, as `model.clip` takes it.

    Source: open_clip's model_configs/ViT-B-32.json, ViT-B-16.json and ViT-L-14.json. OpenAI's own weights have the same
    sizes with QuickGELU ("quick_gelu") in place of GELU.
    """
    size = CLIP_SIZES[name]
    dim = embed_dim or size.embed_dim
    return {
        "model_type": "clip",
        "projection_dim": dim,
        "text_config": {
            **_layers(size.text, dim),
            "vocab_size": vocab_size,
            "max_position_embeddings": TEXT_POSITIONS,
            # Those of CLIP's own vocabulary. Texts are read at their last token, whatever these say.
            "bos_token_id": vocab_size - 2,
            "eos_token_id": vocab_size - 1,
        },
        "vision_config": {**_layers(size.image, dim), "image_size": IMAGE_SIZE, "patch_size": size.patch_size},
    }


def _layers(size: TransformerSize, dim: int) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "hidden_act": "gelu",
        "projection_dim": dim,
    }
