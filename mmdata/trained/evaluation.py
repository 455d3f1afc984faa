"""Evaluate a model on shards, in training and after it; under torchrun the ranks share rows and prompts."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from mmdata.batch import Batch
from mmdata.config import Config
from mmdata.config.corpus import CorpusConfig, ValConfig, val_in_words
from mmdata.config.data import DataConfig, evaluation_data
from mmdata.config.strict_yaml import parse, with_overrides
from mmdata.config.train import TrainConfig
from mmdata.errors import ConfigError, DataError, TrainingError, counted, excerpt
from mmdata.index import Index
from mmdata.loader import Loader
from mmdata.loader.corpus import open_index
from mmdata.text.tokenizer import Tokenizer
from mmdata.train.evaluation.embedding import embed, embed_texts
from mmdata.train.evaluation.evaluate import score_retrieval, zero_shot
from mmdata.train.evaluation.grounding import grounding_scores
from mmdata.train.evaluation.prompts import CLASSES_EXAMPLE, Classes, read_classes
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather
from mmdata.trained.run import TrainedRun, tokenized

logger = logging.getLogger("mmdata")


@contextmanager
def of_evaluation(data: DataConfig) -> Generator[None]:
    """Say in errors about data that the rows are not those of the training.

    Args:
        data: of the run; its `val` names the rows.
    """
    try:
        yield
    except (DataError, TrainingError) as error:  # the latter if the rows of another rank are at fault
        kind = DataError if isinstance(error, DataError) else TrainingError
        raise kind(f"rows to evaluate on, of {val_in_words(data)}: {error}") from error


def with_settings(trained: TrainedRun, overrides: list[str]) -> TrainedRun:
    """The run with other settings of how its images are decoded and loaded; all others are those it was trained with.

    Args:
        trained: the model.
        overrides: "data.decode=exact", "data.loading.num_workers=2".

    Raises:
        ConfigError: another setting, or a value that it does not take.
    """
    for override in overrides:
        name = override.partition("=")[0]
        if name != "data.decode" and not name.startswith("data.loading."):
            raise ConfigError(
                f"'{override}': an evaluation has the settings of its run; data.decode and those of data.loading can "
                "be given, and the rows by --shards, --select and --pairs"
            )
    origin = f"settings of the run '{trained.checkpoint}'"
    settings = with_overrides(trained.config.model_dump(mode="json"), overrides)
    return replace(trained, config=parse(Config, settings, origin=origin, overrides=overrides))


def ledger_of(out: Path, rank: int | str) -> Path:
    """The file beside the scores `out` that lists the rows of a rank that could not be loaded."""
    return out.with_name(f"{out.stem}-ledger-rank{rank}.jsonl")


@dataclass(frozen=True)
class Evaluation:
    """Rows to evaluate a model on, and the classes that their labels mean.

    Attributes:
        data: settings of the run; its `val` names the rows.
        loader: this rank's rows.
        classes: by label; None: no zero-shot accuracy.
        prompts: of the classes, as `embed_texts` takes them.
        lengths: of features whose retrieval is scored too (`train.matryoshka`).
    """

    data: DataConfig
    loader: Loader
    classes: Classes | None
    prompts: list[Tensor]
    lengths: Sequence[int]

    @classmethod
    def of(
        cls,
        data: DataConfig,
        tokenizer: Tokenizer,
        classes: Classes | None,
        *,
        setting: str = "--classes",
        train: TrainConfig | None = None,
    ) -> Evaluation:
        """Check what there is to evaluate.

        Shards of labels only have no captions to retrieve: zero-shot accuracy alone.

        Args:
            data: settings of the run.
            tokenizer: of the run.
            classes: in any order that `_by_label` takes; None: no zero-shot accuracy.
            setting: what names the classes, for messages.
            train: how the run was trained; boxes are loaded only if that was with regions.

        Raises:
            ConfigError: shards of labels only, and no classes.
            DataError: the shards have no labels for the classes.
        """
        ranks, named, data = collectives.world_size(), data, evaluation_data(data)
        if isinstance(data.captions, str) and not open_index(data).has_captions:  # nor has a table any
            if classes is None:
                raise ConfigError(
                    f"shards '{data.shards}' have labels and no captions, so there is nothing to retrieve: give "
                    f"{setting} FILE for zero-shot accuracy, the run's classes.json or JSON such as {CLASSES_EXAMPLE}"
                )
            data = data.model_copy(update={"tokenizer": None, "text_buckets": 8, "targets": None})
        # The ranks share each batch, so its rows are a multiple of their number; that changes no row's features.
        data = data.model_copy(update={"global_batch_size": -(-data.global_batch_size // ranks) * ranks})
        if train is None or train.regions is None:
            data = data.model_copy(update={"targets": None})
        loader = Loader.from_config(data, rank=collectives.rank(), world_size=ranks)
        if classes is not None:
            classes = _by_label(classes, loader.index, data, setting)
        prompts = [] if classes is None else list(tokenized(classes.prompts, tokenizer))
        lengths = (train.matryoshka if train else None) or ()
        return cls(named, loader, classes, prompts, lengths)

    def scores(
        self, model: nn.Module, batches: Iterable[Batch], *, autocast_dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Retrieval in both directions; grounding of the phrases, and zero-shot accuracy, where there are such.

        A collective.

        Args:
            model: as for `embed`.
            batches: those of `loader`.
            autocast_dtype: of the towers.

        Raises:
            DataError: no row could be loaded.
        """
        with of_evaluation(self.data):
            features = embed(model, batches, source=self.loader, autocast_dtype=autocast_dtype)
            if not len(features.rows):
                raise DataError(f"none of the {self.loader.plan.num_rows:,} rows could be loaded")
        scores: dict[str, Any] = {"rows": len(features.rows)}
        if features.text is not None:
            scores = score_retrieval(features, share=True)
            for length in self.lengths:
                found = score_retrieval(features.first(length), share=True)
                scores |= {f"matryoshka_{length}_{name}": found[name] for name in found if "_to_" in name}
        if features.grounding is not None:
            scores |= grounding_scores(features.grounding)
        if self.classes is None:
            return scores
        assert features.labels is not None, "checked before"
        # Few rows of a corpus may have labels, and none of those be one to evaluate on: the retrieval scores are kept.
        if features.text is not None and not bool((features.labels >= 0).any()):
            if collectives.rank() == 0:
                rows = f"{len(features.rows):,}"
                logger.warning("none of the %s rows that were loaded has a label; zero-shot accuracy is left out", rows)
            return scores
        prompts = embed_texts(model, self.prompts, autocast_dtype=autocast_dtype)
        prompts = prompts.reshape(len(self.classes.classes), len(self.classes.templates), -1)
        return scores | zero_shot(features.image, features.labels, prompts)


