"""A run as a folder that transformers loads: weights, config, tokenizer, image processor and a model card.

CLIP, SigLIP and SigLIP 2 become their own classes; transformers has none for other towers.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    PreTrainedModel,
    Siglip2Config,
    Siglip2ImageProcessor,
    Siglip2Model,
    SiglipConfig,
    SiglipModel,
)

from mmdata.errors import ConfigError
from mmdata.files import whole_folder
from mmdata.text.tokenizer import locate_tokenizer
from mmdata.train.models.transformers_towers import ClipImageTower, ClipTextTower, Siglip2ImageTower, SiglipTextTower
from mmdata.train.run.trainer import EVALUATION
from mmdata.trained.card import model_card
from mmdata.trained.run import TrainedRun

LEGACY_EOS = 2
"""CLIPModel with this eos_token_id reads a text at its highest token number, not at this token."""


def export_to_transformers(run: TrainedRun, out: str | os.PathLike[str]) -> type[PreTrainedModel]:
    """Write a folder for `from_pretrained`; it is there when it is whole.

    Args:
        run: a trained model.
        out: the folder; must not exist, or be empty.

    Returns:
        The class that loads it: CLIPModel, SiglipModel or Siglip2Model of transformers.

    Raises:
        ConfigError: `out` holds files, or transformers has no class for the towers.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"'{folder}': is there already; remove it, or give another folder")
    image, text = run.model.image_tower, run.model.text_tower
    if isinstance(image, ClipImageTower) and isinstance(text, ClipTextTower):
        model, tokenizer = _clip(run, image, text)
    elif isinstance(text, SiglipTextTower) and isinstance(run.model.text_projection, nn.Identity):
        model, tokenizer = _siglip(run, image, text)
    else:
        raise ConfigError(
            f"the towers of '{run.checkpoint}' ({type(image).__name__}, {type(text).__name__}) cannot be exported: "
            "transformers has classes for model.name vit_b_32, vit_b_16 and vit_l_14, and for pretrained CLIP, SigLIP "
            "and SigLIP 2; mmdata.load_run uses the run as it is"
        )
    with whole_folder(folder) as aside:
        model.eval().save_pretrained(aside)
        tokenizer.save_pretrained(str(aside))
        _save_image_processor(run, aside, tokenizer, model)
        card = model_card(run, type(model).__name__, folder.name, _scores(run))
        (aside / "README.md").write_text(card, encoding="utf-8")
    return type(model)


def _clip(run: TrainedRun, image: ClipImageTower, text: ClipTextTower) -> tuple[PreTrainedModel, Any]:
    max_length = min(text.length, run.tokenizer.max_length)
    tokenizer = _tokenizer(run, max_length=max_length, pad_id=run.tokenizer.pad_id)
    ends = {ids[-1] for ids in tokenizer(["a", "two words"])["input_ids"]}
    if len(ends) > 1 or LEGACY_EOS in ends:
        raise ConfigError(
            f"tokenizer '{run.config.data.tokenizer}': its texts end with the tokens {sorted(ends)}, and transformers' "
            f"CLIPModel reads a text at one end token, whose number is not {LEGACY_EOS}; train with a tokenizer that "
            "has one, or use the run with mmdata.load_run"
        )
    vision_config, text_config = (tower.config.to_dict() for tower in (image.tower.model, text.model))
    text_config |= {"eos_token_id": ends.pop(), "pad_token_id": run.tokenizer.pad_id}
    text_config["bos_token_id"] = tokenizer.bos_token_id
    vision_weights = _at_size(image.tower.model, vision_config, run.config.data.image_size)
    dim = image.projection.out_features
    model = CLIPModel(CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=dim))
    model.vision_model.load_state_dict(vision_weights)
    model.text_model.load_state_dict(text.model.state_dict())
    model.visual_projection.load_state_dict(image.projection.state_dict())
    model.text_projection.load_state_dict(text.projection.state_dict())
    model.logit_scale.data.fill_(math.log(run.logit_scale))
    return model, tokenizer


