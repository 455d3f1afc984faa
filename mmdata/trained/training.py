"""Train on shards: loader, model and trainer of a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import nn

from mmdata.config import Config
from mmdata.config.strict_yaml import parse
from mmdata.config.train import TrainConfig
from mmdata.errors import ConfigError, Problems
from mmdata.files import write_whole
from mmdata.loader import Loader
from mmdata.loader.ledger import cut_ledger
from mmdata.loader.regrouped import RegroupedLoader, is_of_run
from mmdata.recognize import CHECKPOINTS, Kind, recognize
from mmdata.text.tokenizer import Tokenizer
from mmdata.train import DualEncoder
from mmdata.train.batches import count_steps
from mmdata.train.models.expected_inputs import with_inputs_of_model
from mmdata.train.precision import AUTOCAST, Precision, choose_precision
from mmdata.train.ranks import collectives
from mmdata.train.run.checkpoint import latest_checkpoint, step_of
from mmdata.train.run.report import EVALUATION
from mmdata.train.run.trainer import Trainer
from mmdata.trained.carried import keep_classes, keep_model, keep_tokenizer
from mmdata.trained.check import check_run, shape_problems, warn_of_device, warn_of_false_negatives, warn_of_mining
from mmdata.trained.evaluation import Evaluation, given_classes, ledger_of
from mmdata.trained.run import load_run

logger = logging.getLogger("mmdata")

CONFIG = "config.yaml"
"""File of a run's folder with all of its settings."""
PROBE = "Two dogs, 3 cats"
"""A text to which tokenizers that differ give other numbers."""