def evaluate_shards(
    trained: TrainedRun, val: ValConfig | None = None, classes: Classes | None = None, *, out: Path | None = None
) -> dict[str, Any]:
    """`Evaluation.scores` of a trained model. A collective.

    Args:
        trained: the model.
        val: what to evaluate on; None: `data.val` of the run.
        classes: for zero-shot accuracy.
        out: file of the scores; the rows that could not be loaded are listed beside it (`ledger_of`).

    Raises:
        ConfigError, DataError: as `Evaluation`.
    """
    rank, data = collectives.rank(), trained.config.data
    if val is not None:
        data = data.model_copy(update={"val": val})
    evaluation = Evaluation.of(data, trained.tokenizer, classes, train=trained.config.train)
    loader = evaluation.loader
    if out is not None:
        loader.ledger.write_to(ledger_of(out, rank), epoch=0, step=0)
    if rank == 0 and data.val.share is not None and (others := loader.other_shards(dict(trained.position))):
        logger.warning(
            "%s. The run was trained on the former. A row is on the same side of data.val.share in both, unless its "
            "image file has changed, as by --resize: then the run may have been trained on it",
            others,
        )
    console = Console(stderr=True, quiet=rank > 0)
    batches = track(loader, "embedding", total=len(loader), console=console, disable=rank > 0)
    with trained.numerics():
        scores = evaluation.scores(trained.model, batches, autocast_dtype=trained.autocast_dtype)
    masked: dict[str, int] = loader.merge_states(gather(loader.state_dict(), collectives.cpu_group()))["rows_masked"]
    listed = "" if out is None else f", listed in {ledger_of(out, '*')}"
    for reason, count in masked.items():
        line = f"left out: {counted(count, 'row')} that could not be loaded ({reason}){listed}"
        console.print(line, soft_wrap=True)
    if evaluation.classes is not None and "zero_shot_top1" in scores:
        scores["templates"] = evaluation.classes.templates
    return {**scores, "rows_masked": masked}


