"""The loader in the Hugging Face Trainer. The Trainer uses its batches unchanged and does not shard them again.

`train(resume_from_checkpoint=True)` continues with the next batch, and reads no earlier one.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from functools import reduce
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import gather_object, recursively_apply, send_to_device
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import EvalLoopOutput

from mmdata.batch import Batch, normalized, valid_inputs
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError, DataError
from mmdata.integrations.adapt import check_launched, judged_together, pixel_stats
from mmdata.loader import Loader
from mmdata.loader.loader import data_config
from mmdata.loader.stream import Stream
from mmdata.plan import Plan, Step
from mmdata.plan.weights import WeightedPlan
from mmdata.train.models.expected_inputs import fitted, inputs_of

if TYPE_CHECKING:
    import datasets

IGNORED = -100
"""Label that the losses of transformers leave out."""
EMPTY = "has_no_rows"
"""Entry of inputs whose one row stands for none, since every rank must take part in a step."""


class _Batches(Dataset[dict[str, Any]]):
    """A loader as the dataset and the batch sampler of a DataLoader: step n of an epoch is the index of its batch n.

    At a resume the Trainer has accelerate leave out the first steps of the sampler. The first step that is asked for
    moves the loader.
    """

    def __init__(self, loader: Loader, *, repeat: bool, extra: dict[str, Any]) -> None:
        self.loader = loader
        self._repeat = repeat  # the first epoch each time
        self._extra = extra
        self._batches: Iterator[Batch] = iter(())
        self._next = 0  # the step of the batch that `_batches` gives next

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the Trainer calls it at the start of each epoch."""
        self.loader.set_epoch(0 if self._repeat else epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """The steps of an epoch, each as the list that a batch sampler gives."""
        for step in range(len(self)):
            yield [step]
        next(self._batches, None)  # the loader ends the epoch: it checks its bad rows

    def __getitem__(self, step: int) -> dict[str, Any]:
        """The model inputs of a step."""
        if step == 0 or step != self._next:
            if step:
                self.loader.load_state_dict({**self.loader.state_dict(), "step": step})
            self._batches = judged_together(self.loader)
        self._next = step + 1
        batch = next(self._batches)
        inputs = valid_inputs(batch)
        if "labels" in inputs:  # -1 where a row has none
            inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] < 0, IGNORED)
        stands_for_none = {} if batch["valid"].any() else {EMPTY: True}
        return inputs | self._extra | stands_for_none


