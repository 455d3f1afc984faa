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

if TYPE_CHECKING:
    from mmdata.train.models.dual_encoder import DualEncoder

logger = logging.getLogger("mmdata")

NAMED = 4
"""Tensors of a kind that a message names."""
SAME = ("hidden_act", "num_attention_heads", "layer_norm_eps")
"""Settings of a tower that decide what its weights mean, and that no shape tells."""


class Source(NamedTuple):
    """Weights by the names of DualEncoder, and what is known of the model that they are of."""

    weights: dict[str, Tensor]
    remedy: str
    model: nn.Module | None = None


def init_from(model: DualEncoder, config: ModelConfig) -> None:
    """Put the weights that `config.init_from` names into a model.

    The scale comes with them unless `logit_scale_init` is set, and the bias unless `logit_bias_init` is.

    Raises:
        ConfigError: the weights are of another architecture; names the tensors.
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
            f"model.init_from '{config.init_from}': its weights do not fit the model: {'; '.join(differences)}. "
            f"{source.remedy}"
        )
    model.load_state_dict(weights)
    model.clamp_logit_scale_()
    logger.info("the weights are those of '%s'", config.init_from)


def _read(path: Path) -> Source:
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
        return Source(load_file(path / "model.safetensors"), remedy)
    # Imported here: the model imports this module, and transformers takes seconds to import.
    from mmdata.train.models.dual_encoder import DualEncoder
    from mmdata.train.models.pretrained import CLIP_TYPES

    if kind not in CLIP_TYPES:
        raise ConfigError(
            f"model.init_from '{path}': model_type '{kind}'; expected a run, an exported run, or one of "
            f"{', '.join(CLIP_TYPES)}. Other towers go to model.vision and model.text"
        )
    loaded = DualEncoder.from_config(ModelConfig(name="pretrained", clip=str(path)))
    remedy = f"To train this model as it is: model.name=pretrained model.clip={path}, without model.init_from"
    return Source(loaded.state_dict(), remedy, loaded)


def _of_run(path: Path) -> Source:
    # Imported here: checkpoints know settings, and the model is built without them.
    from mmdata.train.run.checkpoint import load_checkpoint
    from mmdata.train.run.find import find_checkpoint

    state = load_checkpoint(find_checkpoint(path))
    settings: dict[str, Any] = state.get("settings", {})
    defaults = ModelConfig().model_dump()
    model = {name: value for name, value in settings.get("model", {}).items() if value != defaults.get(name)}
    model.pop("init_from", None)
    tokenizer = settings.get("data", {}).get("tokenizer")
    remedy = f"That run has model: {json.dumps({'name': defaults['name'], **model})} and data.tokenizer: {tokenizer}"
    return Source(state["model"], remedy)


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
