"""`model.init_from`: a new run begins with the weights of another, or of a model that transformers has saved.

The settings of `model` say what the towers are, and `init_from` only what their weights are: those of a run, a
checkpoint, an exported folder, or a CLIPModel, SiglipModel or Siglip2Model of the same architecture. `model.clip` also
takes the architecture from a folder.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor, nn

from mmdata.config import ModelConfig
from mmdata.errors import ConfigError
from mmdata.train.models.clip_sizes import CLIP_SIZES, clip_config

if TYPE_CHECKING:
    from mmdata.train.models.dual_encoder import DualEncoder

logger = logging.getLogger("mmdata")

NAMED = 2
"""Tensors of a kind that a message names."""
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
"""Settings of a tower by which a CLIP is one of `CLIP_SIZES`."""
SAME = ("hidden_act", "num_attention_heads", "layer_norm_eps")
"""Settings of a tower that decide what its weights mean, and that no shape tells."""


class InitialWeights(NamedTuple):
    """Weights by the names of DualEncoder, and what is known of the model that they are of.

    Attributes:
        weights: of all parameters.
        what: the model in words, the end of a sentence that begins with "it is".
        remedy: a sentence that says how to train it.
        model: the model, where it was built to read the weights.
    """

    weights: dict[str, Tensor]
    what: str
    remedy: str
    model: nn.Module | None = None


def init_from(model: DualEncoder, config: ModelConfig) -> None:
    """Put the weights that `config.init_from` names into a model.

    The scale comes with them unless `logit_scale_init` is set, and the bias unless `logit_bias_init` is.

    Raises:
        ConfigError: the weights are of another architecture; names it, and then the tensors.
        DataError: nothing is there, or it is damaged.
    """
    assert config.init_from is not None
    source = _read(Path(config.init_from))
    own = model.state_dict()
    weights = dict(source.weights)
    for name, given in (("logit_scale", config.logit_scale_init), ("logit_bias", config.logit_bias_init)):
        if name in own and (given is not None or name not in weights):
            weights[name] = own[name]
        if name not in own:  # features do not depend on the bias
            weights.pop(name, None)
    if differences := [*_differences(weights, own), *_other_settings(source.model, model)]:
        raise ConfigError(
            f"model.init_from '{config.init_from}': it is {source.what}, and the config's "
            f"model is {_in_words(config)}. "
            f"{source.remedy}. What does not fit: {'; '.join(differences)}"
        )
    theirs = None if source.model is None else source.model.get_buffer("pixel_mean").flatten() / 255
    if theirs is not None and not theirs.allclose(own_mean := model.pixel_mean.flatten().cpu() / 255, atol=1e-3):
        logger.warning(
            "model.init_from '%s': its pixels have the mean %s, and the model's %s: set model.name=pretrained "
            "model.clip=%s, without model.init_from, to normalise as it does",
            config.init_from,
            [round(x, 4) for x in theirs.tolist()],
            [round(x, 4) for x in own_mean.tolist()],
            config.init_from,
        )
    model.load_state_dict(weights)
    model.clamp_logit_scale_()
    logger.info("the weights are those of '%s'", config.init_from)


def _read(path: Path) -> InitialWeights:
    if not (path / "config.json").is_file():
        return _of_run(path)
    try:
        kind = json.loads((path / "config.json").read_text())["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.init_from '{path}': its config.json names no model_type") from error
    if kind == "mmdata":
        if not (path / "model.safetensors").is_file():
            raise ConfigError(f"model.init_from '{path}': no model.safetensors in it; export the run again")
        remedy = "Set model to the settings in its README.md, and data.tokenizer to this folder"
        return InitialWeights(load_file(path / "model.safetensors"), "an exported run", remedy)
    # Imported here: the model imports this module, and transformers takes seconds to import.
    from mmdata.train.models.dual_encoder import DualEncoder
    from mmdata.train.models.pretrained import CLIP_TYPES

    if kind not in CLIP_TYPES:
        raise ConfigError(
            f"model.init_from '{path}': model_type '{kind}'; expected a run, an exported run, or one of "
            f"{', '.join(CLIP_TYPES)}. Other towers go to model.vision and model.text"
        )
    loaded = DualEncoder.from_config(ModelConfig(name="pretrained", clip=str(path)))
    what, name = _of_transformers(path)
    remedy = f"To train it as it is, set model.name=pretrained model.clip={path}, without model.init_from"
    if name is not None:
        remedy = f"Set model.name={name}, and data.tokenizer to the one that it was trained with"
    return InitialWeights(loaded.state_dict(), what, remedy, loaded)


def _of_transformers(path: Path) -> tuple[str, str | None]:
    """A CLIP or SigLIP in words, and the `model.name` that builds the same towers, if there is one."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(path)
    image, text = config.vision_config, config.text_config
    what = (
        f"a {config.model_type} with {image.num_hidden_layers} image layers of width {image.hidden_size} and patches "
        f"of {image.patch_size}, and {text.num_hidden_layers} text layers of width {text.hidden_size} and "
        f"{text.vocab_size:,} tokens"
    )
    if config.model_type != "clip":
        return what, None
    for name in CLIP_SIZES:
        own = clip_config(name, vocab_size=text.vocab_size)
        towers = ((image, own["vision_config"]), (text, own["text_config"]))
        if all(getattr(one, key) == same[key] for one, same in towers for key in SIZES if key in same):
            quick = f", with {image.hidden_act} in place of gelu" if image.hidden_act != "gelu" else ""
            return f"a clip of the size {name}{quick}", None if quick else name
    return what, None


