"""Executes a plan: the batches of one rank, made ahead by worker threads, in the plan's order.

What a batch holds depends on the plan alone; workers change only who makes it and when.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.batch import Batch, CaptionBatch
from mmdata.config import Config, DataConfig, load_config
from mmdata.config.strict_yaml import parse
from mmdata.cores import NumWorkers
from mmdata.launcher import resolve_ranks
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.captions import all_captions
from mmdata.loader.frameworks import Interoperable, Iteration
from mmdata.loader.ledger import MIN_ROWS_FOR_RATE, Ledger, LedgerEntry, RowCounts
from mmdata.loader.state import Identity, identity_of, position_of
from mmdata.loader.stats import Stats
from mmdata.loader.workers.choose import make_source
from mmdata.loader.workers.handover import StartupHandover
from mmdata.loader.workers.parent import WorkerProcesses
from mmdata.loader.workers.steps import RankSteps
from mmdata.loader.workers.threads import ThreadedBatches
from mmdata.plan import Plan
from mmdata.plan.from_config import build_plan
from mmdata.plan.position import Position


class Loader(Interoperable):
    """The batches of one rank, epoch after epoch.

    Iterating gives the rest of the current epoch; when it is exhausted the next epoch begins, also without
    `set_epoch`, and its first batches are made meanwhile: `prefetch`, as ever, until somebody asks for them
    or goes elsewhere. A batch may be kept; its memory is used again once it is gone.

    Args:
        plan: of the global batches.
        worker: makes batches.
        rank: 0 … world_size-1; None: the launcher's, see `resolve_ranks`.
        world_size: processes that share each global batch; must divide the global batch size. Given with rank.
        num_workers: threads, or auto (see `Tuner`); 0 makes batches in the caller's thread. Those of a side process:
            only by `from_config`.
        prefetch: batches made ahead of the one that was yielded, by all workers together.
        max_bad_share: of the rows seen; the run ends when more could not be used. One of several ranks only warns:
            `check_rows` judges the rows of all.

    Attributes:
        plan, worker, index, rank, world_size: as given.
        ledger: the newest entries of the rows that were masked on this rank.
        masked: how many were, by reason.
        stats: sums over the batches yielded.

    Raises:
        ConfigError: the launcher's variables RANK and WORLD_SIZE are no rank in a world.
        ValueError: world_size does not divide the global batch size, or is given without rank.

    Example:
        loader = Loader.from_config("configs/scenes.yaml")
        for batch in loader:
            step(batch)
    """

    def __init__(
        self,
        plan: Plan,
        worker: BatchMaker,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: NumWorkers = 2,
        prefetch: int = 2,
        max_bad_share: float = 0.05,
    ) -> None:
        rank, world_size = self.rank, self.world_size = resolve_ranks(rank, world_size)
        plan.check_ranks(rank, world_size)
        self.plan = plan
        self.index = worker.index
        self.stats = Stats()
        self._ledger = Ledger(max_bad_share, rank=rank, world_size=world_size)
        self.worker = worker
        tasks = RankSteps(plan, worker, rank=rank, world_size=world_size)
        self._source: ThreadedBatches | WorkerProcesses | StartupHandover = ThreadedBatches(
            tasks, worker, count=num_workers, room=prefetch
        )
        # Process, epoch and step of the batch that the source gives next.
        self._next: tuple[int, int, int] | None = None
        self._onward = True  # at the end of an epoch the source goes on with the one after it
        self._follows: tuple[int, int] | None = None  # the position after the last epoch that was given to its end
        self._position = Position()

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | dict[str, Any] | DataConfig,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Loader:
        """Build a loader from settings.

        Args:
            config: a YAML file or a dictionary with the section `data`, or that section.
            rank: 0 … world_size-1. Without rank and world_size both are the launcher's (RANK and WORLD_SIZE in the
                environment, as torchrun sets them), which is logged; without a launcher 0 of 1.
            world_size: processes that share each global batch.

        Raises:
            ConfigError: a setting is unknown, missing or out of range, or there is no such tokenizer.
            DataError: the shards have no index, or are not those that were indexed.
        """
        rank, world_size = resolve_ranks(rank, world_size)
        data = data_config(config)
        worker = BatchMaker.from_config(data)
        loader = cls(
            build_plan(data, worker.index, worker.tokenizer),
            worker,
            rank=rank,
            world_size=world_size,
            num_workers=data.loading.num_workers,
            prefetch=data.loading.prefetch_batches,
            max_bad_share=data.loading.max_bad_share,
        )
        beside = make_source(data, loader.plan, worker, rank=rank, world_size=world_size)
        loader._source = beside or loader._source
        return loader

    def __len__(self) -> int:
        """Steps of the current epoch, exact, the same on every rank.

        Epochs differ only where batch sizes do, rows stand in groups or a repeat is no whole number.
        """
        return self.plan.num_steps(self._position.epoch)

    @property
    def batch_size(self) -> int:
        """Rows of a batch on this rank; with a token budget, at most."""
        return self.plan.global_batch_size // self.world_size

    @property
    def ledger(self) -> list[LedgerEntry]:
        """The newest 10,000 rows that were masked on this rank, each with its reason; `write_ledger` keeps all."""
        return list(self._ledger.entries)

    @property
    def masked(self) -> Counter[str]:
        """Rows that this loader has masked, by reason, exact."""
        return self._ledger.own.masked

    def write_ledger(self, path: str | os.PathLike[str]) -> None:
        """Append each row that is masked from here on to a file, one JSON object a line, before its batch is yielded.

        Call it once the loader is where it shall begin: what the file says of later batches, left by a run that was
        killed, is cut off, so that each masked row is there once.
        """
        self._ledger.write_to(Path(path), epoch=self._position.epoch, step=self._position.step)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch.

        May be called in the last step of a loop over the epoch before, too. In mid-epoch the current epoch may be named
        at any time, which changes nothing; another one ends the iteration that is under way: asked for another batch,
        it raises a RuntimeError. After the last batch the current epoch is given again, where it is named. Of an epoch
        that `load_state_dict` has put at its end nothing is left: it is not given again.

        Raises:
            ValueError: epoch is negative, or above 1,048,575.
        """
        if self._position.set_epoch(epoch, len(self)):
            self._give_up_what_is_elsewhere()

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, counted in batches yielded, and the plan it belongs to; JSON, under 1 KB.

        It counts the rows that this rank has seen and masked, beside those of the state that was loaded; `merge_states`
        makes one state of those of all ranks.
        """
        place = {"epoch": self._position.epoch, "step": self._position.step}
        return {**place, **self._ledger.counts.state(), "plan": self.identity}

    @cached_property  # takes a millisecond; a state may be asked for at every step
    def identity(self) -> Identity:
        """What the batches depend on, pixels and tokens included; a state belongs to loaders of the same identity.

        Of a transform of your own it knows the name, and whether its file has changed, which is logged, not refused.
        """
        return identity_of(self.plan, self.worker)

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One state of those that all ranks took at the same step: the rows that they have counted are added up."""
        return {**states[0], **self._ledger.merge([RowCounts.of(state) for state in states]).state()}

    def all_captions(self, rows: NDArray[np.int64]) -> CaptionBatch:
        """All captions of those of the rows that have several: an evaluation counts each, a batch has one a row."""
        return all_captions(self.worker, rows)

    def judge_together(self) -> None:
        """Leave it to `check_rows`, called with a merged state on every rank, whether too many rows are bad.

        Otherwise too many bad rows end the iteration with an error; with several ranks they give a warning.
        """
        self._ledger.alone = False

    def check_rows(self, state: dict[str, Any]) -> None:
        """Judge the rows that a state counts, from the thousandth row or the end of the first epoch on.

        Raises:
            DataError: more than `max_bad_share` of them could not be used; says how many for which reason.
        """
        counts = RowCounts.of(state)
        if counts.seen >= MIN_ROWS_FOR_RATE or state["epoch"] > 0 or state["step"] == self.plan.num_steps(0):
            self._ledger.judge(counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was yielded when the state was taken.

        The number of ranks and workers may be another. An iteration that is under way ends: asked for another batch, it
        raises a RuntimeError.

        Raises:
            ConfigError: the state belongs to another plan; what differs is named. Or a number in it is missing, or
                is none that `state_dict` gives.
        """
        epoch, step = position_of(state, self.identity, self.plan)
        self._ledger.restore(RowCounts.of(state))
        self._position.restore(epoch, step)
        self._give_up_what_is_elsewhere()

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current epoch, from where `load_state_dict` put it, or from its start.

        Raises:
            RuntimeError: asked for another batch after `set_epoch`, `load_state_dict` or a newer iteration has moved
                the position; there is one.
        """
        return Iteration(self._iterate(), of="loader")

    def _iterate(self) -> Generator[Batch]:
        position = self._position
        iteration, restores = position.begin(len(self)), position.restores
        epoch, num_steps = position.epoch, len(self)
        if self._follows:  # whoever went elsewhere after the last epoch may do so again: nothing is made in vain twice
            self._onward, self._follows = self._follows == (epoch, position.step), None
        try:
            for step in range(position.step, num_steps):
                position.check(iteration, of="loader")
                # No reference stays here: its user frees its memory.
                yield self._take(iteration, epoch, step, num_steps)
            if position.restores == restores:  # the rows that are counted are still those of this iteration
                self._ledger.check()
        except BaseException as error:
            at_the_end = self._next is not None and self._next[2] == 0
            if position.is_of(iteration) and not (at_the_end and isinstance(error, GeneratorExit)):
                self._stop()
            raise
        position.end(iteration)

    def _take(self, iteration: int, epoch: int, step: int, num_steps: int) -> Batch:
        """The batch of a step, accounted for."""
        if self._next != (os.getpid(), epoch, step):  # a forked child has none of its parent's workers
            self._source.begin(epoch, step, onward=self._onward)
        started = perf_counter()
        made = self._source.take(epoch, step)
        self.stats.wait_s += perf_counter() - started
        self._next = (os.getpid(), epoch, step + 1)
        if step + 1 == num_steps:
            self._next, self._follows = (os.getpid(), epoch + 1, 0), (epoch + 1, 0)
            if not self._onward:
                self._stop()
        self.stats.add(made.stats)
        self._ledger.add(made.masked, made.stats.rows + len(made.masked))
        self._position.advance(iteration)
        return made.batch

    def _how_to_skip(self) -> str:
        return (
            "to begin an epoch at its batch 3, loader.load_state_dict({**loader.state_dict(), 'step': 3}), which reads "
            "nothing of the others. It need not go through Accelerator.prepare: its batches are already those of this "
            "rank"
        )

    def _how_to_make(self) -> str:
        return "Loader.from_config(config, rank=rank, world_size=world_size)"

    def _give_up_what_is_elsewhere(self) -> None:
        """Drop the batches that were made ahead where others are asked for."""
        if self._next and self._next[1:] != (self._position.epoch, self._position.step):
            self._stop()

    def _stop(self) -> None:
        self._next = None
        self._source.stop()


def data_config(config: str | os.PathLike[str] | dict[str, Any] | DataConfig) -> DataConfig:
    """The section `data` of a YAML file or a dictionary, or that section itself."""
    if isinstance(config, DataConfig):
        return config
    if not isinstance(config, dict):
        return load_config(config).data
    if "data" in config:
        return parse(Config, config, origin="config").data
    return parse(DataConfig, config, origin="config section data")