def train(config: Config, output: Path, device: torch.device) -> int:
    """Put loader, model and trainer together, and run them on this rank; a run found in `output` is resumed.

    Args:
        config: all settings of the run.
        output: the run's folder, shared by all ranks.
        device: of this rank, from `collectives.init`.

    Returns:
        0, or 128 + the number of the signal that stopped the run.
    """
    rank, world_size = collectives.rank(), collectives.world_size()
    config = with_inputs_of_model(config)
    tokenizer = check_run(config, output, world_size=world_size)
    config = _with_precision(config, output, device)
    if rank == 0:
        warn_of_mining(config)
        warn_of_device(config, device, world_size=world_size)
    data = config.data
    if is_of_run(data):
        loader: Any = RegroupedLoader(data, output / "groups", rank=rank, world_size=world_size)
    else:
        loader = Loader.from_config(data, rank=rank, world_size=world_size)
    val: Evaluation | None = None
    if data.val:
        val = Evaluation.of(data, tokenizer, given_classes(data), setting="data.val.classes", train=config.train)
    loaders = [loader] if val is None else [loader, val.loader]
    torch.manual_seed(config.train.seed)  # the same weights on all ranks
    model_config, learning = config.model, config.train
    if (newest := latest_checkpoint(output / CHECKPOINTS)) is not None:  # the run goes on with its own weights
        model_config = model_config.model_copy(update={"init_from": None})
    elif rank == 0:
        warn_of_false_negatives(config.train, loader.plan)
    model = DualEncoder.from_config(model_config, vocab_size=tokenizer.vocab_size).to(device)
    plans, teacher = [each.plan for each in loaders], None
    if learning.distill is not None and learning.distill.teacher is not None:
        if newest is not None and step_of(newest) >= count_steps(loader, learning):  # nothing is left to learn
            learning = learning.model_copy(update={"distill": None})
        else:
            teacher = load_teacher(learning.distill.teacher, tokenizer, device)
    wrong = shape_problems(model, plans)
    wrong += [f"train.distill.teacher: {each}" for each in shape_problems(teacher, plans[:1])] if teacher else []
    if wrong:
        raise Problems(*wrong)
    evaluate = None if val is None else _evaluate_on(val, config, output)
    settings = config.model_dump(mode="json")
    given: dict[str, Any] = {"settings": settings, "evaluate": evaluate, "teacher": teacher}
    trainer = Trainer(model, loader, learning, output=output, **given)
    if rank == 0:
        write_whole(output / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
        keep_tokenizer(output, tokenizer)
        keep_model(output, config.model, model)
        for each in loaders:
            if names := each.index.class_names:
                keep_classes(output, names)
                break
    state = loader.state_dict()
    loader.ledger.write_to(output / f"ledger-rank{rank}.jsonl", epoch=state["epoch"], step=state["step"])
    if rank == 0:
        _cut_ledgers_of_former_ranks(output, state, world_size)
    return trainer.run()


def load_teacher(source: str, tokenizer: Tokenizer, device: torch.device) -> DualEncoder:
    """The model of `train.distill.teacher`: of a run or a checkpoint, or a CLIP or SigLIP of transformers.

    Args:
        source: its folder, or a name on the Hugging Face hub.
        tokenizer: of the student, whose token numbers the teacher gets too.
        device: where it works.

    Raises:
        ConfigError: there is no such model, or it was trained with another tokenizer.
        DataError: the run is damaged.
    """
    folder = Path(source)
    is_run = recognize(folder) in (Kind.RUN, Kind.CHECKPOINT, Kind.CHECKPOINTS)
    own = None
    try:
        if is_run:
            trained = load_run(source, device)
            model, own = trained.model, trained.tokenizer
        else:
            settings = {"name": "pretrained", "clip": source}
            model = DualEncoder.from_config(settings, vocab_size=tokenizer.vocab_size).to(device)
            if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
                own = Tokenizer.load(folder)
    except ConfigError as error:
        nothing = "" if is_run else "no run is there, and as a model of transformers: "
        raise ConfigError(f"train.distill.teacher '{source}': {nothing}{error}") from error
    if own is not None:
        length = min(own.max_length, tokenizer.max_length)
        encoded = (each.encode_cut([PROBE], length) for each in (tokenizer, own))
        ours, theirs = (ids[mask > 0].tolist() for ids, mask, _ in encoded)
        if ours != theirs:
            raise ConfigError(
                f"train.distill.teacher '{source}': its tokenizer gives other token numbers than data.tokenizer "
                f"'{tokenizer.name}' ('{PROBE}': {theirs}, and {ours}): set data.tokenizer to the teacher's"
            )
    return model


def _with_precision(config: Config, output: Path, device: torch.device) -> Config:
    """The settings with a number format in place of auto: that of the run in `output`, else the one for this device."""
    wanted = config.train.precision
    if wanted == "auto" and (output / CONFIG).is_file() and latest_checkpoint(output / CHECKPOINTS) is not None:
        saved = yaml.safe_load((output / CONFIG).read_bytes()) or {}
        wanted = saved.get("train", {}).get("precision", wanted)
        if collectives.rank() == 0 and wanted != (auto := choose_precision("auto", device)):
            logger.warning(
                "train.precision is %s, as the run in '%s' began; for a new run on this device auto is %s",
                wanted,
                output,
                auto,
            )
    chosen = {**config.train.model_dump(), "precision": choose_precision(wanted, device)}
    # Checked again: a run in fp16 may not go on with FSDP2.
    return config.model_copy(update={"train": parse(TrainConfig, chosen, origin=f"the run in '{output}'")})


def _cut_ledgers_of_former_ranks(output: Path, state: dict[str, Any], world_size: int) -> None:
    """Cut the ledgers of ranks that the run no longer has, at the step from which it goes on."""
    for path in output.glob("ledger-rank*.jsonl"):
        if int(path.stem.removeprefix("ledger-rank")) >= world_size:
            cut_ledger(path, epoch=state["epoch"], step=state["step"])


def _evaluate_on(val: Evaluation, config: Config, output: Path) -> Callable[[nn.Module], Mapping[str, float]]:
    """The scores of an evaluation, as the loop calls it; equal images or captions are no mistakes.

    A file of the run lists the rows that could not be loaded in the newest evaluation.
    """
    dtype = AUTOCAST[cast(Precision, config.train.precision)]

    def evaluate(model: nn.Module) -> dict[str, float]:
        val.loader.set_epoch(0)
        val.loader.ledger.write_to(ledger_of(output / EVALUATION, collectives.rank()), epoch=0, step=0)
        return val.scores(model, val.loader, autocast_dtype=dtype)

    return evaluate
