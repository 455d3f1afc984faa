"""The state of a stream as plain data: which stream it is of, and where each of its ranks stood."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from mmdata.data_config import DataConfig
from mmdata.errors import ConfigError
from mmdata.loader.state import differences
from mmdata.plan.position import MAX_EPOCH
from mmdata.shards.columns import hash64
from mmdata.shards.remote import display_name
from mmdata.streaming.position import Place
from mmdata.transform.pixels import PixelTransform
from mmdata.transform.text import Tokenizer

logger = logging.getLogger("mmdata")

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
        "limit": data.limit,
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