def _in_words(config: ModelConfig) -> str:
    """The model that the settings name."""
    towers = [getattr(config, name) for name in ("clip", "vision", "text")]
    named = ", ".join(f"'{one}'" for one in towers if isinstance(one, str))
    return f"{config.name} ({named})" if named else config.name


def _of_run(path: Path) -> InitialWeights:
    # Imported here: checkpoints know settings, and the model is built without them.
    from mmdata.train.run.checkpoint import load_checkpoint
    from mmdata.train.run.find import find_checkpoint

    state = load_checkpoint(find_checkpoint(path), parts=("model",))
    settings: dict[str, Any] = state.get("settings", {})
    defaults = ModelConfig().model_dump()
    model = {name: value for name, value in settings.get("model", {}).items() if value != defaults.get(name)}
    model.pop("init_from", None)
    tokenizer = settings.get("data", {}).get("tokenizer")
    what = f"a run with model: {json.dumps({'name': defaults['name'], **model})} and data.tokenizer: {tokenizer}"
    return InitialWeights(state["model"], what, "Set model and data.tokenizer to the same")


def _differences(weights: dict[str, Tensor], own: dict[str, Tensor]) -> list[str]:
    """What does not fit, in words: shapes that differ, tensors that only one of both has."""
    shapes = [
        f"{name} is {tuple(weights[name].shape)}, and the model's is {tuple(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    lacking = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in own]
    found = [_some(shapes, "; ")]
    found += [f"it lacks {_some(lacking, ', ')}"] if lacking else []
    found += [f"the model has no {_some(unknown, ', ')}"] if unknown else []
    return [part for part in found if part]


def _some(parts: list[str], between: str) -> str:
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return between.join(parts[:NAMED]) + more


def _other_settings(source: nn.Module | None, model: nn.Module) -> list[str]:
    """Settings of towers with equal shapes that nevertheless compute something else."""
    theirs, own = ({} if one is None else _settings(one) for one in (source, model))
    return [
        f"its {tower.partition('.')[0]} has {name} {value}, and the model's {own[tower, name]}"
        for (tower, name), value in theirs.items()
        if own.get((tower, name), value) != value
    ]


def _settings(model: nn.Module) -> dict[tuple[str, str], Any]:
    """The settings `SAME` of each tower that is a whole model of transformers."""
    configs = {name: getattr(part, "config", None) for name, part in model.named_modules() if name.endswith("model")}
    return {
        (tower, name): getattr(config, name)
        for tower, config in configs.items()
        for name in SAME
        if hasattr(config, name)
    }
