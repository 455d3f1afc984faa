"""A run as a folder that transformers or open_clip loads: weights, config, tokenizer, image processor, model card.

CLIP, SigLIP and SigLIP 2 become their own classes of transformers, and CLIP one of open_clip; other towers have none.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPProcessor,
    PreTrainedModel,
    Siglip2ImageProcessor,
    Siglip2Model,
)

from mmdata.errors import ConfigError
from mmdata.files import whole_folder
from mmdata.text.tokenizer import Tokenizer, locate_tokenizer
from mmdata.train.models.open_clip import CONFIG_NAME, WEIGHT_NAMES, as_open_clip
from mmdata.train.models.transformers_towers import ClipImageTower, ClipTextTower, Siglip2ImageTower, SiglipTextTower
from mmdata.train.run.report import EVALUATION
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
    image, text = run.model.image_tower, run.model.text_tower
    if isinstance(image, ClipImageTower) and isinstance(text, ClipTextTower):
        model, tokenizer = _clip(run, image, text)
    elif isinstance(text, SiglipTextTower) and isinstance(run.model.text_projection, nn.Identity):
        model, tokenizer = _siglip(run, image, text)
    else:
        raise ConfigError(
            f"the towers of '{run.checkpoint}' ({type(image).__name__}, {type(text).__name__}) cannot be exported: "
            "transformers has classes for model.name vit_b_32, vit_b_16 and vit_l_14, and for pretrained CLIP, SigLIP "
            "and SigLIP 2; --to onnx takes this one, and mmdata.load_run uses the run as it is"
        )
    with export_folder(run, out, type(model).__name__) as folder:
        model.eval().save_pretrained(folder)
        tokenizer.save_pretrained(str(folder))
        processor = save_image_processor(run, folder)
        if not isinstance(model, Siglip2Model):
            CLIPProcessor(processor, tokenizer).save_pretrained(str(folder))
    return type(model)


def export_to_open_clip(run: TrainedRun, out: str | os.PathLike[str]) -> None:
    """Write a folder for open_clip: `open_clip.create_model_and_transforms("local-dir:OUT")`.

    Args:
        run: a trained model.
        out: the folder; must not exist, or be empty.

    Raises:
        ConfigError: `out` holds files, or open_clip's CLIP cannot be this model; says why.
    """
    image, text = run.model.image_tower, run.model.text_tower
    if not (isinstance(image, ClipImageTower) and isinstance(text, ClipTextTower)):
        raise ConfigError(
            f"the towers of '{run.checkpoint}' ({type(image).__name__}, {type(text).__name__}) cannot be exported to "
            "open_clip, whose CLIP is model.name vit_b_32, vit_b_16 or vit_l_14, or a pretrained CLIP; --to onnx takes "
            "all but those of SigLIP 2"
        )
    model, tokenizer = _clip(run, image, text, is_for_open_clip=True)
    cfg, weights = as_open_clip(model.config, model.state_dict())
    if run.logit_bias is not None:
        cfg["init_logit_bias"] = run.logit_bias
        weights["logit_bias"] = torch.tensor(run.logit_bias)
    if run.tokenizer.identity != Tokenizer.load("clip").identity:
        special: Any = model.config.text_config
        # open_clip takes the tokenizer of a local folder from it, whatever the name.
        cfg["text_cfg"] |= {"hf_tokenizer_name": Path(out).name, "pool_type": "eos", "eos_id": special.eos_token_id}
    pixels = {**pixel_stats(run), "interpolation": "bicubic", "resize_mode": "shortest"}
    with export_folder(run, out, "open_clip") as folder:
        save_file(weights, folder / WEIGHT_NAMES[0])
        tokenizer.save_pretrained(str(folder))
        content = {"model_cfg": cfg, "preprocess_cfg": pixels}
        (folder / CONFIG_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def export_folder(run: TrainedRun, out: str | os.PathLike[str], kind: str) -> Generator[Path]:
    """A folder to write an export into, to which the model card is added; `out` is there when it is whole.

    Args:
        run: the trained model.
        out: the folder; must not exist, or be empty.
        kind: the class of transformers that loads it; or "open_clip", or "onnx".

    Raises:
        ConfigError: `out` holds files.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"'{folder}': is there already; remove it, or give another folder")
    with whole_folder(folder) as aside:
        yield aside
        (aside / "README.md").write_text(model_card(run, kind, folder.name, _scores(run)), encoding="utf-8")


