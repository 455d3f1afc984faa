"""Weights of open_clip as a CLIP of transformers, and back. Files are read and written without open_clip.

The towers are those of its ViT models, such as ViT-B-32: OpenAI's architecture, with GELU or QuickGELU. Nothing is
computed anew: the parameters of both libraries are the same numbers under other names.
"""

from __future__ import annotations

import json
import math
import pickle
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mmdata.batch import CLIP_MEAN, CLIP_STD
from mmdata.config.wrong_place import OPEN_CLIP_CONFIG as CONFIG_NAME
from mmdata.config.wrong_place import other_setting
from mmdata.errors import ConfigError, counted

WEIGHT_NAMES = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin")
"""Files of weights in a folder, as on the hub, the preferred one first."""

NAMES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
}
"""Parameters outside the layers: open_clip's name → that of transformers."""
LAYER_NAMES = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
"""Modules of a layer, each with weight and bias; query, key and value are one matrix in open_clip."""
STACKS = {"visual.transformer.resblocks": "vision_model.encoder", "transformer.resblocks": "text_model.encoder"}
SECTIONS = ("vision_cfg", "text_cfg")
TRANSPOSED = ("visual.proj", "text_projection")
"""Products x @ W in open_clip, and linear layers in transformers."""
NO_WEIGHTS = ("attn_mask", "input_resolution", "context_length", "vocab_size")
"""Entries of older files that are no parameters."""
NEUTRAL = {
    "pool_type": ("tok", "argmax", "eos"),
    "pos_embed_type": ("learnable",),
    "proj_type": ("linear",),
    "block_type": ("default",),
    "pad_id": (0, 1),
}
"""Values of settings that are no sizes, with which a model still is a CLIP; those not named here must be off."""
VISION_HEADS = {(384, 12): 6, (512, 12): 8, (768, 12): 12, (896, 12): 14, (1024, 24): 16} | dict.fromkeys(
    ((1280, 32), (1408, 40), (1664, 48), (1792, 56)), 16
)
TEXT_HEADS = {(256, 10): 4, (384, 12): 6, (512, 12): 8, (640, 12): 10, (768, 12): 12, (1024, 24): 16} | dict.fromkeys(
    ((1280, 32), (1280, 36)), 20
)
"""Width and layers of towers in open_clip's named models → heads, which no shape in a file of weights tells."""
FREE = {"head_width", "heads", "eos_id", "hf_tokenizer_name", "tokenizer_kwargs", "patch_dropout", "output_tokens"}
"""Settings that are no sizes and may have any value."""


@dataclass(frozen=True)
class OpenClip:
    """A model of open_clip, as it was read.

    Attributes:
        config: the CLIPConfig of transformers, as `model.clip` takes it.
        pixel_stats: mean and standard deviation of each channel, on the scale 0 to 1.
        has_own_tokenizer: its tokenizer is not CLIP's, and lies in the folder or on the hub.
        logit_bias: the learned bias; None in a model without one.
        has_config: its heads are those of a config, and not those of a named model of its size.
        state: parameters by open_clip's names.
    """

    config: dict[str, Any]
    pixel_stats: tuple[tuple[float, ...], tuple[float, ...]]
    has_own_tokenizer: bool
    logit_bias: float | None
    has_config: bool
    state: dict[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        """Float32, by the names of transformers' CLIPModel."""
        found = {"logit_scale": self.state["logit_scale"].float().reshape(())}
        for theirs, ours in _names(self.config).items():
            value = self.state[theirs].float()
            parts = (value.T if theirs in TRANSPOSED else value).chunk(len(ours))
            found |= dict(zip(ours, parts, strict=True))
        return found


def read_open_clip(source: str, *, quick_gelu: bool | None = None) -> OpenClip:
    """Read a model of open_clip.

    Args:
        source: a folder with open_clip_config.json and weights; or a file of weights, .safetensors or .pt, also a
            checkpoint of open_clip's training. Beside a file open_clip_config.json may lie; else its architecture is
            told by the shapes, which must be those of one of open_clip's named models: no shape tells the heads.
        quick_gelu: the activation; None: as the config says, which a file alone does not have.

    Raises:
        ConfigError: nothing is there, it cannot be read, it is not CLIP's architecture, or the activation or the heads
            are not known.
    """
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"model.open_clip '{path}': no such file or folder; files on the hub are downloaded first")
    if other := other_setting(path, key="model.open_clip"):
        raise ConfigError(other)
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        path = next((path / name for name in WEIGHT_NAMES if (path / name).is_file()), path / WEIGHT_NAMES[0])
    content = _read_config(folder / CONFIG_NAME, is_needed=folder == Path(source))
    given: dict[str, Any] = content.get("model_cfg", {})
    state = _read_state(path)
    if any(name.startswith(("vision_model.", "text_model.")) for name in state):
        raise ConfigError(
            f"model.open_clip '{source}': weights of transformers, and not of open_clip; set model.name=pretrained "
            f"model.clip={folder} in its place, a folder with config.json"
        )
    if quick_gelu is None and not given:
        raise ConfigError(
            f"model.open_clip '{path}': a file of weights does not say its activation: set model.quick_gelu=true for "
            "OpenAI's weights and for models of open_clip whose name ends in -quickgelu, else model.quick_gelu=false"
        )
    bias = state.pop("logit_bias", None)
    config = _config_of(state, given, path)
    if given:
        _check_settings(given, _model_cfg(config), folder / CONFIG_NAME)
    if strange := sorted(state.keys() ^ {"logit_scale", *_names(config)}):
        raise _not_clip(path, f"'{strange[0]}' is {'one more' if strange[0] in state else 'missing'}", strange[0])
    _check_heads(config, path)
    is_quick = given.get("quick_gelu", False) if quick_gelu is None else quick_gelu
    for part in ("vision_config", "text_config"):
        config[part]["hidden_act"] = "quick_gelu" if is_quick else "gelu"
    pixels: dict[str, Any] = content.get("preprocess_cfg", {})
    mean, std = (
        tuple(pixels.get(name) or usual) for name, usual in zip(("mean", "std"), (CLIP_MEAN, CLIP_STD), strict=True)
    )
    return OpenClip(
        config=config,
        pixel_stats=(mean, std),
        has_own_tokenizer=bool(given and given["text_cfg"].get("hf_tokenizer_name")),
        logit_bias=None if bias is None else float(bias.item()),
        has_config=bool(given),
        state=state,
    )


