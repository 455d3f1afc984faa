"""Streams: a loader over an index that grows. Its tars have no index, and are indexed in memory as it reaches them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from mmdata.config import DataConfig
from mmdata.config.data import sources
from mmdata.errors import ConfigError, DataError, counted, explain, sample_name
from mmdata.index import Index
from mmdata.launcher import Ranks, resolve_ranks
from mmdata.loader.builder import BatchBuilder
from mmdata.loader.corpus import Corpus, most_of_windows
from mmdata.loader.growing.plan import Reading, StreamPlan, TarWindow
from mmdata.loader.growing.tars import GrowingIndex, SampleTars, TarFiles, TarIndexer, TarSource
from mmdata.loader.identity import Identity
from mmdata.loader.ledger import Ledger, LedgerEntry
from mmdata.loader.loader import Loader, data_config
from mmdata.loader.position import check_count
from mmdata.loader.source import RankPipeline, make_source
from mmdata.loader.unfinished import LoadedBatch
from mmdata.loader.workers.threads import ThreadedBatches
from mmdata.plan import CaptionSources, rank_slice
from mmdata.plan.captions import NoTexts, ShardCaptions
from mmdata.plan.choose import bucket_policy
from mmdata.plan.rows import MAX_EPOCH
from mmdata.safe_read import check_regular, path_of_url
from mmdata.storage.urls import display_name
from mmdata.tables.joined import Joined
from mmdata.tars import foreign
from mmdata.text.tokenizer import load_tokenizer

logger = logging.getLogger("mmdata")

PLACES = ("pass", "step_of_pass", "first_pass", "first_step_of_pass")
"""Entries of a state: where its position lies, and where its epoch began."""

OF_AN_INDEX = ("groups", "join", "caption_hash", "order", "row_weights", "negative_captions", "num_lanes")
"""Settings of `data` that need the rows of an index."""

SAME_SAMPLES = (
    "resume with the settings it was saved with, and an iterable that gives the same samples in the same order (seed "
    "its shuffles)"
)
"""What to do about a state that does not fit a stream of an iterable."""

ShardNames = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a URL (also `file:`), a folder of tars, a brace pattern such as "x-{0000..0331}.tar", or a list of these."""


