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

    A rank with an error of its own still writes its share. Where a rank is gone, the checkpoint in progress cannot
    become whole: the one before it counts.

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
        self._folder, self._keep, self._say, self._group = folder, keep, say, group
        # The threads agree through a group of their own, beside the run's collectives.
        own = None if group is None else dist.new_group(backend="gloo", timeout=collectives.TIMEOUT)
        self._own_group = cast("dist.ProcessGroup | None", own)
        self._threads: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        # DCP asks for the stream of the current GPU, which is the first one in a new thread.
        self._on_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if on_gpu else None

    def save(self, state: dict[str, Any], *, sound_step: int | None = None, background: bool) -> None:
        """Write a checkpoint, after a call of `wait`. A collective.

        Args:
            state: see `Share.of`; of each rank, with its shards.
            sound_step: see `save_checkpoint`.
            background: return as soon as the state is copied; False, and where a host has no memory for the copy: when
                the checkpoint is written.

        Raises:
            ConfigError: see `Share.of`.
            OSError: the disk is full or read-only; on all ranks. In the background: from the next `wait`.
        """
        assert self._writing is None
        share = Share.of(state)
        copied = self._copied(share) if background else None
        if copied is None or self._threads is None:
            self._write(share, sound_step)
        else:
            self._writing = self._threads.submit(self._write, copied, sound_step)

    def _copied(self, share: Share) -> Share | None:
        """The share with copies of its tensors; None where a rank has no memory for them. A collective."""
        copies: list[Any] = []

        def copy() -> str:
            # A stager of torch 2.11 copies once: then its tables are empty.
            stager = DefaultStager(StagingOptions(False, False, False, False))
            try:
                copies.append(stager.stage(share.tensors))
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "alloc" not in str(error):
                    raise
                return str(error).strip().partition("\n")[0] or type(error).__name__
            return ""

        if why := next(filter(None, on_all(copy, self._group)), ""):
            self._say(f"training waits for the checkpoint of step {share.step}: no memory for a copy of it ({why})")
            return None
        return replace(share, tensors=copies[0])

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

        Where a rank has gone, the write fails, and torchrun ends this process 30 seconds after the rank.
        """
        threads, self._threads = self._threads, None
        assert threads is not None
        threads.shutdown()
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
