"""Checkpoints written while the run goes on: rank 0 copies the state, and a thread writes the copy.

One is written at a time, and a run does not end before it is written. An error of the writing is raised on all ranks,
at the next checkpoint, at an evaluation, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from mmdata.errors import explain
from mmdata.train.device_thread import device_thread
from mmdata.train.ranks.lockstep import on_first
from mmdata.train.ranks.sharding import local_part
from mmdata.train.run.checkpoint import save_checkpoint


class CheckpointWriter:
    """Writes the checkpoints of a run, while entered.

    Args:
        folder: of the checkpoints.
        keep: checkpoints to keep.
        written: called with the step of each checkpoint once it is whole, on rank 0; in the thread that wrote it.
        say: prints a line.
        group: the ranks; None: this process alone.

    Example:
        with CheckpointWriter(folder, keep=2, written=print, say=print) as writer:
            writer.wait()  # first, so that there is one copy of a state at a time
            writer.save(state, background=True)
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
        self._folder, self._keep = folder, keep
        self._written, self._say = written, say
        self._group = group
        self._threads: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._busy = Event()

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written at this moment, by this process."""
        return self._busy.is_set()

    def save(self, state: dict[str, Any], *, sound_step: int | None = None, background: bool) -> None:
        """Write a checkpoint, after a call of `wait`. A collective.

        Args:
            state: see `save_checkpoint`; its dicts become the writer's. Only rank 0's is written.
            sound_step: see `save_checkpoint`.
            background: return as soon as the state is copied; False: when the checkpoint is written. A state that the
                memory does not hold twice is always written before this returns.

        Raises:
            OSError: the disk is full or read-only; on all ranks. In the background: from the next `wait`.
        """

        assert self._writing is None

        def begin() -> None:
            if background and self._threads is not None and self._copied(state):
                self._writing = self._threads.submit(self._write, state, sound_step)
            else:
                self._write(state, sound_step)

        # All ranks wait for what rank 0 does here: the end of one would stop rank 0 while it writes.
        on_first(begin, self._group)

    def wait(self) -> None:
        """Wait until the last checkpoint is written. A collective.

        Raises:
            OSError: the disk is full or read-only; on all ranks. The checkpoint before it is untouched.
        """
        on_first(self._end, self._group)

    def __enter__(self) -> Self:
        self._threads = device_thread("mmdata-checkpoint")
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

    def _copied(self, state: dict[str, Any]) -> bool:
        try:
            snapshot(state)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._say("memory does not hold the state of the run twice: training waits until the checkpoint is written")
            return False
        return True

    def _write(self, state: dict[str, Any], sound_step: int | None) -> None:
        self._busy.set()
        try:
            self._publish(state, sound_step)
        finally:
            self._busy.clear()

    def _publish(self, state: dict[str, Any], sound_step: int | None) -> None:
        save_checkpoint(self._folder, state, keep=self._keep, sound_step=sound_step)
        self._written(int(state["step"]))


def snapshot(state: dict[str, Any]) -> None:
    """Replace all values of a state by copies in the host's memory, also in dicts within it.

    One value after the other, so that tensors which nobody else has are not in memory twice, and an error leaves a
    state that is whole.

    Tensors that share memory, as tied weights do, share that of one copy, which `torch.save` writes once.

    Raises:
        MemoryError, RuntimeError: see `is_out_of_memory`.
    """
    _replace(state, {})


def _replace(state: dict[str, Any], copies: dict[object, Tensor]) -> None:
    for name, value in state.items():
        if isinstance(value, dict):
            _replace(cast("dict[str, Any]", value), copies)
        elif not isinstance(value, Tensor):
            state[name] = deepcopy(value)
        elif not local_part(value).numel():
            state[name] = value.detach().to("cpu", copy=True)
        else:
            part = local_part(value)  # all shares of this process have the address 0
            where = (part.device, part.data_ptr(), part.dtype, value.shape, part.stride())
            # All tensors of the state were there before the first copy, so an address names one of them.
            if where not in copies:
                copies[where] = value.detach().to("cpu", copy=True)
            state[name] = copies[where]


def is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether the host had no memory; torch says so in a RuntimeError."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
