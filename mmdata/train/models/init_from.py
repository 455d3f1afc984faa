"""`model.init_from`: a new run begins with the weights of another, or of one of its checkpoints.

The settings of `model` say what the towers are, and `init_from` only what their weights are. A model of transformers
comes with both by `model.clip`.
"""

from __future__ import annotations

import json
import logging
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmdata.config import ModelConfig
from mmdata.errors import ConfigError

if TYPE_CHECKING:
    from mmdata.train.models.dual_encoder import DualEncoder

logger = logging.getLogger("mmdata")


def init_from(model: DualEncoder, config: ModelConfig) -> None:
    """Put the weights that `config.init_from` names into a model.

    The scale comes with them unless `logit_scale_init` is set, and the bias unless `logit_bias_init` is.

    Raises:
        ConfigError: the weights are of another architecture; names it, and then the tensors.
        DataError: nothing is there, or it is damaged.
    """
    assert config.init_from is not None
    path = Path(config.init_from)
    _check_is_run(path)
    weights, what, remedy = _of_run(path)
    own = model.state_dict()
    for name, given in (("logit_scale", config.logit_scale_init), ("logit_bias", config.logit_bias_init)):
        if name in own and (given is not None or name not in weights):
            weights[name] = own[name]
        if name not in own:  # features do not depend on the bias
            weights.pop(name, None)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        differences = textwrap.shorten(str(error).partition(":")[2], 400, placeholder=" …")
        raise ConfigError(
            f"model.init_from '{path}': it is {what}, and the config's model is {config.name}. {remedy}. What does not "
            f"fit: {differences}"
        ) from error
    model.clamp_logit_scale_()
    logger.info("the weights are those of '%s'", path)


def _check_is_run(path: Path) -> None:
    """Raise a ConfigError where a folder has a model of transformers."""
    if not (path / "config.json").is_file():
        return
    try:
        kind = json.loads((path / "config.json").read_text())["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.init_from '{path}': its config.json names no model_type") from error
    raise ConfigError(
        f"model.init_from '{path}': a {kind} of transformers, and not a run; set model.name=pretrained "
        f"model.clip={path} in its place, or model.vision and model.text for two towers"
    )


def _of_run(path: Path) -> tuple[dict[str, Tensor], str, str]:
    """The weights of a run, what they are of, and how to train it."""
    # Imported here: checkpoints know settings, and the model is built without them.
    from mmdata.train.run.checkpoint import find_checkpoint, load_checkpoint

    state = load_checkpoint(find_checkpoint(path), parts=("model",))
    settings: dict[str, Any] = state.get("settings", {})
    defaults = ModelConfig().model_dump()
    model = {name: value for name, value in settings.get("model", {}).items() if value != defaults.get(name)}
    model.pop("init_from", None)
    tokenizer = settings.get("data", {}).get("tokenizer")
    what = f"a run with model: {json.dumps({'name': defaults['name'], **model})} and data.tokenizer: {tokenizer}"
    return dict(state["model"]), what, "Set model and data.tokenizer to the same"