class _ValShards(IterableDataset[Any]):
    """Stands for `data.val`, as `eval_dataset`: before training, the Trainer checks that it has an evaluation set."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("get_eval_dataloader makes the batches")


class LoaderTrainer(Trainer):
    """A Trainer that trains on `data.shards` and, with `eval_strategy`, evaluates on `data.val`.

    `data.image_size` and `data.max_length` are the model's where they are not set. The model gets only valid rows;
    pixels are normalised on the device. A row without a label has the label -100, which the losses of transformers
    leave out. `args.per_device_train_batch_size` is set from `data.global_batch_size`, so
    that the Trainer's figures are right. With `gradient_accumulation_steps` an update's loss and gradient are the means
    over its batches.

    Args:
        config: a YAML file or a dictionary with the section `data`, or that section.
        others: arguments of `transformers.Trainer`, except its datasets and collator. Mean and deviation of pixels are
            those of the image processor that is given as `processing_class` or lies in the model's folder, or else
            those of its kind.

    Raises:
        ConfigError: an evaluation is asked for without `data.val`; or a launcher has started several processes and the
            Trainer does not know of them.
        DataError: an evaluation is asked for, and `data.val` cannot be read.
        ValueError: a dataset or collator is given; or nothing tells mean and deviation of pixels.

    Example:
        trainer = LoaderTrainer("configs/scenes.yaml", model=model, args=TrainingArguments(num_train_epochs=3))
        trainer.train()
    """

    def __init__(self, config: str | os.PathLike[str] | dict[str, Any] | DataConfig, **others: Any) -> None:
        self.data = data_config(config)
        for name in ("train_dataset", "data_collator", "eval_dataset"):
            if others.pop(name, None) is not None:
                raise ValueError(f"a LoaderTrainer makes its batches from data.shards and data.val: leave {name} out")
        args = others["args"] = others.get("args") or TrainingArguments("tmp_trainer")
        asks_for_evaluation = args.eval_strategy != "no" or args.eval_on_start
        if asks_for_evaluation and not self.data.val:
            raise ConfigError(
                "eval_strategy or eval_on_start asks for evaluations, and data.val is not set: there is nothing to "
                "evaluate on; set data.val, or ask for none"
            )
        args.per_device_train_batch_size = self.data.global_batch_size // args.world_size
        super().__init__(**others, eval_dataset=_ValShards() if self.data.val else None)
        check_launched(
            args.world_size,
            trainer="the Hugging Face Trainer",
            remedy="on CPUs give TrainingArguments(use_cpu=True), or start one process with python",
        )
        # If batches have labels, the Trainer counts them and expects the model to divide its loss by their number over
        # all batches of an update and all ranks; it does not divide by the number of batches then. These labels are
        # labels of rows, and a contrastive loss is a mean over one batch: loss and gradient would be too large by the
        # number of batches.
        self.model_accepts_loss_kwargs = False
        self.can_return_loss = True  # compute a loss in evaluations too, even if forward has no argument return_loss
        expected = inputs_of(self.model, self.processing_class)
        self._pixel_stats = pixel_stats(self.model, self.processing_class)
        size, length = expected.image_size, expected.max_length
        self.data = fitted(self.data, image_size=size, max_length=length, origin="the model")
        assert self.model is not None  # Trainer has refused to be made without one
        asks = "return_loss" in inspect.signature(self.model.forward).parameters
        self._extra = {"return_loss": True} if asks else {}
        self._evaluation: DataLoader[Any] | None = None
        if asks_for_evaluation:
            self.get_eval_dataloader()  # raises for wrong settings now, not after an epoch

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's batches."""
        return self._batches(self.data, repeat=False)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """This rank's batches of `data.val`, the same each time."""
        if eval_dataset is not None and not isinstance(eval_dataset, _ValShards):
            raise ValueError("a LoaderTrainer evaluates and predicts on data.val: set it, and give no other data set")
        if self._evaluation is None:
            self._evaluation = self._batches(evaluation_data(self.data), repeat=True)
            # The Trainer computes a loss only if the batches have all of `label_names`.
            has_labels = self._evaluation.dataset.loader.index.has_labels  # type: ignore[attr-defined]  # `_Batches`
            self.label_names = [name for name in self.label_names if name == "labels" and has_labels]
        return self._evaluation

    def get_test_dataloader(self, test_dataset: Any = None) -> DataLoader[Any]:
        """The batches of `get_eval_dataloader`: `predict(None)` predicts the rows of `data.val` that can be loaded."""
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(self, dataloader: DataLoader[Any], *positional: Any, **named: Any) -> EvalLoopOutput:
        """See `transformers.Trainer.evaluation_loop`; ranks may have different numbers of rows in a batch.

        The number of samples is corrected, as the Trainer counts batches.
        """
        self.gather_function = self._gather_rows
        output = super().evaluation_loop(dataloader, *positional, **named)
        return output._replace(num_samples=self.num_examples(dataloader))

    def prediction_step(self, model: Any, inputs: dict[str, Any], *positional: Any, **named: Any) -> Any:
        """See `transformers.Trainer.prediction_step`; a row that stands for none gives no prediction."""
        loss, logits, labels = super().prediction_step(model, inputs, *positional, **named)
        if EMPTY in inputs:
            logits, labels = (recursively_apply(_none_of, found) for found in (logits, labels))
        return loss, logits, labels

    def _gather_rows(self, found: Any) -> Any:
        """The rows of all ranks, whose numbers may differ, in the order of the ranks."""
        return reduce(nested_concat, gather_object([send_to_device(found, "cpu")]))

    def num_examples(self, dataloader: Any) -> int:
        """Rows of an epoch as they are trained: where rows come several times or not at all, those of its batches."""
        plan = dataloader.dataset.loader.plan
        if _gives_each_row_once(plan):
            return plan.num_rows
        return sum(steps * rows for steps, rows in zip(plan.steps_of_buckets(0), plan.batch_sizes, strict=True))

    def compute_loss(self, model: Any, inputs: dict[str, Any], *positional: Any, **named: Any) -> Any:
        """See `transformers.Trainer.compute_loss`; the loss of a batch without any label is 0, not the mean of none."""
        labels = inputs.get("labels")  # now: the Trainer may take them out of the inputs
        result = super().compute_loss(model, inputs, *positional, **named)
        if labels is None:
            return result
        loss, outputs = result if isinstance(result, tuple) else (result, None)
        loss = loss.where((labels != IGNORED).any() | loss.isfinite(), 0.0)
        return (loss, outputs) if isinstance(result, tuple) else loss

    def _batches(self, data: DataConfig, *, repeat: bool) -> DataLoader[Any]:
        loader = Loader.from_config(data, rank=self.args.process_index, world_size=self.args.world_size)
        batches = _Batches(loader, repeat=repeat, extra=self._extra)
        # accelerate's class for a DataLoader that is sharded already: it moves batches to the device.
        shard = DataLoaderShard(batches, device=self.args.device, batch_sampler=batches, collate_fn=itemgetter(0))
        return cast("DataLoader[Any]", shard)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared = super()._prepare_inputs({name: value for name, value in inputs.items() if name != EMPTY})
        return {**prepared, "pixel_values": normalized(prepared["pixel_values"], *self._pixel_stats)}


