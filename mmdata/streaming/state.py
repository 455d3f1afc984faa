"""The state of a stream: the position and the text bounds of each rank, and the identity of the stream."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.hashing import hash64
from mmdata.loader.builder import BatchSpec
from mmdata.loader.state import differences
from mmdata.plan.position import MAX_EPOCH
from mmdata.storage.fetch import display_name
from mmdata.streaming.position import PassPosition

logger = logging.getLogger("mmdata")

MAX_BATCHES = 2**40
"""Largest number of batches of a pass in a state, so that a forged state does not overflow int64. A billion samples in
batches of 512 are two million batches."""


class RankState(NamedTuple):
    """A rank's part of a stream's state.

    Attributes:
        in_passes: the position after the last batch that was yielded.
        lengths: text bounds; None if they are not chosen yet.
        epoch_start: where the epoch began; None if unknown.
    """

    in_passes: PassPosition
    lengths: list[int] | None
    epoch_start: PassPosition | None = None

    def pack(self) -> dict[str, Any]:
        """As JSON."""
        packed = {"pass": self.in_passes.number, "batches": self.in_passes.batches, "textchosen": self.lengths}
        return packed if self.epoch_start is None else packed | {"epoch_start": list(self.epoch_start)}

    @classmethod
    def unpack(cls, packed: Any) -> RankState:
        """The inverse of `pack`. Raises a ConfigError for anything that `pack` cannot have returned."""
        saved = packed if isinstance(packed, dict) else {}
        lengths, start = saved.get("textchosen"), saved.get("epoch_start")
        lists = [[] if numbers is None else numbers for numbers in (lengths, start)]
        numbers = [saved.get("pass"), saved.get("batches")]
        if (
            not all(isinstance(given, list) for given in lists)
            or any(type(number) is not int or not 0 <= number <= MAX_BATCHES for number in chain(numbers, *lists))
            or len(lists[1]) not in (0, 2)
            or any(number > MAX_EPOCH for number in (saved["pass"], *lists[1][:1]))
        ):
            raise ConfigError(
                f"stream state: a rank's position must be whole numbers from 0 on: got {packed!r}; give the dictionary "
                "that state_dict() returned, or start anew"
            )
        in_passes = PassPosition(saved["pass"], saved["batches"])
        return cls(in_passes, lengths, PassPosition(*start) if start else None)


def identity(
    shards: Sequence[str],
    data: DataConfig,
    steps_per_epoch: int | None,
    *,
    spec: BatchSpec,
) -> dict[str, Any]:
    """What the batches of a stream depend on, by name: JSON. Number of ranks, folders and hosts may change."""
    names = "\n".join(display_name(shard).rsplit("/", 1)[-1] for shard in shards)
    shapes = {name: getattr(data, name) for name in ("text_buckets", "image_size", "image_buckets", "image_patches")}
    chosen = (sorted(shapes.items()), data.max_length, data.num_text_buckets)
    return {
        "shards": hash64(names.encode()),
        "num_shards": len(shards),
        "global_batch_size": data.global_batch_size,
        "steps_per_epoch": steps_per_epoch,
        "seed": data.seed,
        "shuffle": data.shuffle,
        "limit": data.max_rows,
        **spec.transform.identity(),
        **spec.text_transform.identity(),
        "patch_size": data.patch_size if data.image_patches is not None else None,
        "tokenizer": spec.tokenizer and spec.tokenizer.identity,
        **({"members": data.members.model_dump()} if data.members else {}),
        "shapes": hash64(repr(chosen).encode()),
    }


def check_identity(state: Mapping[str, Any], own: dict[str, Any]) -> None:
    """Raise a ConfigError if a state belongs to another stream; it names what differs."""
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

    If the state has none, because another number of ranks saved it or the ranks' states were not merged, returns the
    start of the first pass that no rank of the state has begun, and logs a warning.
    """
    given = state.get("ranks")
    ranks = {name: RankState.unpack(part) for name, part in given.items()} if isinstance(given, dict) else {}
    if state.get("world_size") == world_size and str(rank) in ranks:
        return ranks[str(rank)]
    number = max((part.in_passes.number for part in ranks.values()), default=-1) + 1
    logger.warning(
        "stream: the state has no position of rank %d of %d, which begins pass %d: some samples come twice, others "
        "later; with the same number of ranks and their states merged (`merge_states`) a stream goes on exactly",
        rank,
        world_size,
        number,
    )
    return RankState(PassPosition(number), None)
