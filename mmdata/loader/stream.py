"""Streams: a loader over an index that grows. Its tars have no index, and are indexed in memory as it reaches them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from mmdata.config import DataConfig
from mmdata.cores import most_workers
from mmdata.errors import ConfigError, DataError, Reason, counted
from mmdata.images.pillow import sample_name
from mmdata.index import Index
from mmdata.launcher import Ranks, resolve_ranks
from mmdata.loader.builder import BatchBuilder
from mmdata.loader.corpus import Corpus, most_of_windows
from mmdata.loader.fields import Fields
from mmdata.loader.identity import Identity, differences
from mmdata.loader.ledger import Ledger, LedgerEntry, RowCounts
from mmdata.loader.loader import Loader, data_config
from mmdata.loader.position import check_count, check_epoch, check_state
from mmdata.loader.sample_buffers import BUFFER_ROWS, SampleBuffers
from mmdata.loader.shard_names import ShardNames, find_shards, single_dataset, with_shards
from mmdata.loader.source import RankPipeline
from mmdata.loader.stream_plan import StreamPlan, StreamRows, TarWindow, read_windows
from mmdata.loader.stream_tars import GrowingIndex, TarFiles, TarIndexer, TarSource
from mmdata.loader.unfinished import LoadedBatch
from mmdata.loader.workers.interrupt_safe import Stop
from mmdata.loader.workers.threads import ThreadedBatches
from mmdata.plan import CaptionSources, rank_slice
from mmdata.plan.captions import NoTexts, ShardCaptions
from mmdata.plan.choose import bucket_policy
from mmdata.plan.ranges import MAX_EPOCH
from mmdata.tables.joined import Joined
from mmdata.tars.texts import Losses
from mmdata.text.tokenizer import load_tokenizer

logger = logging.getLogger("mmdata")

Place = tuple[int, int]
"""Pass, and step in the pass."""
PLACES = ("pass", "step_of_pass", "first_pass", "first_step_of_pass")
"""Entries of a state: where its position lies, and where its epoch began."""


def stream(
    shards: ShardNames | Iterable[Any] | None,
    config: str | os.PathLike[str] | dict[str, Any] | DataConfig,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    steps_per_epoch: int | None = None,
) -> Stream:
    """The batches of one rank from shards without an index, or from an iterable of WebDataset samples.

    The first shards are read here, to choose the shapes of batches. docs/stream.md compares a stream with
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
    names, samples = _told_apart(shards)
    if isinstance(config, dict) and shards is not None:
        config = with_shards(config, "iterable" if names is None else names)
    data, ranks = data_config(config), resolve_ranks(rank, world_size)
    _refuse_planned(data)
    if steps_per_epoch is not None and (type(steps_per_epoch) is not int or steps_per_epoch < 1):
        raise ConfigError(f"stream: steps_per_epoch must be a whole number from 1 on: got {steps_per_epoch!r}")
    # Raises now, and not after a download, if the numbers do not fit.
    rank_slice(data.global_batch_size, *ranks)
    if samples is None:
        found = find_shards(single_dataset(data) if names is None else names, may_lack=data.skip_damaged)
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
    num_buckets = data.num_text_buckets * max(data.num_image_buckets, len(data.image_patches or []))
    buffers = SampleBuffers(samples, max(BUFFER_ROWS, 2 * num_buckets * data.global_batch_size))
    return Stream(buffers, data, ranks, steps_per_epoch=steps_per_epoch)


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

    def __init__(
        self, source: TarSource, data: DataConfig, ranks: Ranks, *, steps_per_epoch: int | None = None
    ) -> None:
        tokenizer = load_tokenizer(data)
        tars = TarIndexer(source, data, tokenizer)
        stop = Stop()
        windows = read_windows(tars, data, 0, stop)
        first = next(windows)
        if not any(first.rows):
            raise _no_sample(source, first)
        index = GrowingIndex.of(tars, first.tars)
        captions = CaptionSources.in_turn(NoTexts(index) if tokenizer is None else ShardCaptions(index, "index"))
        policy = bucket_policy(data, index, captions)
        rows = StreamRows(index, first, captions)
        # A copy: the plan lets go of its windows.
        again = first._replace(tars=[*first.tars])
        plan = StreamPlan(data, tars, rows, policy, (_again(again, windows), stop))
        joined = Joined([], index)
        builder = BatchBuilder.from_config(data, Corpus(index, tokenizer, joined), plan)
        # One more: a window ends with the tar that completes it.
        of_window = len(first.tars) * source.window(data)[1] // sum(first.rows) + 1
        builder.store.open_shards.most = most_of_windows(data, of_window, source.num_tars)
        of_plan = ranks if source.is_lasting else Ranks(0, 1)
        source.drops.append(builder.store.open_shards.drop)
        if isinstance(source, SampleBuffers):
            source.drops.append(tars.forget)
        loading = data.loading
        super().__init__(
            plan,
            builder,
            **of_plan._asdict(),
            source=ThreadedBatches(
                RankPipeline(plan, builder, of_plan),
                num_threads=most_workers(loading.num_workers),
                prefetch=loading.prefetch_batches,
            ),
            fields=Fields(data.fields, joined, lambda: ()) if data.fields else None,
            max_bad_share=loading.max_bad_share,
        )
        self.rank, self.world_size = ranks
        self.ledger = Ledger(loading.max_bad_share, ranks)
        self._source_of_tars, self._plan = source, plan
        self._steps = steps_per_epoch
        self._found_steps: dict[int, int] = {}  # of epochs that are passes
        self._starts: dict[int, Place] = {0: (0, 0)}  # of epochs of steps_per_epoch
        self._at: dict[tuple[int, int], Place] = {}  # where the positions before and after the last batch lie
        self._losses = Losses()

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

    @property
    def lost(self) -> Counter[str]:
        """Losses so far: samples that lost a text member, by what was lost; and, as "damaged_shard", shards of which
        the rest could not be read (`data.skip_damaged`)."""
        shards = self.ledger.masked[Reason.DAMAGED_SHARD.value]
        return Counter(self._losses.as_dict()) + Counter(damaged_shard=shards)

    def num_steps(self, epoch: int) -> int:
        """Batches of an epoch: `steps_per_epoch`; raises TypeError without it."""
        return self.plan.num_steps(epoch) if self._steps is None else self._steps

    @cached_property
    def identity(self) -> Identity:
        """What the batches depend on. A state fits streams of the same identity; folders and hosts may change."""
        return {**super().identity, "steps_per_epoch": self._steps}

    def state_dict(self) -> dict[str, Any]:
        """The position, counted in batches yielded, and what the batches depend on; JSON. It fits any number of ranks.

        Of an iterable it fits as many ranks, each of which needs a state of its own only where they leave off apart.
        """
        epoch, step = self._position.epoch, self._position.step
        position = {"epoch": epoch, "step": step}
        places = dict(zip(PLACES, (*self._place(epoch, step), *self._start(epoch)), strict=True))
        return {**position, **self.ledger.counts.state(), **places, "stream": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch that was yielded when the state was taken.

        The number of ranks and workers may differ. The tars of the pass before that batch are indexed again, and no
        image of them is decoded. An iterable must give the samples of the pass again, in the same order.

        Raises:
            ConfigError: the state belongs to another stream, and the error names what differs, or to no stream.
        """
        saved = check_state(state, of="stream").get("stream")
        if not isinstance(saved, dict):
            raise ConfigError("this is no state of a stream; give the dictionary that its state_dict() returned")
        if changed := differences(saved, self.identity, of="stream"):
            listed = ", ".join(f"{name} was {saved.get(name)!r} and is {self.identity[name]!r}" for name in changed)
            raise ConfigError(
                f"this state belongs to another stream: {listed}; resume with the settings and shards it was saved "
                "with, or start anew"
            )
        epoch = check_epoch(state, of="stream")
        step = check_count(state, "step", of="stream", at_most=self._steps)
        most = {name: None if "step" in name else MAX_EPOCH for name in PLACES}
        number, place_step, *start = (check_count(state, name, of="stream", at_most=most[name]) for name in PLACES)
        place = (number, place_step)
        self.ledger.restore(RowCounts.of(state))
        self._position.restore(epoch, step)
        self._at = {(epoch, step): place}
        self._starts = {0: (0, 0), epoch: (start[0], start[1])} | ({epoch + 1: place} if step == self._steps else {})
        if self._steps is None and place[0] > epoch:  # it was taken at the end of an epoch
            self._found_steps[epoch] = step
        self._discard_prefetched_epoch()
        if not self._source_of_tars.is_lasting and place[1]:
            logger.warning(
                "stream: the samples of the first %d batches of the iterable are read again and dropped: it must give "
                "them in the same order",
                place[1],
            )

    def other_shards(self, state: dict[str, Any]) -> str:
        """ "": `load_state_dict` says what differs."""
        return ""

    def close(self) -> None:
        """End the workers and the reading. An iteration under way ends; iterating again begins its epoch anew."""
        self._plan.stop()
        super().close()

    def _stop(self) -> None:
        self._plan.stop()  # first: a worker may be waiting for the window that is being read
        super()._stop()

    def _known_steps(self, epoch: int) -> int | None:
        return self._found_steps.get(epoch) if self._steps is None else self._steps

    def _start(self, epoch: int) -> Place:
        """Where an epoch begins."""
        return (epoch, 0) if self._steps is None else self._starts.get(epoch, (epoch, 0))

    def _place(self, epoch: int, step: int) -> Place:
        """The pass of a position, and the step in the pass."""
        if (place := self._at.get((epoch, step))) is not None:
            return place
        if step == self._known_steps(epoch):
            return self._start(epoch + 1)
        assert step == 0, f"stream: epoch {epoch}, step {step} was not reached"
        place = self._start(epoch)
        if self._steps is not None and epoch not in self._starts:
            logger.warning(
                "stream: epoch %d begins with pass %d from its start, because this stream has not given the epoch "
                "before it: some samples come twice, others later; `load_state_dict` goes on exactly",
                epoch,
                epoch,
            )
            self._starts = {known: at for known, at in self._starts.items() if known < epoch} | {epoch: place}
        self._at[epoch, 0] = place
        return place

    def _masked(self, epoch: int, step: int, made: LoadedBatch) -> list[LedgerEntry]:
        """The rows of a batch that could not be used, and the samples that were left out since the batch before."""
        mark = made.mark
        assert mark is not None
        number, before = self._place(epoch, step)
        after = (number + 1, 0) if mark["is_last"] else (number, before + 1)
        self._at = {(epoch, step): (number, before), (epoch, step + 1): after}
        if self._steps is None and mark["is_last"]:
            self._found_steps[epoch] = step + 1
        elif step + 1 == self._steps and self._starts.get(epoch + 1) != after:
            self._starts = {known: at for known, at in self._starts.items() if known <= epoch} | {epoch + 1: after}
        self.stats.wall_s["read"] += mark["waited_s"]
        self.stats.masked += len(mark["left_out"])
        for shard, key, lost in mark["losses"]:
            for loss in self._losses.add(sample_name(shard, key), lost):  # the kinds of loss that are new
                told = "%s (%s); this sample and later ones with the same fault are used without it"
                logger.warning(told, self._losses.first[loss], loss)
        left_out = [LedgerEntry(epoch, step, -1, stage="read", **line) for line in mark["left_out"]]
        return left_out + [replace(entry, epoch=epoch, step=step) for entry in made.masked]

    def _how_to_skip(self) -> str:
        return (
            "to skip the first 3 batches of an epoch, take them (`for _ in itertools.islice(stream, 3)`) and call "
            "stream.load_state_dict(stream.state_dict()). A stream need not go through Accelerator.prepare: its "
            "batches are already those of this rank"
        )

    def _how_to_look(self) -> str:
        return ""

    def _how_to_make(self) -> str:
        return "mmdata.stream(shards, config, rank=rank, world_size=world_size, steps_per_epoch=steps)"


def _told_apart(shards: ShardNames | Iterable[Any] | None) -> tuple[ShardNames | None, Iterable[Any] | None]:
    """Names of shards, or else an iterable of samples; neither for None."""
    if shards is None or isinstance(shards, (str, os.PathLike, list, tuple)):
        return cast("ShardNames | None", shards), None
    return None, cast("Iterable[Any]", shards)


def _again(first: TarWindow, windows: Generator[TarWindow]) -> Generator[TarWindow]:
    """The windows with the first one, which was taken."""
    with closing(windows):
        yield first
        yield from windows


def _no_sample(source: TarSource, window: TarWindow) -> DataError:
    left_out = [line for tar in window.tars for line in tar.left_out]
    where = counted(source.num_tars, "shard") if source.is_lasting else "the iterable"
    if left_out:
        line = left_out[0]
        first = f"{sample_name(line['shard'], line['key'])}: {line['reason']} ({line['detail']})"
        return DataError(f"stream: none of {counted(len(left_out), 'sample')} of {where} can be used: {first}")
    if source.is_lasting:
        where = f"any of {where}; the first is '{source.name(0)}'"
    return DataError(f"stream: no sample in {where}")


def _refuse_planned(data: DataConfig) -> None:
    """Raise a ConfigError if a setting needs the rows of an index."""
    select = data.select if isinstance(data.select, str) else data.select and data.select.file
    settings = {
        "groups": data.groups is not None,
        "select by a file of rows": bool(select) and str(select).lower().endswith(".npy"),
        "join": bool(data.join),
        "caption_hash": data.caption_hash is not None,
        "order": data.order is not None,
        "leftover: drop": data.leftover == "drop",
        "row_weights": data.row_weights is not None,
        "captions: every": data.captions == "every",
        "captions of several sources": not isinstance(data.captions, str),
        "negative_captions": data.negative_captions is not None,
        "num_lanes": data.num_lanes > 1,
        "loading.worker_type: process": data.loading.worker_type == "process",
    }
    if planned := [name for name, given in settings.items() if given]:
        raise ConfigError(
            f"data: a stream has no index of all rows, and cannot do {', '.join(planned)}; leave that out, or make an "
            "index (`mmdata index`) and use mmdata.Loader"
        )