def _siglip(run: TrainedRun, image: nn.Module, text: SiglipTextTower) -> tuple[PreTrainedModel, Any]:
    # transformers' SigLIP attends to padding up to its last position, and takes no mask.
    tokenizer = _tokenizer(run, max_length=text.length, pad_id=text.pad_token_id, inputs=("input_ids",))
    of_image: Any = image
    vision_config, text_config = of_image.model.config.to_dict(), text.model.config.to_dict()
    for name in ("bos_token_id", "eos_token_id"):
        text_config[name] = getattr(tokenizer, name)
    if isinstance(image, Siglip2ImageTower):
        weights = of_image.model.state_dict()
        model = Siglip2Model(Siglip2Config(text_config=text_config, vision_config=vision_config))
    else:
        weights = _at_size(of_image.model, vision_config, run.config.data.image_size)
        model = SiglipModel(SiglipConfig(text_config=text_config, vision_config=vision_config))
    model.vision_model.load_state_dict(weights)
    model.text_model.load_state_dict(text.model.state_dict())
    model.logit_scale.data.fill_(math.log(run.logit_scale))
    model.logit_bias.data.fill_(run.logit_bias or 0.0)
    return model, tokenizer


def _tokenizer(
    run: TrainedRun, *, max_length: int, pad_id: int, inputs: tuple[str, ...] = ("input_ids", "attention_mask")
) -> Any:
    """The run's tokenizer as transformers loads it, which cuts and pads texts as the model takes them."""
    options: dict[str, Any] = {"model_max_length": max_length, "model_input_names": list(inputs)}
    tokenizer = AutoTokenizer.from_pretrained(locate_tokenizer(run.tokenizer.name), **options)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
    return tokenizer


def _at_size(vision: Any, config: dict[str, Any], size: int) -> dict[str, Tensor]:
    """The weights of a vision model with positions for square images of this size, which `config` then has.

    In mmdata positions are interpolated in each forward; transformers refuses images of another size.
    """
    weights: dict[str, Tensor] = vision.state_dict()
    if config["image_size"] == size:
        return weights
    patches = (size // config["patch_size"]) ** 2
    kind = config["model_type"]
    tokens = patches + (1 if kind.startswith("clip") else 0)
    table = "embeddings.position_embedding.weight"
    like = torch.empty(1, tokens, weights[table].shape[1], device=weights[table].device)
    with torch.no_grad():
        weights[table] = vision.embeddings.interpolate_pos_encoding(like, size, size)[0]
    config["image_size"] = size
    return {name: value for name, value in weights.items() if not name.endswith("position_ids")}


def _save_image_processor(run: TrainedRun, folder: Path, tokenizer: Any, model: PreTrainedModel) -> None:
    """Write preprocessor_config.json, and processor_config.json for AutoProcessor."""
    data = run.config.data
    mean, std = ((buffer / 255).flatten().tolist() for buffer in (run.model.pixel_mean, run.model.pixel_std))
    stats = {"image_mean": [round(x, 8) for x in mean], "image_std": [round(x, 8) for x in std]}
    if isinstance(model, Siglip2Model):
        vision: Any = model.config.vision_config
        patch_size = int(vision.patch_size)
        patches = data.image_patches[-1] if data.image_patches else (data.image_size // patch_size) ** 2
        Siglip2ImageProcessor(patch_size=patch_size, max_num_patches=patches, **stats).save_pretrained(str(folder))
        return
    size = data.image_size
    processor = CLIPImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, resample=3, **stats
    )
    CLIPProcessor(processor, tokenizer).save_pretrained(str(folder))
    processor.save_pretrained(str(folder))


def _scores(run: TrainedRun) -> dict[str, Any]:
    """What RUN/evaluation.json says of this checkpoint; {} if it says nothing."""
    path = run.checkpoint.parent.parent / EVALUATION
    try:
        scores = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return scores if isinstance(scores, dict) and scores.get("step") == run.step else {}