def stream(
    shards: ShardNames | Iterable[Any] | None,
    config: str | os.PathLike[str] | dict[str, Any] | DataConfig,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    steps_per_epoch: int | None = None,
) -> Stream:
    """The batches of one rank from shards without an index, or from an iterable of WebDataset samples.

    The first shards are read here, to choose the shapes of batches. docs/load.md compares a stream with
    `mmdata.Loader`, which reads an index.

    Args:
        shards: a path, a URL, a folder, a brace pattern, or a list of these, of plain tars. None: `data.shards` of the
            settings. Or an iterable of samples, such as a `webdataset.WebDataset` or a `webdataset.DataPipeline`:
            dictionaries with `__key__` and bytes by extension, in any order, with one iteration a pass.
        config: see `Loader.from_config`; a dictionary needs no `shards` if the argument `shards` is given.
        rank: 0 … world_size-1. Without rank and world_size both come from the launcher, as in `Loader.from_config`.
        world_size: processes that share each global batch. Each gives an iterable with samples of its own.
        steps_per_epoch: batches of an epoch, the same on every rank; a pass may go on in the next epoch. None: an epoch
            is one pass. Needed for `len`, for an endless iterable, and for an iterable on several ranks.

    Raises:
        ConfigError: a setting is unknown, missing or out of range, `pipe:` in a shard's name, several ranks with an
            iterable and without steps_per_epoch, or a setting that needs an index of all rows.
        DataError: a shard of the first ones cannot be read, or the shards have no sample.
        ValueError: world_size does not divide the global batch size.

    Example:
        for batch in mmdata.stream("https://host/cc3m-{0000..0331}.tar", "configs/x.yaml"):
            step(batch)
    """
    samples: Any = None
    if not isinstance(shards, (str, os.PathLike, list, tuple, NoneType)):
        samples, shards = shards, "iterable"
    if isinstance(config, dict) and shards is not None:
        config = with_shards(config, shards)
    data, ranks = data_config(config), resolve_ranks(rank, world_size)
    _refuse_planned(data)
    if samples is not None and data.loading.num_processes not in ("auto", 0):
        raise ConfigError(
            "stream: another process cannot iterate over an iterable of this one; leave out "
            "data.loading.num_processes, or give the names of the shards"
        )
    if steps_per_epoch is not None and (type(steps_per_epoch) is not int or steps_per_epoch < 1):
        raise ConfigError(f"stream: steps_per_epoch must be a whole number from 1 on: got {steps_per_epoch!r}")
    # Raises now, and not after a download, if the numbers do not fit.
    rank_slice(data.global_batch_size, *ranks)
    if samples is None:
        if shards is None and len(datasets := sources(data)) > 1:
            raise ConfigError(
                f"data.shards names {len(datasets)} datasets, and a stream mixes none: use one mmdata.Loader over "
                "indexed shards, or give the stream its shards in one list"
            )
        found = find_shards(sources(data)[0].shards if shards is None else shards)
        return Stream(TarFiles(found, data), data, ranks, steps_per_epoch=steps_per_epoch)
    stages = getattr(samples, "pipeline", [])  # of a webdataset
    if steps_per_epoch is None and any(type(stage).__name__ == "ResampledShards" for stage in stages):
        raise ConfigError(
            "stream: the webdataset draws its shards again and again (resampled), and has no end: give steps_per_epoch"
        )
    if ranks.world_size > 1 and steps_per_epoch is None:
        raise ConfigError(
            f"stream: world_size is {ranks.world_size}, and ranks whose iterables give different numbers of samples "
            "would wait for each other without end: give steps_per_epoch, the same on all ranks"
        )
    data = data.model_copy(update={"global_batch_size": data.global_batch_size // ranks.world_size})
    return Stream(SampleTars(samples, data), data, ranks, steps_per_epoch=steps_per_epoch)


def open_stream(source: TarSource, data: DataConfig) -> tuple[StreamPlan, BatchBuilder]:
    """The plan of a stream, and what makes its batches; reads the first window.

    Raises:
        DataError: a shard of the first ones cannot be read, or the shards have no sample.
    """
    tokenizer = load_tokenizer(data)
    tars = TarIndexer(source, data, tokenizer)
    reading = Reading(tars, data, 0)
    first = reading.first
    rows = int((first.ranges.ends - first.ranges.begins).sum())
    if not rows:
        raise _no_sample(source, first)
    index = GrowingIndex(tars, first.tars)
    captions = CaptionSources.in_turn(NoTexts(index) if tokenizer is None else ShardCaptions(index, "index"))
    boxes = None if tars.boxes is None else np.concatenate([tar.boxes for tar in first.tars])
    plan = StreamPlan(data, index, captions, bucket_policy(data, index, captions, boxes=boxes), reading)
    builder = BatchBuilder.from_config(data, Corpus(index, tokenizer, Joined([], index)), plan)
    # One more: a window ends with the tar that completes it.
    of_window = len(first.tars) * source.window_rows // rows + 1
    builder.store.open_shards.most = most_of_windows(data, of_window, source.num_tars)
    tars.open_shards = builder.store.open_shards
    return plan, builder


def open_pipeline(shards: list[str], settings: dict[str, Any], ranks: Ranks) -> RankPipeline:
    """Open the pipeline of a stream, whose settings are JSON, in a worker process."""
    data = DataConfig.model_validate(settings)
    return RankPipeline(*open_stream(TarFiles(shards, data), data), ranks)


class Stream(Loader):
    """The batches of one rank, pass after pass; a pass reads every tar once. Made by `stream`.

    Iterating gives the current epoch; at its end the next epoch begins, also without `set_epoch`. Every usable sample
    of a pass is in one batch, and every other one in the ledger.

    Args:
        source: of the tars.
        data: settings.
        ranks: which share of each global batch; of an iterable, each rank makes batches of its own samples.
        steps_per_epoch: see `stream`.

    Attributes:
        ledger: the samples that could not be used: masked in their batch, or, with row -1, left out before batching.
        stats: sums over the batches yielded.
    """

    _kind = "stream"
    _how_to_skip = (
        "to skip the first 3 batches of an epoch, take them (`for _ in itertools.islice(stream, 3)`) and call "
        "stream.load_state_dict(stream.state_dict()). A stream need not go through Accelerator.prepare: its batches "
        "are already those of this rank"
    )
    _how_to_look = ""
    _how_to_make = "mmdata.stream(shards, config, rank=rank, world_size=world_size, steps_per_epoch=steps)"

    def __init__(
        self, source: TarSource, data: DataConfig, ranks: Ranks, *, steps_per_epoch: int | None = None
    ) -> None:
        plan, builder = open_stream(source, data)
        # Each rank makes batches of its own of an iterable.
        pipeline = RankPipeline(plan, builder, of_plan := ranks if source.is_lasting else Ranks(0, 1))
        opened = None
        if isinstance(source, TarFiles):
            opened = partial(open_pipeline, source.shards, data.model_dump(mode="json"), ranks)
        super().__init__(
            plan,
            builder,
            **of_plan._asdict(),
            source=make_source(data, pipeline, opened),
            max_bad_share=data.loading.max_bad_share,
        )
        if not isinstance(self._source, ThreadedBatches):
            plan.stop()  # worker processes read the tars themselves
        self.rank, self.world_size = ranks
        commands = ["verify"] if source.is_lasting else []
        self.ledger = Ledger(data.loading.max_bad_share, ranks, commands=commands)
        if not source.is_lasting:
            self._remedy = SAME_SAMPLES
        self._is_lasting, self._plan = source.is_lasting, plan
        self._steps = steps_per_epoch
        self._found_steps: dict[int, int] = {}  # of epochs that are passes
        # The pass, and the step of it, with which epochs begin, and with which the newest batches go on.
        self._places: dict[tuple[int, int], tuple[int, int]] = {(0, 0): (0, 0)}

    def __bool__(self) -> bool:
        """True; without this, `if stream:` would ask for the length."""
        return True

    @property
    def index(self) -> Index:
        """There is none: raises AttributeError, so that frameworks do without it."""
        raise AttributeError("a stream has no index of all rows; `mmdata index` makes one, for mmdata.Loader")

    @property
    def num_rows(self) -> int:
        """Not known: raises AttributeError, so that frameworks do without it."""
        raise AttributeError("a stream has not counted its rows; `mmdata index` counts them, for mmdata.Loader")

    def num_steps(self, epoch: int) -> int:
        """Batches of an epoch: `steps_per_epoch`; raises TypeError without it."""
        return self.plan.num_steps(epoch) if self._steps is None else self._steps

    @cached_property
    def identity(self) -> Identity:
        """What the batches depend on. A state fits streams of the same identity; folders and hosts may change."""
        return {**super().identity, "steps_per_epoch": self._steps}

    def state_dict(self) -> dict[str, Any]:
        """The position, counted in batches yielded, and what the batches depend on; JSON. It fits any number of ranks.

        A stream that loads it indexes the tars of the pass before the position again, and decodes no image of them.
        Of an iterable it fits as many ranks, each of which needs a state of its own only where they leave off apart;
        the iterable must give the samples of the pass again, in the same order.
        """
        epoch, step = self._position.epoch, self._position.step
        places = *self._place(epoch, step), *self._place(epoch, 0)
        return {**super().state_dict(), **dict(zip(PLACES, places, strict=True))}

    def other_shards(self, state: dict[str, Any]) -> str:
        """ "": `load_state_dict` says what differs."""
        return ""

    def close(self) -> None:
        """End the workers and the reading. An iteration under way ends; iterating again begins its epoch anew."""
        self._position.overtake("close")
        self._stop()
        super().close()

    def _stop(self) -> None:
        self._plan.stop()  # first: a worker may be waiting for the window that is being read
        super()._stop()
        self._plan.stop()  # a worker may have begun the next pass meanwhile

    def _known_steps(self, epoch: int) -> int | None:
        return self._found_steps.get(epoch) if self._steps is None else self._steps

    def _normal(self, epoch: int, step: int) -> tuple[int, int]:
        """A position; that at the end of an epoch is the start of the next one."""
        return (epoch + 1, 0) if step == self._known_steps(epoch) else (epoch, step)

    def _place(self, epoch: int, step: int) -> tuple[int, int]:
        """The pass of a position, and the step in the pass."""
        position = self._normal(epoch, step)
        if position not in self._places:
            if self._steps is not None:
                logger.warning(
                    "stream: epoch %d begins with pass %d from its start, because this stream has not given the epoch "
                    "before it: some samples come twice, others later; `load_state_dict` goes on exactly",
                    epoch,
                    epoch,
                )
            self._places[position] = position
        return self._places[position]

    def _restore_places(self, state: dict[str, Any], epoch: int, step: int) -> None:
        most = {name: None if "step" in name else MAX_EPOCH for name in PLACES}
        values = [check_count(state, name, of="stream", at_most=most[name]) for name in PLACES]
        number, place_step, first, first_step = values
        if self._steps is None and number == epoch and place_step != step:
            raise ConfigError(
                f"stream state: 'step' is {step} and 'step_of_pass' {place_step}: they are equal; {self._how_to_skip}"
            )
        if self._steps is None and number > epoch:  # it was taken at the end of an epoch
            self._found_steps[epoch] = step
        self._places = {(epoch, 0): (first, first_step), self._normal(epoch, step): (number, place_step)}
        if not self._is_lasting and place_step:
            logger.warning(
                "stream: the samples of the first %d batches of the iterable are read again and dropped: it must give "
                "them in the same order",
                place_step,
            )

    def _masked(self, epoch: int, step: int, made: LoadedBatch) -> list[LedgerEntry]:
        """The rows of a batch that could not be used, and the samples that were left out since the batch before."""
        mark = made.mark
        assert mark is not None
        if mark["is_last"] and self._steps is None:
            self._found_steps[epoch] = step + 1
        number, place_step = self._place(epoch, step)
        after = (number + 1, 0) if mark["is_last"] else (number, place_step + 1)
        self._places[self._normal(epoch, step + 1)] = after
        if step > 1:
            self._places.pop((epoch, step - 1), None)
        self.stats.wall_s["read"] += mark["waited_s"]
        self.stats.masked += len(mark["left_out"])
        left_out = [LedgerEntry(epoch, step, -1, stage="read", **line) for line in mark["left_out"]]
        return left_out + [replace(entry, epoch=epoch, step=step) for entry in made.masked]


def _no_sample(source: TarSource, window: TarWindow) -> DataError:
    left_out = [line for tar in window.tars for line in tar.left_out]
    where = source.in_words
    if left_out:
        line = left_out[0]
        first = f"{sample_name(line['shard'], line['key'])}: {line['reason']} ({line['detail']})"
        return DataError(f"stream: none of {counted(len(left_out), 'sample')} of {where} can be used: {first}")
    if source.is_lasting:
        where = f"any of {where}; the first is '{source.name(0)}'"
    return DataError(f"stream: no sample in {where}")


def _refuse_planned(data: DataConfig) -> None:
    """Raise a ConfigError if a setting needs the rows of an index."""
    defaults = {name: DataConfig.model_fields[name].get_default(call_default_factory=True) for name in OF_AN_INDEX}
    settings = {name: getattr(data, name) != default for name, default in defaults.items()} | {
        "select by a .npy file": (data.select or "").lower().endswith(".npy"),
        "leftover: drop": data.leftover == "drop",
        "captions: every": data.captions == "every",
        "captions of several sources": not isinstance(data.captions, str),
    }
    if planned := [name for name, given in settings.items() if given]:
        raise ConfigError(
            f"data: a stream has no index of all rows, and cannot do {', '.join(planned)}; leave that out, or make an "
            "index (`mmdata index`) and use mmdata.Loader"
        )


def find_shards(shards: ShardNames) -> list[str]:
    """The paths and URLs of the shards, in the order of the list; the shards of a folder are sorted by name.

    Raises:
        ConfigError: a name with `pipe:`, braces that do not close, or a pattern of more than `MAX_SHARDS` shards.
        DataError: a local file does not exist or is not a regular file, a folder has no shard, or the list is empty.
    """
    given = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    found = [path_of_url(name) or name for one in given for name in _expand(os.fspath(one))]
    if not found:
        raise DataError("stream: an empty list of shards")
    if piped := [name for name in found if "pipe:" in name]:
        raise ConfigError(
            f"shard '{display_name(piped[0])}': pipe: would run a command, and nothing in data may; give a path or a "
            "URL (http, https, s3, gs, hf and others that fsspec opens)"
        )
    for name in found:
        if "://" not in name:
            try:
                check_regular(name, "shard")
            except OSError as error:
                star = "; a * stands for no other names here: give the folder, or glob.glob(…)" if "*" in name else ""
                raise DataError(f"shard {explain(error)}{star}") from error
    return found


def with_shards(config: dict[str, Any], shards: ShardNames) -> dict[str, Any]:
    """The settings as a dictionary, with `data.shards` filled in if it is missing, because the section requires it."""
    if "data" in config:
        return {**config, "data": {"shards": str(shards), **config["data"]}}
    return {"shards": str(shards), **config}


def _expand(name: str) -> list[str]:
    folder = path_of_url(name) or name
    if os.path.isdir(folder):
        return [str(path) for path in foreign.find_shards(Path(folder))]
    return foreign.expand_braces(name)