def as_open_clip(config: Any, weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A CLIPModel of transformers as open_clip has it.

    Args:
        config: its CLIPConfig.
        weights: its state dict.

    Returns:
        `model_cfg` of open_clip_config.json, and the state dict.

    Raises:
        ConfigError: open_clip's CLIP cannot have these settings; says which.
    """
    towers = (config.vision_config, config.text_config)
    acts, eps = ({getattr(part, name) for part in towers} for name in ("hidden_act", "layer_norm_eps"))
    if len(acts) > 1 or not acts <= {"gelu", "quick_gelu"} or eps != {1e-5}:
        raise ConfigError(
            f"hidden_act {sorted(acts)} and layer_norm_eps {sorted(eps)}: the towers of open_clip's CLIP have gelu or "
            "quick_gelu, both the same, and 1e-5; export with --to transformers or --to onnx"
        )
    state = {"logit_scale": weights["logit_scale"]}
    for theirs, ours in _names(config.to_dict()).items():
        value = torch.cat([weights[name] for name in ours])
        state[theirs] = (value.T if theirs in TRANSPOSED else value).contiguous()
    return {**_model_cfg(config.to_dict()), "quick_gelu": acts == {"quick_gelu"}}, state


def _names(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Names of parameters in open_clip → those in transformers of which they are the rows, in order."""
    names: dict[str, tuple[str, ...]] = {theirs: (ours,) for theirs, ours in NAMES.items()}
    for (theirs, ours), section in zip(STACKS.items(), ("vision_config", "text_config"), strict=True):
        for layer in range(config[section]["num_hidden_layers"]):
            for kind in ("weight", "bias"):
                for name, own in LAYER_NAMES.items():
                    names[f"{theirs}.{layer}.{name}.{kind}"] = (f"{ours}.layers.{layer}.{own}.{kind}",)
                qkv = tuple(f"{ours}.layers.{layer}.self_attn.{part}_proj.{kind}" for part in "qkv")
                names[f"{theirs}.{layer}.attn.in_proj_{kind}"] = qkv
    return names


def _read_config(path: Path, *, is_needed: bool) -> dict[str, Any]:
    if not path.is_file() and not is_needed:
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        for section in SECTIONS:
            dict(content["model_cfg"][section])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"model.open_clip '{path}': cannot be read as the config of open_clip ({error!r}); give a folder as "
            "`mmdata export --to open_clip` or open_clip's push_to_hf_hub writes it, or a file of weights"
        ) from error
    return cast("dict[str, Any]", content)


def _read_state(path: Path) -> dict[str, Tensor]:
    """The parameters in a file, by the names of open_clip's CLIP class."""
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            content = content.get("state_dict", content)
        state = {str(name).removeprefix("module."): value for name, value in content.items()}
        if not all(isinstance(value, Tensor) for name, value in state.items() if name not in NO_WEIGHTS):
            raise ValueError("there are other things than tensors in it")
    except (OSError, RuntimeError, ValueError, AttributeError, pickle.UnpicklingError, SafetensorError) as error:
        why = textwrap.shorten(str(error) or type(error).__name__, 100)
        raise ConfigError(
            f"model.open_clip '{path}': cannot be read as weights ({why}); save the state dict of open_clip's model, "
            "also where the file is TorchScript, as OpenAI's are"
        ) from error
    # `custom_text` models have their text tower below "text.".
    return {name.removeprefix("text."): value for name, value in state.items() if name not in NO_WEIGHTS}