def _none_of(values: Tensor) -> Tensor:
    return values[:0]


def _gives_each_row_once(plan: Plan) -> bool:
    return not isinstance(plan, WeightedPlan) and all(
        span.weight is None and span.repeat == 1 for span in plan.mixture.spans
    )


def as_dataset(loader: Loader, *, row: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> datasets.Dataset:
    """The rows of a loader as a `datasets.Dataset`, for trainers that batch rows themselves.

    sentence-transformers and TRL are such trainers. Their sampler chooses the rows, their collator makes the batches,
    and they resume without reading earlier rows. A row is decoded when it is asked for: set `dataloader_num_workers`.

    Args:
        loader: its rows, image shape, transform and captions are used, in its epoch (`loader.set_epoch`); its batches,
            order and ranks are not.
        row: changes a row, such as into TRL's `{"images": …, "messages": …}`. Workers that are not forked import it.

    Returns:
        Rows `{"image": PIL.Image, "text": str}`, or `{"image": …, "label": int}` without `data.tokenizer`. A row that
        cannot be used is left out of its batch, and is in `loader.ledger`; of a worker process, in the worker's own.

    Raises:
        ConfigError: the images of the loader have several shapes, or are patches; or its rows have weights, repeats or
            fields.
        DataError: now or while rows are read: none of those asked for can be used, or too many could not.
        ImportError: `datasets` is not installed.
        TypeError: a stream.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError("as_dataset needs datasets: pip install datasets") from error
    if isinstance(loader, Stream):
        raise TypeError("as_dataset needs the numbers of all rows, and a stream has no index: run `mmdata index`")
    plan, buckets = loader.plan, loader.plan.policy.buckets
    shapes = {bucket.image for bucket in buckets}
    if len(shapes) > 1 or buckets[0].patches:
        raise ConfigError(
            f"as_dataset gives images of one shape, and this loader's are of {', '.join(sorted(shapes))}: leave "
            "data.image_buckets and data.image_patches out"
        )
    spec = loader.builder.spec
    if not _gives_each_row_once(plan) or spec.fields is not None or spec.targets is not None:
        raise ConfigError(
            "as_dataset gives each row once, with its image and its text or label: leave data.row_weights, "
            "data.captions every, weight and repeat of data.shards, data.fields and data.targets out"
        )
    rows = np.concatenate([*plan.rows.planned()])
    read = _RowReader(loader, row)
    names = read({"": rows[:8].tolist()})  # several, since one may be unusable
    return datasets.Dataset.from_dict(dict.fromkeys(names, rows)).with_transform(read)


class _RowReader:
    """Reads the rows of a loader by their numbers. In another process it makes a loader of the same settings."""

    def __init__(self, loader: Loader, row: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._loader, self._row = loader, row

    def __call__(self, asked: dict[str, list[int]]) -> dict[str, list[Any]]:
        loader, numbers = self._loader, np.array(next(iter(asked.values())))
        epoch = loader.state_dict()["epoch"]
        bucket = max(loader.plan.policy.buckets, key=lambda found: found.length)
        made = loader.builder.make(Step(epoch, 0, bucket, numbers, np.full_like(numbers, epoch)))
        loader.ledger.add(made.masked, len(numbers))
        rows = zip(_rows(made.batch), made.batch["valid"], strict=True)
        found = [self._row(values) for values, valid in rows if valid]
        if not found:
            last = loader.ledger[-1]
            raise DataError(
                f"none of the rows {numbers.tolist()} could be used; the last: {last.sample}, {last.reason} "
                f"({last.detail}); a larger batch has others beside them"
            )
        return {name: [values[name] for values in found] for name in found[0]}

    def __deepcopy__(self, memo: object) -> _RowReader:
        """Itself: a copy of the dataset has the epoch and the ledger of the same loader."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        loader = self._loader  # without settings it refuses to be pickled
        return _row_reader_of, (loader.settings or loader, loader.state_dict()["epoch"], self._row)


def _row_reader_of(settings: dict[str, Any], epoch: int, row: Callable[[dict[str, Any]], dict[str, Any]]) -> _RowReader:
    data = settings["config"].with_loading(num_processes=0)
    loader = Loader.from_config(**{**settings, "config": data}, rank=0, world_size=1)
    loader.set_epoch(epoch)
    return _RowReader(loader, row)


def _rows(batch: Batch) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {"image": list(map(Image.fromarray, batch["pixel_values"].movedim(1, 3).numpy()))}
    if "captions" in batch:
        columns["text"] = batch["captions"]
    elif "labels" in batch:
        columns["label"] = batch["labels"].tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
