"""Batches on their way to the device: the next batch is copied while the current one is in use.

The state counts the batches that the caller got, not those taken ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mmdata.batch import Batch, to_device, to_move
from mmdata.train.batches import Batches, LoaderExtras

T = TypeVar("T")
_HandOn = Callable[[], Batch]
"""Gives a batch that was copied to the current stream."""


class DevicePrefetcher:
    """The batches of a loader, their tensors on a device.

    On a GPU the next batch is taken and copied before the current one is yielded: through pinned memory, on a stream of
    its own, as uint8. On a CPU the loader's own batches are yielded, and none is taken ahead.

    The seconds that the calling thread spends on copies are added to the loader's clock, as `stats.transfer_s`.

    Args:
        batches: a loader.
        device: of the tensors; other entries of a batch stay as they are.
        took: called as soon as a batch was taken, with it, or with the exception that came instead (StopIteration at
            the end of the epoch). With it a batch is taken ahead on a CPU too.

    Example:
        loader = DevicePrefetcher(Loader.from_config("configs/scenes.yaml"), "cuda")
        for batch in loader:
            step(batch)
    """

    def __init__(
        self, batches: Batches, device: torch.device | str, *, took: Callable[[Batch | Exception], None] | None = None
    ) -> None:
        self.batches = batches
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):  # the current GPU of each thread, and a new thread's is the first one
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._took = took
        self._state: dict[str, Any] | None = None  # of the loader, before the batch ahead was taken
        self._last = False  # the loader has ended its epoch, so there is no batch ahead
        self._iteration = 0  # number of the newest iteration; an older one must not go on

    @property
    def stats(self) -> Any:
        """The loader's clock, a `mmdata.loader.Stats`; None if it keeps none."""
        return LoaderExtras.of(self.batches).stats

    def __len__(self) -> int:
        """As the loader's."""
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """As the loader's; its position is that after the last batch yielded, not after the batch ahead."""
        if epoch == self._epoch_left():
            return  # the epoch goes on; the loader, a batch ahead, may already be at its end
        self._end_iteration()
        self.batches.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch that was yielded."""
        return self.batches.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As the loader's."""
        self._end_iteration()
        self.batches.load_state_dict(state)

    def _end_iteration(self) -> None:
        self._iteration += 1
        self._state = None

    def _epoch_left(self) -> int | None:
        """The epoch that the yielded batches have begun and not ended; None between epochs."""
        return None if self._state is None or self._last else self._state.get("epoch")

    def __iter__(self) -> Iterator[Batch]:
        """The loader's batches; an error of the loader is raised after the batches that came before it.

        Raises:
            RuntimeError: asked for another batch after `set_epoch`, `load_state_dict` or a newer iteration has moved
                the position.
        """
        if self.device.type == "cpu" and self._took is None:
            return iter(self.batches)
        return self._one_ahead()

    def _one_ahead(self) -> Iterator[Batch]:
        copy, left = _copies_to(self.device), self._epoch_left()
        self._end_iteration()
        iteration = self._iteration
        if left is not None:
            self.batches.set_epoch(left)  # begins it again: the loader, a batch ahead, may already be at its end
        batches = iter(self.batches)
        ahead = self._take(batches, copy)
        while not isinstance(ahead, Exception):
            if iteration != self._iteration:
                raise RuntimeError(
                    "this iteration has ended early: set_epoch, load_state_dict or a newer iteration has moved the "
                    "loader's position; iterate again to go on from there"
                )
            batch = self._timed(ahead)
            self._state = self.batches.state_dict()
            ahead = self._take(batches, copy)
            self._last = isinstance(ahead, StopIteration)
            yield batch
            del batch  # its memory may be needed for the next one
        if iteration == self._iteration:
            self._state = None
        if not isinstance(ahead, StopIteration):
            raise ahead

    def _take(self, batches: Iterator[Batch], copy: Callable[[Batch], _HandOn]) -> _HandOn | Exception:
        """The next batch, with its copy under way, or the error that came instead."""
        try:
            came: Batch | Exception = next(batches)
            taken: _HandOn | Exception = self._timed(partial(copy, came))
        except Exception as error:
            came = taken = error
        if self._took is not None:
            self._took(came)
        return taken

    def _timed(self, do: Callable[[], T]) -> T:
        """Add the time of a call to the loader's clock."""
        started = perf_counter()
        done = do()
        if self.stats is not None:
            self.stats.transfer_s += perf_counter() - started
        return done


def copied(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, Batch]]:
    """Each batch, and the same with its tensors on `device`; the host does not wait for the copy to a GPU."""
    copy = _copies_to(device)
    for batch in batches:
        yield batch, copy(batch)()
        del batch  # its memory may be needed for the next one


def _copies_to(device: torch.device) -> Callable[[Batch], _HandOn]:
    """Begins to copy a batch to a device; calling the result gives the batch."""
    if device.type != "cuda":
        return lambda batch: partial(to_device, batch, device)
    stream = torch.cuda.Stream(device)

    def copy(batch: Batch) -> _HandOn:
        # torch keeps pinned memory for the next batch, and gives it out again once the copy from it is done.
        pinned = {name: v.pin_memory() if to_move(v, name) and v.is_cpu else v for name, v in batch.items()}
        # The memory on the device is allocated on this stream, which waits for no other.
        with torch.cuda.stream(stream):
            moved = to_device(cast(Batch, pinned), device)
        return partial(hand_on, moved)

    def hand_on(moved: Batch) -> Batch:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for value in moved.values():
            if isinstance(value, Tensor) and value.is_cuda:
                # Once freed, the memory must not be reused before the work enqueued on this stream by then is done.
                value.record_stream(current)
        return moved

    return copy


class HostCopy:
    """Copies of tensors of one device to the host, begun now and read later; on a CPU the tensors themselves.

    Args:
        tensors: at least one; do not change them in place before `read`.

    Example:
        coming = HostCopy(loss)
        next_step()
        loss_before = float(coming.read()[0])
    """

    def __init__(self, *tensors: Tensor) -> None:
        # Of other GPUs than CUDA's the copies are waited for here: none of their events would be.
        self._tensors = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
        self._done: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> list[Tensor]:
        """The copies, in order."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
