"""Where a rank stands: in which epoch, and in which of its passes over the shards. Epochs and passes end apart."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.hashing import hash64
from mmdata.loader.state import differences
from mmdata.plan.position import MAX_EPOCH, Position
from mmdata.shards.remote import display_name
from mmdata.transform.pixels import PixelTransform
from mmdata.transform.text import Tokenizer

logger = logging.getLogger("mmdata")


class Place(NamedTuple):
    """Between two batches of a rank.

    Attributes:
        number: of the pass, from 0.
        batches: of this pass that have been.
    """

    number: int
    batches: int = 0


class RankPosition:
    """The position of a rank in epochs, as any loader's, and its place in the passes.

    Args:
        steps_per_epoch: each epoch has so many batches and begins where the one before it ended; None: an epoch is
            the pass of its number.

    Attributes:
        place: after the batches that have been yielded.

    Example:
        Passes of 7 batches and 5 steps an epoch: epoch 1 begins at Place(0, 5) and ends at Place(1, 3).
    """

    def __init__(self, steps_per_epoch: int | None) -> None:
        self.place = Place(0)
        self._position = Position()
        self._steps = steps_per_epoch
        self._starts = {0: self.place}  # of the epochs whose start is known

    @property
    def epoch(self) -> int:
        """The current one."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """Batches of the epoch that have been yielded."""
        return self._position.step

    @property
    def restores(self) -> int:
        """Times that a state has been loaded."""
        return self._position.restores

    @property
    def left(self) -> int | None:
        """Batches that the epoch still has; None: as many as the pass."""
        return None if self._steps is None else self._steps - self.step

    @property
    def start(self) -> Place | None:
        """Of the current epoch; None: unknown, or the pass of its number."""
        return None if self._steps is None else self._starts.get(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """As `Position.set_epoch`."""
        self._note_end()
        if self._position.set_epoch(epoch, self._steps):
            self._go_to_start()

    def restore(self, epoch: int, step: int, place: Place, *, start: Place | None) -> None:
        """Go where a state was taken; `start` of that epoch, where it is known."""
        self._position.restore(epoch, step)
        self.place = place
        start = place if step == 0 else start
        self._starts = {0: Place(0)} | ({} if start is None else {epoch: start})

    def begin(self) -> int:
        """As `Position.begin`."""
        self._note_end()
        iteration = self._position.begin(self._steps)
        if self.step == 0:  # else a state was loaded, and `place` is its
            self._go_to_start()
            if self._steps is not None and self.epoch not in self._starts:
                logger.warning(
                    "stream: epoch %d begins with pass %d from its start, because this stream has not given the epoch "
                    "before it: some samples come twice, others later; `load_state_dict` goes on exactly",
                    self.epoch,
                    self.epoch,
                )
                self._starts_at(self.epoch, self.place)
        return iteration

    def is_of(self, iteration: int) -> bool:
        """Whether no one has overtaken an iteration."""
        return self._position.is_of(iteration)

    def check(self, iteration: int) -> None:
        """Raise a RuntimeError where an iteration was overtaken."""
        self._position.check(iteration, of="stream")

    def advance(self, iteration: int, place: Place) -> None:
        """A batch is yielded; `place` is after it."""
        if self._position.advance(iteration):
            self.place = place

    def end(self, iteration: int) -> None:
        """Go to the start of the next epoch after the last batch of an iteration, unless it was overtaken."""
        if self.is_of(iteration):
            self._note_end()
            self._position.end(iteration)
            self._go_to_start()

    def _note_end(self) -> None:
        """Where all batches of the current epoch have been yielded, the next one begins here."""
        if self.left == 0:
            self._starts_at(self.epoch + 1, self.place)

    def _starts_at(self, epoch: int, start: Place) -> None:
        """Epochs after it were given after another start, if this one is new."""
        if self._starts.get(epoch) != start:
            self._starts = {e: place for e, place in self._starts.items() if e < epoch} | {epoch: start}

    def _go_to_start(self) -> None:
        self.place = self._starts.get(self.epoch, Place(self.epoch))


def check_steps(steps_per_epoch: int | None, world_size: int, global_batch_size: int) -> None:
    """Raise a ConfigError for a number of steps that is none, or that is missing with several ranks."""
    if steps_per_epoch is None and world_size > 1:
        raise ConfigError(
            f"stream: world_size is {world_size}, and ranks whose shards hold different numbers of samples would wait "
            "for each other without end: give steps_per_epoch, the same on all ranks, about samples / "
            f"global_batch_size (for 1,000,000 samples {max(1, 1_000_000 // global_batch_size):,}); or run "
            "`mmdata index` and use mmdata.Loader, which knows it"
        )
    if steps_per_epoch is not None and (type(steps_per_epoch) is not int or steps_per_epoch < 1):
        raise ConfigError(f"stream: steps_per_epoch must be a whole number from 1 on: got {steps_per_epoch!r}")


MAX_BATCHES = 2**40
"""Of a pass; a billion samples in batches of 512 are two million. It keeps a forged state from overflowing."""


class RankState(NamedTuple):
    """A rank's part of a stream's state.

    Attributes:
        place: where it goes on.
        lengths: the text bounds that it chose; None: none as yet.
        start: of the epoch; None: unknown.
    """

    place: Place
    lengths: list[int] | None
    start: Place | None = None

    def pack(self) -> dict[str, Any]:
        """As JSON."""
        packed = {"pass": self.place.number, "batches": self.place.batches, "text_lengths": self.lengths}
        return packed if self.start is None else packed | {"epoch_start": list(self.start)}

    @classmethod
    def unpack(cls, packed: Any) -> RankState:
        """Undo of `pack`; raises ConfigError for what it cannot have given."""
        saved = packed if isinstance(packed, dict) else {}
        lengths, start = saved.get("text_lengths"), saved.get("epoch_start")
        lists = [[] if numbers is None else numbers for numbers in (lengths, start)]
        numbers = [saved.get("pass"), saved.get("batches")]
        if (
            not all(isinstance(given, list) for given in lists)
            or any(type(number) is not int or not 0 <= number <= MAX_BATCHES for number in chain(numbers, *lists))
            or len(lists[1]) not in (0, 2)
            or any(number > MAX_EPOCH for number in (saved["pass"], *lists[1][:1]))
        ):
            raise ConfigError(
                f"stream state: a rank's place must be whole numbers from 0 on: got {packed!r}; give the dictionary "
                "that state_dict() returned, or start anew"
            )
        return cls(Place(saved["pass"], saved["batches"]), lengths, Place(*start) if start else None)


def identity(
    shards: Sequence[str],
    data: DataConfig,
    steps_per_epoch: int | None,
    *,
    transform: PixelTransform,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """What decides the batches of a stream, but for the number of ranks; folders and hosts may change."""
    names = "\n".join(display_name(shard).rsplit("/", 1)[-1] for shard in shards)
    shapes = {name: getattr(data, name) for name in ("text_buckets", "image_size", "image_buckets", "image_patches")}
    return {
        "shards": hash64(names.encode()),
        "num_shards": len(shards),
        "global_batch_size": data.global_batch_size,
        "steps_per_epoch": steps_per_epoch,
        "seed": data.seed,
        "shuffle": data.shuffle,
        "limit": data.max_rows,
        **transform.identity(),
        "patch_size": data.patch_size if data.image_patches is not None else None,
        "tokenizer": tokenizer.identity,
        "shapes": hash64(repr((sorted(shapes.items()), data.max_length, data.num_text_buckets)).encode()),
    }


def check_identity(state: Mapping[str, Any], own: dict[str, Any]) -> None:
    """Raise a ConfigError where a state is of another stream, and say what differs."""
    saved = state.get("stream")
    if not isinstance(saved, dict):
        raise ConfigError("this is no state of a stream; give the dictionary that its state_dict() returned")
    if changed := differences(saved, own, of="stream"):
        listed = ", ".join(f"{name} was {saved.get(name)!r} and is {own[name]!r}" for name in changed)
        raise ConfigError(
            f"this state belongs to another stream: {listed}; resume with the settings and shards it was saved with, "
            "or start anew"
        )


def rank_state(state: dict[str, Any], *, rank: int, world_size: int) -> RankState:
    """A rank's part of a state.

    Where there is none that fits, because it was saved by another number of ranks or not merged from those of all, it
    is the start of the first pass that no rank of the state has begun; logged.
    """
    given = state.get("ranks")
    ranks = {name: RankState.unpack(part) for name, part in given.items()} if isinstance(given, dict) else {}
    if state.get("world_size") == world_size and str(rank) in ranks:
        return ranks[str(rank)]
    number = max((part.place.number for part in ranks.values()), default=-1) + 1
    logger.warning(
        "stream: the state has no place for rank %d of %d, which begins pass %d: some samples come twice, others "
        "later; with as many ranks as before and their states merged (`merge_states`) it goes on exactly",
        rank,
        world_size,
        number,
    )
    return RankState(Place(number), None)