def _clip(
    run: TrainedRun, image: ClipImageTower, text: ClipTextTower, *, is_for_open_clip: bool = False
) -> tuple[PreTrainedModel, Any]:
    max_length = min(text.length, run.tokenizer.max_length)
    tokenizer = saved_tokenizer(run, max_length=max_length, pad_id=run.tokenizer.pad_id)
    ends = {ids[-1] for ids in tokenizer(["a", "two words"])["input_ids"]}
    if len(ends) > 1 or (LEGACY_EOS in ends and not is_for_open_clip):
        reader = "open_clip's CLIP" if is_for_open_clip else "transformers' CLIPModel"
        but = "" if is_for_open_clip else f", whose number is not {LEGACY_EOS}"
        raise ConfigError(
            f"tokenizer '{run.config.data.tokenizer}': its texts end with the tokens {sorted(ends)}, and {reader} "
            f"reads a text at one end token{but}; use the run with mmdata.load_run, or train a new one with a "
            "tokenizer that `mmdata convert --train-tokenizer` makes anew"
        )
    special = {"eos_token_id": ends.pop(), "pad_token_id": run.tokenizer.pad_id, "bos_token_id": tokenizer.bos_token_id}
    dim = image.projection.out_features
    model = _model("clip", run, image.tower.model, text.model, special, projection_dim=dim)
    model.visual_projection.load_state_dict(image.projection.state_dict())
    model.text_projection.load_state_dict(text.projection.state_dict())
    return model, tokenizer


def _siglip(run: TrainedRun, image: Any, text: SiglipTextTower) -> tuple[PreTrainedModel, Any]:
    # transformers' SigLIP attends to padding up to its last position, and takes no mask.
    tokenizer = saved_tokenizer(run, max_length=text.length, pad_id=text.pad_token_id, inputs=("input_ids",))
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    kind = "siglip2" if isinstance(image, Siglip2ImageTower) else "siglip"
    model = _model(kind, run, image.model, text.model, special)
    model.logit_bias.data.fill_(run.logit_bias or 0.0)
    return model, tokenizer


def _model(kind: str, run: TrainedRun, vision: Any, text: Any, special: dict[str, Any], **more: Any) -> Any:
    """A model of this `model_type` with the weights of two towers.

    Args:
        kind: "clip", "siglip" or "siglip2".
        run: the trained model.
        vision: the vision model of transformers in its image tower.
        text: the text model of transformers in its text tower.
        special: numbers of special tokens.
        more: settings of the model.
    """
    vision_config, text_config = vision.config.to_dict(), text.config.to_dict() | special
    weights = _at_size(vision, vision_config, run.config.data.image_size)
    model = AutoModel.from_config(
        AutoConfig.for_model(kind, text_config=text_config, vision_config=vision_config, **more)
    )
    model.vision_model.load_state_dict(weights)
    model.text_model.load_state_dict(text.state_dict())
    model.logit_scale.data.fill_(math.log(run.logit_scale))
    return model


def saved_tokenizer(
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
    if config.get("image_size", size) == size:  # a SigLIP 2 takes any
        return weights
    patches = (size // config["patch_size"]) ** 2
    table = "embeddings.position_embedding.weight"
    like = torch.empty(
        1,
        patches + hasattr(vision.embeddings, "class_embedding"),
        weights[table].shape[1],
        device=weights[table].device,
    )
    with torch.no_grad():
        weights[table] = vision.embeddings.interpolate_pos_encoding(like, size, size)[0]
    config["image_size"] = size
    return {name: value for name, value in weights.items() if not name.endswith("position_ids")}


def pixel_stats(run: TrainedRun) -> dict[str, list[float]]:
    """Mean and deviation of each channel, on the scale 0 to 1, as open_clip names them."""
    buffers = {"mean": run.model.pixel_mean, "std": run.model.pixel_std}
    return {name: [round(x, 8) for x in (values / 255).flatten().tolist()] for name, values in buffers.items()}


def save_image_processor(run: TrainedRun, folder: Path) -> Any:
    """Write preprocessor_config.json, and give the image processor of transformers that it is of."""
    data, size = run.config.data, run.config.data.image_size
    stats = {f"image_{name}": values for name, values in pixel_stats(run).items()}
    if isinstance(image := run.model.image_tower, Siglip2ImageTower):
        patches = data.image_patches[-1] if data.image_patches else (size // image.patch_size) ** 2
        processor: Any = Siglip2ImageProcessor(patch_size=image.patch_size, max_num_patches=patches, **stats)
    else:
        crop = {"height": size, "width": size}
        processor = CLIPImageProcessor(size={"shortest_edge": size}, crop_size=crop, resample=3, **stats)
    processor.save_pretrained(str(folder))
    return processor


def _scores(run: TrainedRun) -> dict[str, Any]:
    """What RUN/evaluation.json says of this checkpoint, and of these weights of it; {} if it says nothing."""
    path = run.checkpoint.parent.parent / EVALUATION
    try:
        scores = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(scores, dict) or (scores.get("step"), scores.get("ema", False)) != (run.step, run.is_average):
        return {}
    if run.alpha == 1:
        return scores
    mixed = (run.alpha, run.mixed_with)
    return next((each for each in scores.get("interpolation", []) if (each["alpha"], each.get("with")) == mixed), {})
