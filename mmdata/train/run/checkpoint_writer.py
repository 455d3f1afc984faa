"""Checkpoints written while the run goes on: each rank copies its share of the state, and a thread writes the copy.

One is written at a time, and a run does not end before it is written. An error of the writing is raised on all ranks,
at the next checkpoint, at an evaluation, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from typing_extensions import Self

from mmdata.errors import explain
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import on_all
from mmdata.train.run.checkpoint import Share, save_checkpoint


class CheckpointWriter:
    """Writes the checkpoints of a run, while entered. All ranks make one together.

    A rank that hangs or has an error of its own still writes its share, and its watchdog waits for that. Where a rank
    is gone, the checkpoint in progress cannot become whole: the one before it counts.

    Args:
        folder: of the checkpoints.
        keep: checkpoints to keep.
        say: prints a line.
        group: the ranks; None: this process alone.

    Example:
        with CheckpointWriter(folder, keep=2, say=print) as writer:
            writer.wait()  # first, so that there is one copy of a state at a time
            writer.save(state, background=True)
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        say: Callable[[str], object],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._folder, self._keep = folder, keep
        self._say, self._group = say, group
        # The threads agree through a group of their own, beside the run's collectives.
        own = None if group is None else dist.new_group(backend="gloo", timeout=collectives.TIMEOUT)
        self._own_group = cast("dist.ProcessGroup | None", own)
        self._threads: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        pinned = torch.cuda.is_available() and torch.cuda.is_initialized()
        # The current GPU of a new thread is the first one.
        self._on_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if pinned else None
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_non_blocking_copy=pinned,
                use_shared_memory=False,
                use_async_staging=False,
            )
        )

    def save(self, state: dict[str, Any], *, sound_step: int | None = None, background: bool) -> None:
        """Write a checkpoint, after a call of `wait`. A collective.

        Args:
            state: see `Share.of`; of each rank, with its shards.
            sound_step: see `save_checkpoint`.
            background: return as soon as the state is copied; False: when the checkpoint is written.

        Raises:
            OSError: the disk is full or read-only; on all ranks. In the background: from the next `wait`.
        """
        assert self._writing is None
        share = Share.of(state)
        if not background or self._threads is None:
            self._write(share, sound_step)
            return
        copied = replace(share, tensors=cast("dict[str, Any]", self._stager.stage(share.tensors)))
        self._writing = self._threads.submit(self._write, copied, sound_step)

    def wait(self) -> None:
        """Wait until the last checkpoint is written. A collective.

        Raises:
            OSError: the disk is full or read-only; on all ranks. The checkpoint before it is untouched.
        """
        on_all(self._end, self._group)

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(1, "mmdata-checkpoint", self._on_device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the write in progress, also after an error: its ranks do not come together any more.

        Where a rank has gone, the watchdog ends this process soon after the write, or five minutes after it knows;
        torchrun ends it 30 seconds after the rank has gone.
        """
        threads, self._threads = self._threads, None
        assert threads is not None
        threads.shutdown()
        self._stager.close()
        try:
            self._end()
        except Exception as failed:
            if error is None:
                raise
            why = explain(failed) if isinstance(failed, OSError) else failed
            self._say(f"the last checkpoint could not be written: {why}")

    def _end(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, share: Share, sound_step: int | None) -> None:
        save_checkpoint(self._folder, share, keep=self._keep, sound_step=sound_step, group=self._own_group)
