"""Executes a plan: the batches of one rank in the plan's order, prefetched by workers.

The content of a batch depends on the plan alone; workers decide only who makes it, and when.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator, Sequence
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmdata.batch import Batch, CaptionBatch, shown
from mmdata.config import Config, DataConfig, load_config
from mmdata.config.strict_yaml import parse
from mmdata.errors import counted
from mmdata.index import Index
from mmdata.launcher import Ranks, resolve_ranks
from mmdata.loader.builder import BatchBuilder
from mmdata.loader.frameworks import Interoperable, refuses_settings
from mmdata.loader.identity import Identity, identity_of, other_shards
from mmdata.loader.ledger import MIN_ROWS_FOR_RATE, Ledger, LedgerEntry, RowCounts
from mmdata.loader.position import Position, position_of
from mmdata.loader.source import BatchSource, RankPipeline, make_source, open_pipeline
from mmdata.loader.stats import Stats
from mmdata.loader.unfinished import LoadedBatch
from mmdata.loader.workers.threads import ThreadedBatches
from mmdata.plan import Bucket, BucketPolicy, OrderedPlan, Plan, Step
from mmdata.plan.rows import IndexRows
from mmdata.processes import NumWorkers, most_workers

SHOWN = [
    *("all_captions", "batch_size", "builder", "check_rows", "close", "from_config", "index", "ledger"),
    *("load_state_dict", "merge_states", "plan", "rank", "set_epoch", "state_dict", "stats", "world_size"),
]
"""What `dir(loader)` and tab completion show: what users call. The other names are for frameworks."""

logger = logging.getLogger("mmdata")


class Loader(Interoperable):
    """The batches of one rank, epoch after epoch.

    An iteration gives the rest of the current epoch; after it the next epoch is current, also without `set_epoch`, and
    its first batches are prefetched. A batch may be kept; its memory is used again when it is gone. `close`, or the end
    of a `with` block, ends the workers.

    Args:
        plan: of the global batches.
        builder: makes the batches.
        rank: 0 … world_size-1; None: as the launcher says, see `resolve_ranks`.
        world_size: processes that share each global batch; must divide the global batch size. Given with rank.
        num_workers: threads; auto: all usable cores of the rank; 0: batches are made in the caller's thread.
        prefetch_batches: batches made before the caller asks for them, by all workers together.
        max_bad_share: the run ends when more than this share of the rows seen could not be used. With several ranks
            each only warns, and `check_rows` judges the rows of all ranks.
        source: makes the batches; default: threads.
        order: int64 (n,), the rows that each epoch has, in this order, as `data.order`; None: the order of the plan.

    Attributes:
        ledger: the rows that were masked on this rank.
        stats: sums over the batches yielded.

    Raises:
        ConfigError: the environment variables RANK and WORLD_SIZE do not fit together.
        ValueError: world_size does not divide the global batch size, or is given without rank.

    Example:
        loader = Loader.from_config("configs/scenes.yaml")
        for batch in loader:
            step(batch)
    """

    _kind = "loader"  # in messages
    _remedy = "resume with the settings and shards it was saved with"

    @refuses_settings
    def __init__(
        self,
        plan: Plan,
        builder: BatchBuilder,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: NumWorkers = "auto",
        prefetch_batches: int = 2,
        max_bad_share: float = 0.05,
        source: BatchSource | None = None,
        order: ArrayLike | None = None,
    ) -> None:
        if order is not None:
            if source is not None:
                raise ValueError("order and source exclude each other: a source makes the batches of its own plan")
            plan = OrderedPlan(plan, order)
        ranks = resolve_ranks(rank, world_size)
        plan.check_ranks(*ranks)
        self.plan = plan
        self.builder = builder
        self.rank, self.world_size = ranks
        self._sharing = self.world_size  # ranks that share a global batch of the plan
        self.stats = Stats()
        self.ledger = Ledger(max_bad_share, ranks)
        self._source = source or ThreadedBatches(
            RankPipeline(plan, builder, ranks), num_threads=most_workers(num_workers), prefetch=prefetch_batches
        )
        # Process id, epoch and step of the batch that the source gives next; None: the source must begin anew. The id
        # differs in a forked child, which has none of its parent's workers.
        self._next: tuple[int, int, int] | None = None
        self._position = Position()
        # What `from_config` made it of, so that another process can make it too.
        self.settings: dict[str, Any] | None = None

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | dict[str, Any] | DataConfig,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        order: ArrayLike | None = None,
        policy: BucketPolicy | None = None,
    ) -> Loader:
        """Build a loader from settings.

        Args:
            config: a YAML file or a dictionary with the section `data`, or that section.
            rank: 0 … world_size-1. Without rank and world_size, both come from RANK and WORLD_SIZE in the environment,
                as torchrun sets them, which is logged; without a launcher, rank 0 of 1.
            world_size: processes that share each global batch.
            order: int64 (n,), the rows that each epoch has, in this order, in place of `data.order` and `data.shuffle`.
            policy: of the batch shapes, in place of the text lengths, image shapes and token budget of the settings. In
                a worker process it is a copy, made by pickle.

        Raises:
            ConfigError: a setting is unknown, missing or out of range, or the tokenizer does not exist.
            DataError: the shards have no index, or are not those that were indexed.
            ValueError: `order` has rows that the shards do not have, or that are not selected.
        """
        ranks, data = resolve_ranks(rank, world_size), data_config(config)
        if order is not None:  # what goes with no order is refused, as with a file
            data = parse(DataConfig, {**dict(data), "order": "order", "shuffle": False}, origin="config section data")
        if data.groups is not None and data.groups.source == "run":
            logger.warning(
                "data.groups.source is run, and only `mmdata train` makes such groups: these batches have none; "
                "`mmdata neighbours` makes a file of groups for any loop"
            )
        plan, builder, source = open_parts(data, ranks, order=order, policy=policy)
        made = cls(plan, builder, **ranks._asdict(), max_bad_share=data.loading.max_bad_share, source=source)
        made.settings = {"config": data, "order": order, "policy": policy}
        return made

    def __len__(self) -> int:
        """Steps of the current epoch, exact, the same on every rank.

        Epochs differ only with batches of several sizes, rows in groups, or a repeat that is not an integer.
        """
        return self.num_steps(self._position.epoch)

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch, exact, the same on every rank."""
        return self.plan.num_steps(epoch)

    def __dir__(self) -> list[str]:
        return SHOWN

    def __repr__(self) -> str:
        epoch, rank = self._position.epoch, f"rank {self.rank} of {self.world_size}"
        planned = self.plan.in_words(epoch, self._sharing)
        return f"{type(self).__name__}({planned}, {rank}; epoch {epoch}, step {self._position.step})"

    @property
    def index(self) -> Index:
        """The index of the shards."""
        return self.builder.index

    @property
    def batch_size(self) -> int:
        """Rows of a batch on this rank; the largest number with a token budget."""
        return self.plan.global_batch_size // self._sharing

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch.

        To set the current epoch in mid-epoch changes nothing. To set another ends the iteration in progress: its next
        batch raises a RuntimeError. The last step of an epoch may already set the next one. After its last batch an
        epoch that is set again is given again; not so an epoch whose end `load_state_dict` has restored.

        Raises:
            ValueError: epoch is negative, or above 1,048,575.
        """
        if self._position.set_epoch(epoch, self._known_steps(self._position.epoch)):
            self._discard_prefetched_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The position, counted in batches yielded, and what the batches depend on; JSON, under 1 KB.

        It also counts the rows that this rank has seen and masked, added to those of the state that was loaded.
        `merge_states` makes one state of those of all ranks.
        """
        position = {"epoch": self._position.epoch, "step": self._position.step}
        return {**position, **self.ledger.counts.state(), "plan": self.identity}

    @cached_property  # takes a millisecond; a state may be asked for at every step
    def identity(self) -> Identity:
        """What the batches depend on, pixels and tokens included. A state fits loaders of the same identity.

        A transform of your own is known by its name; a change of its file is logged, not refused.
        """
        fields = self.builder.spec.fields
        return {**identity_of(self.plan, self.builder.spec), "fields": fields and fields.name}

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One state of the states that all ranks took at the same step; adds up the rows that they count."""
        return {**states[0], **self.ledger.merge([RowCounts.of(state) for state in states]).state()}

    def all_captions(self, rows: NDArray[np.int64]) -> CaptionBatch:
        """All captions of each row that has several, for an evaluation; a batch has one caption a row."""
        return self.builder.all_captions(rows)

    def blank_batches(self) -> list[tuple[str, Callable[[], Batch]]]:
        """Each shape of the current epoch's batches, in words, and a batch of it without a row; the largest first."""
        epoch, plan = self._position.epoch, self.plan
        steps = plan.steps_of_buckets(epoch)
        shapes = zip(plan.policy.buckets, plan.batch_sizes, steps or [0] * len(plan.batch_sizes), strict=True)
        blanks: list[tuple[str, Callable[[], Batch]]] = []
        for bucket, rows, count in sorted(shapes, key=_elements, reverse=True):
            if steps and not count:
                continue
            nothing = np.full(rows // self._sharing, -1)
            words = f"{counted(len(nothing), 'row')} of {bucket.image}{' pixels' * (not bucket.patches)}"
            if bucket.length:
                words += f" and {bucket.length} tokens"
            if bucket.boxes:
                words += f" and {bucket.boxes} boxes"
            if count:
                words += f" (steps: {count:,} of an epoch's {len(self):,})"
            blanks.append((words, partial(self._blank, Step(epoch, 0, bucket, nothing, nothing))))
        return blanks

    def _blank(self, step: Step) -> Batch:
        return shown(self.builder.added(self.builder.make(step).batch))

    def rows_alike(self) -> NDArray[np.int64]:
        """What makes rows equal, which are not used as negatives for each other: int64 (rows of the index, 2)."""
        assert isinstance(self.plan.rows, IndexRows)
        return self.plan.rows.all_hashes()

    @property
    def num_rows(self) -> int:
        """Rows that epochs take their rows from: those of the index that are selected."""
        return int(self.plan.rows.places[-1])

    def check_rows(self, state: dict[str, Any]) -> None:
        """Check the share of bad rows that a state counts: from 1,000 rows or an epoch on, and where all are bad.

        Raises:
            DataError: more than `max_bad_share` of the rows could not be used; gives the number for each reason.
        """
        counts = RowCounts.of(state)
        is_known = counts.seen >= MIN_ROWS_FOR_RATE or state["epoch"] > 0 or state["step"] == self._known_steps(0)
        if is_known or counts.masked.total() == counts.seen:
            self.ledger.judge(counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch that was yielded when the state was taken.

        The number of ranks and workers may differ. An iteration in progress ends: its next batch raises a RuntimeError.

        Raises:
            ConfigError: the state belongs to other batches, and the error names what differs; or a number in the state
                is missing or impossible.
        """
        epoch, step = position_of(state, self.identity, self._known_steps, of=self._kind, remedy=self._remedy)
        self._restore_places(state, epoch, step)
        self.ledger.restore(RowCounts.of(state))
        self._position.restore(epoch, step)
        self._discard_prefetched_epoch()

    def other_shards(self, state: dict[str, Any]) -> str:
        """In words, that a state was taken with other shards, which `load_state_dict` would refuse; "" if not."""
        return other_shards(state, self.identity, [str(source.folder) for source in self.index.sources])

    def __iter__(self) -> Generator[Batch]:
        """The batches of the current epoch, from where `load_state_dict` put it, or from its start.

        Raises:
            RuntimeError: `set_epoch`, `load_state_dict` or a newer iteration has moved the loader's position since the
                last batch.
        """
        position = self._position
        iteration, restores = position.begin(self._known_steps(position.epoch)), position.restores
        epoch, step = position.epoch, position.step
        # While Python ends, the names of this module and the builtins are gone: what leaves the loop has its own.
        is_finalizing, is_given, is_over = sys.is_finalizing, False, False
        try:
            while step != self._known_steps(epoch):
                position.check(iteration, of=self._kind)
                # The batch gets no name here: this frame would keep its memory until the next batch.
                is_given = True
                yield self._take(iteration, epoch, step)
                is_given = False
                step += 1
            if position.restores == restores:  # else the ledger counts the rows of another state
                self.ledger.check()
            is_over = True
        finally:
            # Prefetched batches are dropped. A loop that has had the last batch and is then left keeps them: they are
            # those of the next epoch.
            if not is_over and not is_finalizing():
                keeps = is_given and position.step == self._known_steps(epoch)
                if position.is_of(iteration) and not keeps:
                    self._stop()
        position.end(iteration)

    def _take(self, iteration: int, epoch: int, step: int) -> Batch:
        """Take the batch of a step, and add it to stats and ledger."""
        place = self._place(epoch, step)
        if self._next != (os.getpid(), *place):
            self._source.begin(*place)
        started = perf_counter()
        try:
            made = self._source.take(*place)
        except Exception:
            self._position.check(iteration, of=self._kind)  # another thread has closed it
            raise
        self.stats.wait_s += perf_counter() - started
        self.stats.add(made.stats)
        masked = self._masked(epoch, step, made)
        self._next = (os.getpid(), *self._place(epoch, step + 1))
        self.ledger.add(masked, made.stats.rows + len(masked))
        self._position.advance(iteration)
        return shown(self.builder.added(made.batch))

    def _known_steps(self, epoch: int) -> int | None:
        """Steps of an epoch; None while nobody knows."""
        return self.num_steps(epoch)

    def _place(self, epoch: int, step: int) -> tuple[int, int]:
        """Where a position lies in the plan: its epoch and step."""
        return (epoch, step) if step < self.num_steps(epoch) else (epoch + 1, 0)

    def _restore_places(self, state: dict[str, Any], epoch: int, step: int) -> None:
        """Restore what else a state says of its position."""

    def _masked(self, epoch: int, step: int, made: LoadedBatch) -> list[LedgerEntry]:
        """The rows of a batch that could not be used."""
        return made.masked

    def close(self) -> None:
        """End the workers, and drop prefetched batches. An iteration under way ends; iterating again starts workers."""
        self._position.overtake("close")
        self._next = None
        self._source.close()

    def _discard_prefetched_epoch(self) -> None:
        """Drop the prefetched batches if the position has moved away from them."""
        if self._next and self._next[1:] != self._place(self._position.epoch, self._position.step):
            self._stop()

    def _stop(self) -> None:
        self._next = None
        self._source.stop()


def _elements(shape: tuple[Bucket, int, int]) -> tuple[int, int, int]:
    """Pixels (or patches), tokens and boxes of a batch, of a bucket and so many rows."""
    bucket, rows, _ = shape
    return rows * (bucket.height * bucket.width + bucket.patches), rows * bucket.length, rows * bucket.boxes


def open_parts(data: DataConfig, ranks: Ranks, **given: Any) -> tuple[Plan, BatchBuilder, BatchSource]:
    """What a loader is made of: the plan of a section `data`, the builder of batches, and who makes them.

    `given` is what no settings hold; see `build_plan`.
    """
    pipeline = RankPipeline.from_config(data, ranks, given)
    plan, builder = pipeline.plan, pipeline.builder
    if (fields := builder.spec.fields) is not None:
        fields.check(plan.rows.planned)
    opened = partial(open_pipeline, data.model_dump(mode="json"), ranks, given)
    return plan, builder, make_source(data, pipeline, opened)


def data_config(config: str | os.PathLike[str] | dict[str, Any] | DataConfig) -> DataConfig:
    """The section `data` of a YAML file or a dictionary, or that section itself."""
    if isinstance(config, DataConfig):
        return config
    if not isinstance(config, dict):
        return load_config(config).data
    if "data" in config:
        return parse(Config, config, origin="config").data
    return parse(DataConfig, config, origin="config section data")
