"""Sharded checkpoints written while the run goes on: each rank copies its shares, and a thread writes the copy.

The ranks' threads agree through a group of their own, so that the run's collectives go on beside theirs. Rank 0 gives
the folder its name when all shards are on the disk.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import on_all, on_first
from mmdata.train.run.checkpoint import begin_checkpoint, checkpoint_name, point_at, publish_folder, write_state
from mmdata.train.run.checkpoint_writer import CheckpointWriter
from mmdata.train.run.sharded_checkpoint import PATHS, own_part, paths_by_name, split, write_shards


class ShardedCheckpointWriter(CheckpointWriter):
    """As `CheckpointWriter`, for a state whose tensors are shared out over the ranks; all ranks write. A collective.

    A rank that hangs or has an error of its own still writes its shares, and the watchdog of each rank waits for that.
    Where a rank is gone, the checkpoint in progress cannot become whole: the one before it counts.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        written: Callable[[int], object] = lambda step: None,
        say: Callable[[str], object],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(folder, keep=keep, written=written, say=say, group=group)
        own = None if group is None else dist.new_group(backend="gloo", timeout=collectives.TIMEOUT)
        self._own_group = cast("dist.ProcessGroup | None", own)

    def save(self, state: dict[str, Any], *, sound_step: int | None = None, background: bool) -> None:
        """As `CheckpointWriter.save`; the state of each rank, with shares in it."""
        assert self._writing is None
        tensors, rest = split(state)
        parts: dict[str, Any] = {
            "tensors": own_part(tensors, collectives.rank(), collectives.world_size()),
            "rest": {**rest, PATHS: paths_by_name(tensors)} if collectives.rank() == 0 else {},
            "step": state["step"],
        }
        aside = self._folder / f".{checkpoint_name(state['step'], sharded=True)}.part"

        def begin() -> None:
            begin_checkpoint(self._folder)
            aside.mkdir()

        on_first(begin, self._group)
        threads = self._threads if background else None
        copied = on_all(lambda: threads is not None and self._copied(parts), self._group)
        if threads is not None and all(copied):
            self._writing = threads.submit(self._write, parts, sound_step)
        else:
            self._write(parts, sound_step)

    def wait(self) -> None:
        """As `CheckpointWriter.wait`."""
        on_all(self._end, self._group)

    def _publish(self, state: dict[str, Any], sound_step: int | None) -> None:
        path = self._folder / checkpoint_name(state["step"], sharded=True)
        aside = path.with_name(f".{path.name}.part")
        rest = io.BytesIO()
        write_state(state["rest"], rest)
        write_shards(aside, state["tensors"], rest.getvalue(), group=self._own_group)

        def publish() -> None:
            publish_folder(aside, path)
            point_at(path, keep=self._keep, sound_step=sound_step)
            self._written(int(state["step"]))

        on_first(publish, self._own_group)
