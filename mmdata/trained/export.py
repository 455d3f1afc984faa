"""A run as a folder that transformers loads: weights, config, tokenizer, image processor and a model card.

CLIP, SigLIP and SigLIP 2 become their own classes. Other towers bring their code (`modeling_mmdata.py`).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
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

import mmdata.train.models.towers
import mmdata.train.models.transformers_towers
from mmdata.errors import ConfigError
from mmdata.files import whole_folder
from mmdata.train.models.towers import PRESETS, ImageTower
from mmdata.train.models.transformers_towers import (
    AnyImageTower,
    AnyTextTower,
    ClipImageTower,
    ClipTextTower,
    Siglip2ImageTower,
    SiglipTextTower,
)
from mmdata.train.run.report import EVALUATION
from mmdata.trained import modeling_mmdata
from mmdata.trained.card import model_card
from mmdata.trained.export_tokenizer import ExportedTokenizer, export_tokenizer, swap_rows
from mmdata.trained.modeling_mmdata import MmdataConfig, MmdataModel
from mmdata.trained.run import TrainedRun

CODE = (modeling_mmdata, mmdata.train.models.towers, mmdata.train.models.transformers_towers)
"""Modules whose files go into a folder whose towers transformers does not have."""
AUTO_CLASSES = ("AutoModel", "AutoModelForZeroShotImageClassification")
"""Classes of transformers that load such a folder; the second for its pipeline."""
IN_FOLDER = ("from mmdata.train.models.", "from .")


class Exported(NamedTuple):
    """A run as a model of transformers."""

    model: PreTrainedModel
    tokenizer: ExportedTokenizer


def export_to_transformers(run: TrainedRun, out: str | os.PathLike[str]) -> type[PreTrainedModel]:
    """Write a folder for `from_pretrained`; it is there when it is whole.

    Args:
        run: a trained model.
        out: the folder; must not exist, or be empty.

    Returns:
        The class that loads it: CLIPModel, SiglipModel or Siglip2Model of transformers, or MmdataModel, which is loaded
        by `AutoModel.from_pretrained(out, trust_remote_code=True)`.

    Raises:
        ConfigError: `out` holds files, or there is no form of the towers in which they can be loaded alone.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"'{folder}': is there already; remove it, or give another folder")
    with whole_folder(folder) as aside:
        model, (tokenizer, _, _) = _exported(run)
        model.eval().save_pretrained(aside)
        tokenizer.save_pretrained(str(aside))
        _save_image_processor(run, aside, tokenizer, model)
        if isinstance(model, MmdataModel):
            _save_code(aside)
        card = model_card(run, type(model).__name__, folder.name, _scores(run))
        (aside / "README.md").write_text(card, encoding="utf-8")
    return type(model)


def _exported(run: TrainedRun) -> Exported:
    image, text = run.model.image_tower, run.model.text_tower
    if isinstance(image, ClipImageTower) and isinstance(text, ClipTextTower):
        return _clip(run, image, text)
    if isinstance(text, SiglipTextTower) and isinstance(run.model.text_projection, nn.Identity):
        return _siglip(run, image, text)
    return _own(run)


def _clip(run: TrainedRun, image: ClipImageTower, text: ClipTextTower) -> Exported:
    max_length = min(text.length, run.tokenizer.max_length)
    tokenizer = export_tokenizer(run.tokenizer, max_length=max_length, pad_id=run.tokenizer.pad_id, move_end=True)
    if tokenizer.end_id is None:
        raise ConfigError(
            f"tokenizer '{run.config.data.tokenizer}': its texts do not end with a token of their own, at which "
            "transformers' CLIPModel reads them; train with a tokenizer that has one"
        )
    vision_config, text_config = (tower.config.to_dict() for tower in (image.tower.model, text.model))
    text_config |= {"eos_token_id": tokenizer.end_id, "pad_token_id": tokenizer.tokenizer.pad_token_id}
    text_config["bos_token_id"] = tokenizer.tokenizer.bos_token_id
    vision_weights = _at_size(image.tower.model, vision_config, run.config.data.image_size)
    text_weights = text.model.state_dict()
    if tokenizer.swapped:
        name = "embeddings.token_embedding.weight"
        text_weights[name] = swap_rows(text_weights[name])
    dim = image.projection.out_features
    model = CLIPModel(CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=dim))
    model.vision_model.load_state_dict(vision_weights)
    model.text_model.load_state_dict(text_weights)
    model.visual_projection.load_state_dict(image.projection.state_dict())
    model.text_projection.load_state_dict(text.projection.state_dict())
    model.logit_scale.data.fill_(math.log(run.logit_scale))
    return Exported(model, tokenizer)


