"""What a run needs is looked at before anything slow. Mistakes that do not depend on each other are listed together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from mmdata.config import Config, DataConfig
from mmdata.config.corpus import sources
from mmdata.config.data import evaluation_data
from mmdata.config.train import GumbelTopKConfig, SameGroupConfig, TopKConfig, TrainConfig
from mmdata.errors import ConfigError, Problems, explain
from mmdata.index import Index
from mmdata.loader.entries.negatives import REMEDY
from mmdata.plan import IndexRows, Plan, count_duplicates, duplicates_in_words, rank_slice
from mmdata.recognize import Kind, recognize
from mmdata.storage import ShardCache
from mmdata.text.tokenizer import Tokenizer, need_tokenizer
from mmdata.train.run.objective import check_loss
from mmdata.trained.evaluation import given_classes

logger = logging.getLogger("mmdata")

COUNTED_BATCHES = 8
"""Batches of which the false negatives are counted."""
NOTICEABLE_DUPLICATES = 0.01
"""Share of rows that meet their own image or caption from which on the log says so."""

BEFORE_A_RUN = (".", "features.", "events.out.")
"""Beginnings of the names of files that a run or TensorBoard writes before its metrics, and of hidden files."""
NOTES = (".log", ".out", ".err", ".txt", ".yaml", ".yml")
"""Ends of the names of files beside a new run: its config, and what a shell or a cluster's scheduler writes."""

Found = TypeVar("Found")


def check_run(config: Config, output: Path, *, world_size: int) -> Tokenizer:
    """Check all that can be checked without an image, a caption or a weight.

    Args:
        config: all settings of the run.
        output: the run's folder.
        world_size: ranks that share each batch.

    Returns:
        The tokenizer, which has been loaded for it.

    Raises:
        Problems: what does not fit, one line each.
    """
    data, problems = config.data, list[str]()
    if config.train.epochs is None and config.train.steps is None:
        problems.append("train.epochs or train.steps is required: how long to train")
    _note(problems, lambda: _check_output(output))
    if data.token_budget is None:  # else the plan sizes the batches
        _note(problems, lambda: rank_slice(data.global_batch_size, 0, world_size), "data.")
    _note(problems, lambda: _open(data), "data.shards: ")
    if data.val.shards is not None:
        _note(problems, lambda: _open(evaluation_data(data)), "data.val.shards: ")
    _note(problems, lambda: given_classes(data), "data.val.classes: ")
    tokenizer = _note(problems, lambda: need_tokenizer(data, to="train a dual encoder"))
    if data.negative_captions is not None and not Path(data.negative_captions).is_file():
        problems.append(f"data.negative_captions '{data.negative_captions}': no such file; {REMEDY}")
    groups = data.groups.source if data.groups is not None else "label"
    if groups not in ("label", "run") and not Path(groups).is_file():
        problems.append(f"data.groups.source '{groups}': no such file; `mmdata neighbours` makes one")
    if groups == "run" and config.train.feature_cache is None:
        problems.append("data.groups.source 'run' needs train.feature_cache=pair, from which neighbours are found")
    if groups == "run" and config.train.steps is None:
        problems.append(
            "data.groups.source 'run' needs train.steps in place of train.epochs, since the number of steps of an "
            "epoch depends on the groups"
        )
    for name in ("distill", "teacher"):
        fields = getattr(getattr(config.train, name), "fields", None)
        if fields is not None and (unknown := {fields.image, fields.text} - data.fields.keys()):
            problems.append(
                f"train.{name}.fields: data.fields has no {' and no '.join(sorted(unknown))}; add what brings such "
                "features to the batches, as image_emb: join:dr:npz:image_emb"
            )
    # That of a pretrained model is checked once the model is built.
    has_bias = config.model.logit_bias_init is not None or config.model.name == "pretrained"
    has_negatives = data.negative_captions is not None
    _note(problems, lambda: check_loss(config.train, has_bias=has_bias, has_negative_captions=has_negatives))
    if problems:
        raise Problems(*problems)
    assert tokenizer is not None, "a tokenizer that cannot be loaded is a problem"
    return tokenizer