def given_classes(data: DataConfig) -> Classes | None:
    """The classes that `data.val.classes` names; None if it names none.

    Raises:
        DataError: as `read_classes`, or the shards name no classes.
    """
    if data.val.classes is None:
        return None
    if data.val.classes != "shards":
        return read_classes(data.val.classes)
    if (classes := named_classes(data)) is None:
        raise DataError(f"the shards of {val_in_words(data)} do not name the classes of all labels: give a file")
    return classes


def named_classes(data: DataConfig) -> Classes | None:
    """The classes of labelled shards by the names in the shards; None if there are none.

    The prompts are made as the captions were, if `mmdata convert --caption-template` made these of the names; else each
    is a name alone. The run's own names may be numbered otherwise, so they serve only where they are given.

    Args:
        data: settings of a run; its `val` names the rows.
    """
    index = open_index(evaluation_data(data))
    names = index.class_names
    if not (names and index.has_labels and len(index)):
        return None
    # A label beyond the names would be an error in a file of classes; nobody has given one.
    if not 0 <= int(index.column("label").max()) < len(names):
        return None
    runs = [(manifest.accounts or {}).get("run") or {} for manifest in index.manifests]
    made = [run.get("settings", {}).get("caption_templates") or ["{}"] for run in runs]
    return Classes(classes=names, templates=made[0] if all(one == made[0] for one in made) else ["{}"])


def _by_label(classes: Classes, index: Index, data: CorpusConfig, setting: str) -> Classes:
    """The classes in the order of the labels, checked before anything is embedded.

    They are taken by name if all names in the shards are among them, and no two of those are alike. Else shards may
    name their classes otherwise than prompts do (n01440764, tench): a class for each, and a name that both have has the
    same number in both.

    Raises:
        DataError: there are no labels, or more than there are classes, or the shards have other classes.
    """
    if not index.has_labels:
        where = "--shards" if setting == "--classes" else "data.val.shards"
        raise DataError(
            f"{setting} needs labels, and shards '{data.shards}' have none: `mmdata convert` makes shards with labels "
            f"of a table with the columns filepath and label; give them with {where}"
        )
    names, known = index.class_names or [], len(classes.classes)
    given = {_plain(name): name for name in classes.classes}
    in_shards = [given.get(_plain(name)) for name in names]
    if names and None not in in_shards and len(set(in_shards)) == len(names):
        ordered = list(dict.fromkeys([*filter(None, in_shards), *classes.classes]))
        if ordered != classes.classes and collectives.rank() == 0:
            logger.warning(
                "shards '%s' number their classes otherwise than %s, which is taken by name", data.shards, setting
            )
        return Classes(classes=ordered, templates=classes.templates)
    both = zip(in_shards, classes.classes, strict=False)
    moved = any(name is not None and _plain(name) != _plain(own) for name, own in both)
    if names and (known != len(names) or moved):
        raise DataError(
            f"{setting} has {known} classes, and shards '{data.shards}' have {len(names)}, of other names or in "
            f"another order: list the classes in the order of the shards: {excerpt(', '.join(names))}"
        )
    if (highest := int(index.column("label").max())) >= known:
        raise DataError(
            f"{setting} has {known} classes, for the labels 0 to {known - 1}, and shards '{data.shards}' have labels "
            f"up to {highest}: list a class for each label"
        )
    return classes


def _plain(name: str) -> str:
    """The name of a class as prompts may have it: "Polar bear" for the folder polar_bear."""
    return name.replace("_", " ").casefold()