def _config_of(state: Mapping[str, Tensor], given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The CLIPConfig of weights. Heads are those of `given`, a model_cfg, or without one those of named models.

    Heads are 0 where no named model has a tower of this size.
    """
    try:
        patches, tokens = state["visual.conv1.weight"], state["token_embedding.weight"]
        side = patches.shape[-1] * math.isqrt(len(state["visual.positional_embedding"]) - 1)
        dim, length = state["text_projection"].shape[1], len(state["positional_embedding"])
        inner = [len(state[f"{stack}.0.mlp.c_fc.weight"]) for stack in STACKS]
    except KeyError as error:
        raise _not_clip(path, f"'{error.args[0]}' is missing", error.args[0]) from error
    widths = (len(patches), tokens.shape[1])
    layers = [
        len({name.removeprefix(stack).split(".")[1] for name in state if name.startswith(stack)}) for stack in STACKS
    ]
    if given:
        heads = (max(1, widths[0] // given["vision_cfg"].get("head_width", 64)), given["text_cfg"].get("heads", 8))
    else:
        heads = (VISION_HEADS.get((widths[0], layers[0]), 0), TEXT_HEADS.get((widths[1], layers[1]), 0))
    vision, text = (
        {
            "hidden_size": widths[i],
            "intermediate_size": inner[i],
            "num_hidden_layers": layers[i],
            "num_attention_heads": heads[i],
            "projection_dim": dim,
        }
        for i in range(2)
    )
    # Texts are read at their last token, whatever these say.
    special = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    return {
        "model_type": "clip",
        "projection_dim": dim,
        "vision_config": {**vision, "patch_size": patches.shape[-1], "image_size": side},
        "text_config": {**text, **special, "vocab_size": len(tokens), "max_position_embeddings": length},
    }


def _check_heads(config: Mapping[str, Any], path: Path) -> None:
    """Raise a ConfigError if a tower is of no named model's size, so that nothing says its heads."""
    for part, tower in (("image", config["vision_config"]), ("text", config["text_config"])):
        if not tower["num_attention_heads"]:
            size = f"{counted(tower['num_hidden_layers'], 'layer')} of width {tower['hidden_size']}"
            raise ConfigError(
                f"model.open_clip '{path}': a file of weights does not say the number of heads, and no named model of "
                f"open_clip has {size} in its {part} tower: give the folder with {CONFIG_NAME}, or put that file "
                "beside the weights"
            )


def _model_cfg(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `model_cfg` of a CLIPConfig, but for its activation."""
    vision, text = config["vision_config"], config["text_config"]
    cfg: dict[str, Any] = {
        "embed_dim": config["projection_dim"],
        "vision_cfg": {name: vision[name] for name in ("image_size", "patch_size")},
        "text_cfg": {"context_length": text["max_position_embeddings"], "vocab_size": text["vocab_size"]},
    }
    for section, part in zip(SECTIONS, (vision, text), strict=True):
        width = part["hidden_size"]
        cfg[section] |= {"width": width, "layers": part["num_hidden_layers"]}
        cfg[section]["mlp_ratio"] = part["intermediate_size"] / width
    cfg["vision_cfg"]["head_width"] = vision["hidden_size"] // vision["num_attention_heads"]
    cfg["text_cfg"]["heads"] = text["num_attention_heads"]
    return cfg


def _check_settings(given: Mapping[str, Any], cfg: Mapping[str, Any], path: Path) -> None:
    """Compare a `model_cfg` with that of the weights.

    Raises:
        ConfigError: a size differs, or a setting makes another architecture of it; says which.
    """
    if given.get("embed_dim", cfg["embed_dim"]) != cfg["embed_dim"]:
        raise ConfigError(f"'{path}': embed_dim is {given['embed_dim']}, and {cfg['embed_dim']} in the weights")
    for section in SECTIONS:
        for name, value in given.get(section, {}).items():
            if name in FREE or value is None or value is False or value in NEUTRAL.get(name, ()):
                continue
            if name not in cfg[section]:
                raise _not_clip(path, f"{name} is {value!r}", section)
            own = cfg[section][name]
            if not math.isclose(value, own, rel_tol=1e-4):  # open_clip rounds its ratios of widths
                raise ConfigError(f"'{path}': {section}.{name} is {value}, and {own} in the weights")


def _not_clip(path: Path, why: str, name: str) -> ConfigError:
    part = "image" if name.startswith("vis") else "text"
    return ConfigError(
        f"'{path}': its {part} tower is not that of OpenAI's CLIP ({why}); model.open_clip takes models of open_clip "
        "such as ViT-B-32"
    )
