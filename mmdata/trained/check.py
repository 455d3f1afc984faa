"""What a run needs is looked at before anything slow. Mistakes that do not depend on each other are listed together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from mmdata.config import Config, DataConfig
from mmdata.config.corpus import sources
from mmdata.config.data import evaluation_data
from mmdata.config.train import GumbelTopKConfig, SameGroupConfig, TopKConfig, TrainConfig
from mmdata.errors import ConfigError, Problems, explain
from mmdata.index import Index
from mmdata.loader.negatives import REMEDY
from mmdata.loader.regrouped import is_of_run
from mmdata.plan import IndexRows, Plan, count_duplicates, duplicates_in_words, rank_slice
from mmdata.recognize import Kind, recognize
from mmdata.storage import ShardCache
from mmdata.text.tokenizer import Tokenizer, need_tokenizer
from mmdata.train.compiler import wants_compiled_blocks
from mmdata.train.models.dual_encoder import DualEncoder
from mmdata.train.models.limits import image_problem, length_problem, shape_problems
from mmdata.train.run.objective import check_loss

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
    tokenizer = _note(problems, lambda: need_tokenizer(data, to="train a dual encoder"))
    problems += shape_problems(config.model, data)
    if data.negative_captions is not None and not Path(data.negative_captions).is_file():
        problems.append(f"data.negative_captions '{data.negative_captions}': no such file; {REMEDY}")
    groups = data.groups.source if data.groups is not None else "label"
    if groups not in ("label", "run") and not Path(groups).is_file():
        problems.append(f"data.groups.source '{groups}': no such file; `mmdata neighbours` makes one")
    problems += [*_problems_of_groups(config)]
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


def _problems_of_groups(config: Config) -> Iterator[str]:
    """What groups of the run lack, and a miner of groups that batches do not have."""
    groups, miner = config.data.groups, config.train.miner
    if is_of_run(config.data):
        if config.train.feature_cache is None:
            yield "data.groups.source 'run' needs train.feature_cache=pair, from which neighbours are found"
        if config.train.steps is None:
            yield (
                "data.groups.source 'run' needs train.steps in place of train.epochs, since the number of steps of an "
                "epoch depends on the groups"
            )
    if not isinstance(miner, SameGroupConfig):
        return
    if groups is None:
        yield (
            "train.miner same_group keeps the rows of a row's own group, and batches have none: set data.groups, or "
            "take the miner top_k"
        )
        return
    named, rows = ("size", groups.size) if groups.size else ("candidates", 1 + (groups.candidates or 0))
    if rows % miner.size:
        of = f"data.groups.size is {rows}" if named == "size" else f"1 + data.groups.candidates is {rows}"
        yield (
            f"train.miner.size is {miner.size}, and {of}: the miner would take rows of different groups for one; set "
            f"train.miner.size={rows}"
        )


def check_towers(model: DualEncoder, data: DataConfig, plans: list[Plan]) -> None:
    """Check images, and the longest text of the plans, against the towers of a model: known once they are built.

    Raises:
        Problems: its towers do not take them.
    """
    image: Any = model.image_tower
    patch_size, takes_patches = getattr(image, "patch_size", None), getattr(image, "takes_patches", False)
    longest = max(bucket.length for plan in plans for bucket in plan.policy.buckets)
    problems = [
        image_problem(patch_size, data, takes_patches=takes_patches),
        length_problem(longest, getattr(model.text_tower, "length", None)),
    ]
    if any(problems):
        raise Problems(*filter(None, problems))


def warn_of_mining(config: Config) -> None:
    """Log a miner that keeps all negatives, and a queue of the features of new weights."""
    miner, rows = config.train.miner, config.data.global_batch_size
    grouped = isinstance(miner, SameGroupConfig)
    negatives = (miner.size if grouped else rows) - 1
    chosen = isinstance(miner, (TopKConfig, GumbelTopKConfig, SameGroupConfig))
    if chosen and config.train.queue is None and miner.k >= negatives:
        logger.warning(
            "train.miner.k is %d, and a row has %d negatives in %s: the miner keeps all of them; set train.miner.k to "
            "less, or leave the miner out",
            miner.k,
            negatives,
            f"a group of {miner.size}" if grouped else f"a batch of {rows}",
        )
    is_new = config.model.init_from is None and config.model.name != "pretrained"
    if config.train.queue is not None and is_new and not config.train.mining_after_steps:
        logger.warning(
            "train.queue is %d, and the weights are new: their features are soon out of date, and the queue takes them "
            "as negatives from update 0 on; set train.mining_after_steps to some hundreds, or model.init_from",
            config.train.queue,
        )


def warn_of_device(config: Config, device: torch.device, *, world_size: int) -> None:
    """Log parts of a batch for which each shape is compiled twice, and number formats that gain nothing on a CPU."""
    rows = config.data.global_batch_size // world_size
    part = config.train.micro_batch_size or rows
    left = rows % part if rows > part and config.data.token_budget is None else 0
    if left and wants_compiled_blocks(config.train.compile, device):
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
