"""What a run keeps beside its checkpoints, so that its folder can be moved: tokenizer, class names, kind of towers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdata.config import ModelConfig
from mmdata.errors import ConfigError, DataError
from mmdata.files import remove, whole_folder, write_whole
from mmdata.recognize import CHECKPOINTS
from mmdata.text.tokenizer import Tokenizer, save_tokenizer
from mmdata.train.evaluation.prompts import read_classes
from mmdata.train.models.dual_encoder import DualEncoder

logger = logging.getLogger("mmdata")

TOKENIZER = "tokenizer"
CLASSES = "classes.json"
MODEL = "model.json"
TOWERS = ("clip", "vision", "text")
"""Settings of `model` that may name a folder of transformers, or a model on the Hugging Face hub."""


def keep_tokenizer(output: Path, tokenizer: Tokenizer) -> None:
    """Copy a run's tokenizer into RUN/tokenizer, unless an equal one is there.

    A kill at any moment leaves a whole folder or none. If the copy cannot be loaded, or would give other ids, there is
    none, and the log says so: the run then needs `data.tokenizer` where it is now.

    Args:
        output: the run's folder.
        tokenizer: as the run has loaded it.
    """
    folder = output / TOKENIZER
    if _identity(folder) == tokenizer.identity:
        return
    with whole_folder(folder) as aside:
        save_tokenizer(tokenizer.name, aside)
        is_same = _identity(aside) == tokenizer.identity
        remove(folder)  # of a run that ended before its first checkpoint, or damaged
        if not is_same:
            remove(aside)
    if not is_same:
        logger.warning(
            "data.tokenizer '%s': transformers saves it as one that cannot be loaded, or that gives other ids, so the "
            "run keeps no copy of it; keep the tokenizer itself to use the run",
            tokenizer.name,
        )


def _identity(folder: Path) -> str | None:
    """Identity of the tokenizer in a folder; None if there is none that can be loaded."""
    if not folder.is_dir():
        return None
    try:
        return Tokenizer.load(folder).identity
    except (ConfigError, DataError, OSError):
        return None


def keep_classes(output: Path, names: Sequence[str]) -> None:
    """Write the names of a corpus's classes into RUN/classes.json, a file as `mmdata evaluate --classes` takes it.

    Args:
        output: the run's folder.
        names: by label.
    """
    write_whole(output / CLASSES, json.dumps({"classes": list(names)}, ensure_ascii=False, indent=1).encode() + b"\n")


def keep_model(output: Path, config: ModelConfig, model: DualEncoder) -> None:
    """Write what the towers of transformers are into RUN/model.json, if the settings name their folder only.

    Args:
        output: the run's folder.
        config: the section `model`.
        model: as the run has built it.
    """
    named = {name: getattr(config, name) for name in TOWERS if isinstance(getattr(config, name), str)}
    if not named and config.open_clip is None:
        (output / MODEL).unlink(missing_ok=True)  # of a run that ended before its first checkpoint
        return
    # Imported here: transformers takes seconds to import, and the built-in towers do not need it.
    from transformers import AutoConfig

    from mmdata.train.models.open_clip import read_open_clip
    from mmdata.train.models.transformers_towers import sentence_pooling

    configs = {name: AutoConfig.from_pretrained(source) for name, source in named.items()}
    if "text" in named and (pooling := sentence_pooling(named["text"])):
        configs["text"].sentence_pooling = pooling
    towers = {name: json.loads(one.to_json_string(use_diff=False)) for name, one in configs.items()}
    if config.open_clip is not None:
        towers["clip"] = read_open_clip(config.open_clip, quick_gelu=config.quick_gelu).config
    mean, std = ((buffer / 255).flatten().tolist() for buffer in (model.pixel_mean, model.pixel_std))
    content = {"towers": towers, "image_mean": mean, "image_std": std, "has_bias": model.logit_bias is not None}
    write_whole(output / MODEL, json.dumps(content, indent=1).encode() + b"\n")


def kept_model(checkpoint: Path, config: ModelConfig, *, vocab_size: int) -> DualEncoder:
    """A model for the weights of a checkpoint; its towers are those of RUN/model.json, if the run keeps them.

    Args:
        checkpoint: its folder.
        config: the section `model` of the run.
        vocab_size: entries of the tokenizer.

    Raises:
        ConfigError: the towers cannot be built, or the run keeps none and they are not where they were.
        DataError: model.json was not written by `keep_model`.
    """
    config = config.model_copy(update={"init_from": None})  # the run's weights are in its checkpoint
    run = _run_of(checkpoint)
    if run is None or not (run / MODEL).is_file():
        return DualEncoder.from_config(config, vocab_size=vocab_size)
    try:
        kept: Any = json.loads((run / MODEL).read_text(encoding="utf-8"))
        towers: dict[str, Any] = {name: dict(kept["towers"][name]) for name in TOWERS if name in kept["towers"]}
        stats = tuple(kept["image_mean"]), tuple(kept["image_std"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"'{run / MODEL}': not the towers of a run that `mmdata train` writes ({error!r}); remove the file, and "
            "the towers are loaded from where the run's settings say"
        ) from error
    if kept.get("has_bias") and config.logit_bias_init is None:
        towers["logit_bias_init"] = 0.0
    changes = {**towers, "open_clip": None, "quick_gelu": None}
    model = DualEncoder.from_config(config.model_copy(update=changes), vocab_size=vocab_size)
    model.set_pixel_stats(*stats)
    return model


def kept_tokenizer(checkpoint: Path, state: Mapping[str, Any]) -> str | None:
    """The folder of a run's own tokenizer; None for a checkpoint alone, and for a run that keeps none.

    Args:
        checkpoint: its folder.
        state: its content, whose loader state says which tokenizer has made the batches.

    Raises:
        ConfigError: the folder holds another tokenizer, or none that can be loaded.
    """
    run = _run_of(checkpoint)
    if run is None or not (run / TOKENIZER).is_dir():
        return None
    folder = run / TOKENIZER
    plan: Any = state.get("batches", {}).get("plan")
    expected = plan.get("tokenizer") if isinstance(plan, dict) else None
    found = Tokenizer.load(folder).identity
    if expected is not None and found != expected:
        raise ConfigError(
            f"tokenizer '{folder}': not the one that the run was trained with (fingerprint {found}; checkpoint "
            f"'{checkpoint}' has {expected}): put back the folder as the run wrote it, or remove it, and the tokenizer "
            "is loaded from data.tokenizer of the run's settings"
        )
    return str(folder)


def kept_classes(checkpoint: Path) -> list[str] | None:
    """The names in a run's classes.json; None where it has none.

    Raises:
        DataError: the file cannot be read.
    """
    run = _run_of(checkpoint)
    return read_classes(run / CLASSES).classes if run is not None and (run / CLASSES).is_file() else None


def _run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in; None for one that was copied out of it."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == CHECKPOINTS else None