def _check_output(output: Path) -> None:
    """Raise a ConfigError if the folder for a run is a file, or the folder of something else."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"train.output '{output}': a file, and a run needs a folder; give another train.output")
    kind = recognize(output)
    if kind in (Kind.RUN, Kind.ABSENT):
        return
    names = sorted(path.name for path in output.iterdir())
    beside = {name for name in names if name.startswith(BEFORE_A_RUN) or name.endswith(NOTES)} - {"config.yaml"}
    if foreign := [name for name in names if name not in beside]:  # a run would write over another's config.yaml
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ConfigError(
            f"train.output '{output}': {kind.value}; it holds files that are not a run's ('{foreign[0]}'{more}); "
            "choose another output"
        )


def shape_problems(model: nn.Module, plans: list[Plan]) -> list[str]:
    """What shapes the batches of some plans have that the towers of a model do not take, one message each."""
    image_tower, text_tower = (getattr(model, name, None) for name in ("image_tower", "text_tower"))
    buckets = [bucket for plan in plans for bucket in plan.policy.buckets]
    patch_size = getattr(image_tower, "patch_size", None)
    problems: list[str] = []
    takes_patches = getattr(image_tower, "takes_patches", image_tower is None)
    if not takes_patches and any(bucket.patches for bucket in buckets):
        problems.append(
            "data.image_patches: the image tower takes whole images: set data.image_size or data.image_buckets in its "
            "place, or choose a SigLIP 2 NaFlex model (model_type siglip2)"
        )
    shapes = sorted({(bucket.height, bucket.width) for bucket in buckets})
    if patch_size and (wrong := [shape for shape in shapes if any(side % patch_size for side in shape)]):
        problems.append(
            f"images of {' and '.join(f'{height} x {width}' for height, width in wrong)} pixels: sides must be "
            f"multiples of the model's patch size {patch_size}; set data.image_size or data.image_buckets, and with a "
            f"number of image_buckets data.patch_size={patch_size}"
        )
    longest, positions = max(bucket.length for bucket in buckets), getattr(text_tower, "length", None)
    if positions is not None and longest > positions:
        problems.append(
            f"data.max_length: texts of up to {longest} tokens are longer than the {positions} positions of the text "
            f"tower; set data.max_length={positions}"
        )
    return problems


def warn_of_mining(config: Config) -> None:
    """Log a miner that chooses by new weights, or that keeps all negatives."""
    miner, rows, regions = config.train.miner, config.data.global_batch_size, config.train.regions
    is_new = config.model.init_from is None and config.model.name != "pretrained"
    for key, each in {"train.miner": miner, "train.regions.miner": regions and regions.miner}.items():
        if each and is_new and each.name not in ("all", "same_group") and not config.train.mining_after_steps:
            logger.warning(
                "%s %s begins with update 0, and the weights are new: their hardest negatives are noise, and the model "
                "may collapse; set train.mining_after_steps to some hundreds, or model.init_from to a trained model",
                key,
                each.name,
            )
    if not isinstance(miner, (TopKConfig, GumbelTopKConfig, SameGroupConfig)) or config.train.queue is not None:
        return
    within = f"a group of {miner.size}" if isinstance(miner, SameGroupConfig) else f"a batch of {rows}"
    negatives = (miner.size if isinstance(miner, SameGroupConfig) else rows) - 1
    if miner.k >= negatives:
        logger.warning(
            "train.miner.k is %d, and a row has %d negatives in %s: the miner keeps all of them; set train.miner.k to "
            "less, or leave the miner out",
            miner.k,
            negatives,
            within,
        )


def warn_of_device(config: Config, device: torch.device, *, world_size: int) -> None:
    """Log parts of a batch for which each shape is compiled twice, and number formats that gain nothing on a CPU."""
    rows = config.data.global_batch_size // world_size
    part = config.train.micro_batch_size or rows
    left = rows % part if rows > part and config.data.token_budget is None else 0
    if left and (config.train.compile is True or (config.train.compile == "auto" and device.type == "cuda")):
        logger.warning(
            "train.micro_batch_size is %d, and a rank has %d rows of a batch: each shape is compiled twice, the second "
            "time for the %d rows that are left; a divisor of %d is compiled once",
            part,
            rows,
            left,
            rows,
        )
    if device.type == "cpu" and config.train.precision in ("tf32", "fp16"):
        logger.warning(
            "train.precision is %s, and the run is on a CPU, %s; fp32 and bf16 are for CPUs",
            config.train.precision,
            "which has no TF32: it computes in fp32" if config.train.precision == "tf32" else "where fp16 is slow",
        )


def warn_of_false_negatives(config: TrainConfig, plan: Plan) -> None:
    """Log that rows are trained against their own image or caption as negatives, by the first batches of the plan.

    Captions of a template, such as those of class names, are equal in many rows of a batch.

    Args:
        config: how to train.
        plan: of the batches.
    """
    rows = plan.rows
    if config.mask_false_negatives or config.loss == "multi_positive" or not isinstance(rows, IndexRows):
        return
    batches = duplicates = counted = 0
    for step in islice(plan.steps(0), COUNTED_BATCHES):
        batches += 1
        valid = step.rows >= 0
        duplicates += count_duplicates(rows.hashes(step.rows[valid], step.passes[valid]))
        counted += int(valid.sum())
    if duplicates >= NOTICEABLE_DUPLICATES * counted:
        said = duplicates_in_words(duplicates)
        logger.warning("false negatives: in the first %d batches, of %s rows, %s", batches, f"{counted:,}", said)


def _note(problems: list[str], check: Callable[[], Found], where: str = "") -> Found | None:
    """What a check gives; if it raises, its message is added to the problems, behind `where`."""
    try:
        return check()
    except OSError as error:
        problems.append(f"{where}{explain(error)}")
    except ValueError as error:  # a ConfigError or a DataError among them
        problems.append(f"{where}{error}")
    return None


def _open(data: DataConfig) -> Index:
    return Index.open([source.shards for source in sources(data)], cache=ShardCache.from_config(data.loading))
