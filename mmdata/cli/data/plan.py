"""mmdata plan: steps, shapes and padding of an epoch; no image is read.

mmdata plan shards/photos                      # a folder of shards: says which settings it assumes
mmdata plan shards/photos data.global_batch_size=1024 data.image_buckets=3
mmdata plan configs/scenes.yaml
mmdata plan configs/scenes.yaml data.global_batch_size=1024 --world-size 8
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdata.cli.paths import find_config, find_part, load_settings
from mmdata.errors import ConfigError, counted, printable

if TYPE_CHECKING:
    from mmdata.config import DataConfig, ModelConfig
    from mmdata.index import Index
    from mmdata.index.caption_lengths import CountsTokens
    from mmdata.loader.corpus import Corpus
    from mmdata.plan import Plan

BATCH_ROWS = 256
"""`data.global_batch_size` of a folder's plan; all rows where the folder has fewer."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG_OR_SHARDS", help="YAML file, run, or folder (URL) of shards")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--epoch", type=int, default=0, help="captions, and so lengths, may differ by epoch")
    parser.add_argument("--world-size", type=int, default=1, metavar="W", help="ranks, to say what each reads")


def run(arguments: argparse.Namespace) -> int:
    """Print the table of buckets and the padding."""
    planned = plan_of(arguments.config, arguments.overrides)
    from rich.console import Console
    from rich.table import Table

    from mmdata.inspect.epoch import epoch_in_words
    from mmdata.plan import IndexRows, summarize
    from mmdata.plan.weights import WeightedPlan

    plan, rows = planned.plan, planned.plan.rows
    if planned.assumed:
        print(printable(f"no config is given; assumed: {', '.join(planned.assumed)}"))
    assert isinstance(rows, IndexRows)
    summary = summarize(plan, arguments.epoch, world_size=arguments.world_size, hashes=rows.hashes)

    if (selection := rows.selection) is not None:
        print(printable(f"{selection.name}: {len(selection):,} of {int(rows.starts[-1]):,} rows"))
    if isinstance(plan, WeightedPlan):
        values = plan.weights.values[plan.weights.values > 0]
        given = f"{len(values):,} rows with weights from {values.min():.3g} to {values.max():.3g}"
        print(printable(f"{plan.weights.name}: {given}, {counted(plan.weights.num_parts, 'part')} an epoch"))
    table = Table(title=f"epoch {arguments.epoch}: {counted(summary.rows, 'row')} in {counted(summary.steps, 'step')}")
    boxes = ["boxes"] if any(bucket.boxes for bucket in summary.buckets) else []
    for name in ("text length", "image", *boxes, "batch", "steps", "rows", "padding"):
        table.add_column(name, justify="right")
    for (bucket, count), batch_size in zip(summary.buckets.items(), plan.batch_sizes, strict=True):
        if count.steps:
            padding = f"{1 - count.tokens / (count.rows * bucket.length):.1%}" if bucket.length else "no texts"
            counts = (*(f"{bucket.boxes}" for _ in boxes), f"{batch_size:,}", f"{count.steps:,}", f"{count.rows:,}")
            table.add_row(f"{bucket.length}", bucket.image, *counts, padding)
    Console().print(table)
    for problem in planned.problems:
        print(printable(f"the model does not take this: {problem}"))
    for line in epoch_in_words(summary, plan, planned.index, planned.data, masked=planned.masks):
        print(line)
    return 0


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from.

    Attributes:
        data: settings.
        index: of the shards.
        plan: with known caption lengths.
        assumed: settings that nobody gave, as on the command line; empty for a config.
        problems: what the config's model does not take, in words; none where the config names no model.
        masks: rows that are alike are not used as negatives for each other, as the config says.
    """

    data: DataConfig
    index: Index
    plan: Plan
    assumed: Sequence[str] = ()
    problems: Sequence[str] = ()
    masks: bool = False


def plan_of(place: str, overrides: list[str]) -> Planned:
    """The plan that `mmdata plan` prints.

    Args:
        place: as for `load_settings`.
        overrides: "section.key=value".

    Raises:
        ConfigError: a setting is wrong, or no tokenizer has counted the captions of the folder and none is given.
        DataError: the folder has no index.
    """
    if find_config(place) is None:
        return _plan_of_shards(place, overrides)
    config = load_settings(place, overrides)
    from mmdata.loader.corpus import open_corpus
    from mmdata.train.models.expected_inputs import with_inputs_of_model

    config = with_inputs_of_model(config)
    data, corpus = config.data, open_corpus(config.data)
    plan = _plan(data, corpus, corpus.tokenizer)
    problems = _problems(config.model, plan) if "model" in config.model_fields_set else []
    return Planned(data, corpus.index, plan, problems=problems, masks=config.train.mask_false_negatives)


def _problems(config: ModelConfig, plan: Plan) -> list[str]:
    """What the plan has that a built-in model does not take; nothing is known of others before they are loaded."""
    if config.name == "pretrained":
        return []
    import torch

    from mmdata.train import DualEncoder
    from mmdata.trained.check import shape_problems

    with torch.device("meta"):
        model = DualEncoder.from_config(config.model_copy(update={"init_from": None}), vocab_size=1_000)
    return shape_problems(model, [plan])


def _plan_of_shards(place: str, overrides: list[str]) -> Planned:
    from mmdata.config.strict_yaml import with_overrides
    from mmdata.index import Index
    from mmdata.loader.corpus import open_corpus
    from mmdata.plan.from_config import num_rows

    given = with_overrides({"data": {}}, overrides)["data"]
    part = find_part(place)
    place = part or place
    index = Index.open(place)
    assumed: dict[str, Any] = {"global_batch_size": max(min(BATCH_ROWS, len(index)), 1)}
    if "tokenizer" not in given and isinstance(given.get("captions"), dict):
        raise ConfigError("data.captions names tables, whose tokens no index has: give data.tokenizer=NAME_OR_FOLDER")
    if "tokenizer" not in given and given.get("caption_template") is not None:
        raise ConfigError("data.caption_template changes the lengths of captions: give data.tokenizer=NAME_OR_FOLDER")
    if "tokenizer" not in given and index.has_captions:
        if index.tokenizer is None:
            raise ConfigError(
                f"shards '{place}': no tokenizer has counted their captions, and a plan needs the lengths: give one "
                f"(data.tokenizer=NAME_OR_FOLDER), or store the lengths with `mmdata index {place} --tokenizer …`"
            )
        assumed["tokenizer"] = f"the one that counted the index ({index.tokenizer})"
    if "global_batch_size" not in given and {"select", "join", "val"} & given.keys():
        with _quiet():  # the plan says the same again
            selected = num_rows(load_settings(place, overrides, assumed | {"global_batch_size": 1}).data)
        assumed["global_batch_size"] = max(min(BATCH_ROWS, selected), 1)
    data = load_settings(place, overrides, assumed).data
    # Where the index holds the lengths, the plan needs no more of a tokenizer.
    counted = CountedLengths(str(index.tokenizer)) if "tokenizer" in assumed else None
    corpus = open_corpus(data.model_copy(update={"tokenizer": None}) if counted else data)
    shown = assumed | {name: getattr(data, name) for name in ("image_size", "max_length")}
    listed = [f"data.{name}={value}" for name, value in shown.items() if name not in given]
    if part and "shards" not in given:
        listed = [f"data.shards={part}", *listed]
    return Planned(data, corpus.index, _plan(data, corpus, counted or corpus.tokenizer), listed)


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Without mmdata's warnings."""
    logger = logging.getLogger("mmdata")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _plan(data: DataConfig, corpus: Corpus, tokenizer: CountsTokens | None) -> Plan:
    """The plan; what batches are made with is looked at, too, so that a run refuses nothing that a plan has passed."""
    from mmdata.images.pixels import PixelTransform
    from mmdata.loader.entries.fields import Fields
    from mmdata.plan.from_config import build_plan
    from mmdata.text.transform import TextTransform

    Fields(data, corpus.index, corpus.joined)
    TextTransform.from_config(data)
    PixelTransform.from_config(data)
    return build_plan(data, corpus.index, tokenizer, count_lengths=True, joined=corpus.joined, captions=corpus.captions)


@dataclass(frozen=True)
class CountedLengths:
    """Stands for the tokenizer that counted an index: it has the fingerprint, and cannot count anything else."""

    fingerprint: str
    name: str = ""

    def count(self, captions: Sequence[str]) -> Sequence[int]:
        """Never called: captions are counted only for a tokenizer of another fingerprint."""
        raise NotImplementedError(f"{len(captions)} captions to count, and only the index's own lengths are known")