def _siglip(run: TrainedRun, image: nn.Module, text: SiglipTextTower) -> Exported:
    # transformers' SigLIP attends to padding up to its last position, and takes no mask.
    inputs = ["input_ids"]
    tokenizer = export_tokenizer(run.tokenizer, max_length=text.length, pad_id=text.pad_token_id, inputs=inputs)
    of_image: Any = image
    vision_config, text_config = of_image.model.config.to_dict(), text.model.config.to_dict()
    for name in ("bos_token_id", "eos_token_id"):
        text_config[name] = getattr(tokenizer.tokenizer, name)
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
    return Exported(model, tokenizer)


def _own(run: TrainedRun) -> Exported:
    image, text = run.model.image_tower, run.model.text_tower
    settings: dict[str, Any] = {}
    if isinstance(image, ImageTower):
        settings = {"preset": asdict(PRESETS[run.config.model.name]), "vocab_size": _entries(text)}
    elif isinstance(image, AnyImageTower) and isinstance(text, AnyTextTower):
        settings = {"vision_config": image.model.config.to_dict(), "text_config": text.model.config.to_dict()}
    own, projections = run.model, (run.model.image_projection, run.model.text_projection)
    if not settings or not all(isinstance(projection, nn.Linear) for projection in projections):
        raise ConfigError(
            f"the towers of '{run.checkpoint}' ({type(image).__name__}, {type(text).__name__}) cannot be exported: "
            "export takes CLIP, SigLIP, SigLIP 2, the built-in towers, and pairs of models that are neither of the "
            "three; mmdata.load_run uses the run as it is"
        )
    for side in ("image", "text"):
        settings[f"{side}_width"] = own.get_parameter(f"{side}_projection.weight").shape[1]
    bias, bound = run.logit_bias is not None, run.model.max_logit_scale
    config = MmdataConfig(**settings, embed_dim=run.embed_dim, has_logit_bias=bias, max_logit_scale=bound)
    model = MmdataModel(config)
    model.load_state_dict(run.model.state_dict())
    names = {"AutoConfig": MmdataConfig.__name__, **dict.fromkeys(AUTO_CLASSES, MmdataModel.__name__)}
    config.auto_map = {auto: f"modeling_mmdata.{name}" for auto, name in names.items()}
    tokenizer = export_tokenizer(run.tokenizer, max_length=run.tokenizer.max_length, pad_id=run.tokenizer.pad_id)
    return Exported(model, tokenizer)


def _entries(text: nn.Module) -> int:
    tower: Any = text
    return int(tower.tokens.num_embeddings)


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


def _save_code(folder: Path) -> None:
    """Copy the code of the towers, with imports that find it in the folder."""
    for module in CODE:
        source = Path(str(module.__file__))
        (folder / source.name).write_text(source.read_text(encoding="utf-8").replace(*IN_FOLDER), encoding="utf-8")


def _scores(run: TrainedRun) -> dict[str, Any]:
    """What RUN/evaluation.json says of this checkpoint; {} if it says nothing."""
    path = run.checkpoint.parent.parent / EVALUATION
    try:
        scores = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return scores if isinstance(scores, dict) and scores.get("step") == run.step else {}
