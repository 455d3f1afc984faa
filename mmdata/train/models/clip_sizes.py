"""CLIP's architecture by the names of its sizes, as open_clip builds ViT-B-32, ViT-B-16 and ViT-L-14.

Class token, pre-norm, learned positions, causal text that is read at its last token, GELU. The towers are those of
transformers' CLIPModel, so a trained model is one of theirs.
"""

from __future__ import annotations

from typing import Any

TEXT_POSITIONS = 77
IMAGE_SIZE = 224
"""Side of the images whose patches have positions of their own; those of other sizes are interpolated."""


def _layers(width: int, depth: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "hidden_act": "gelu",
    }


CLIP_SIZES: dict[str, dict[str, Any]] = {
    "vit_b_32": {
        "projection_dim": 512,
        "vision_config": {**_layers(768, 12, 12), "patch_size": 32},
        "text_config": _layers(512, 12, 8),
    },
    "vit_b_16": {
        "projection_dim": 512,
        "vision_config": {**_layers(768, 12, 12), "patch_size": 16},
        "text_config": _layers(512, 12, 8),
    },
    "vit_l_14": {
        "projection_dim": 768,
        "vision_config": {**_layers(1024, 24, 16), "patch_size": 14},
        "text_config": _layers(768, 12, 12),
    },
}


def clip_config(name: str, *, vocab_size: int, embed_dim: int | None = None) -> dict[str, Any]:
    """The CLIPConfig of a size, as `model.clip` takes it.

    Source: open_clip's model_configs/ViT-B-32.json, ViT-B-16.json and ViT-L-14.json. OpenAI's own weights have the same
    sizes with QuickGELU ("quick_gelu") in place of GELU.
    """
    size = CLIP_SIZES[name]
    dim = embed_dim or size["projection_dim"]
    text = {"vocab_size": vocab_size, "max_position_embeddings": TEXT_POSITIONS, "projection_dim": dim}
    # Those of CLIP's own vocabulary. Texts are read at their last token, whatever these say.
    text |= {"bos_token_id": vocab_size - 2, "eos_token_id": vocab_size - 1}
    return {
        "model_type": "clip",
        "projection_dim": dim,
        "text_config": {**size["text_config"], **text},
        "vision_config": {**size["vision_config"], "image_size": IMAGE_SIZE, "projection_dim": dim},
    }
