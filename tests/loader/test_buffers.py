"""Memory of batches: never used again while anything still looks at it, and used again after."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mmdata.loader.workers import buffers
from mmdata.loader.workers.buffers import BufferPool
from tests.programs import PATIENCE_S

SHAPE = (2, 3, 4, 5)


def test_ring_lends_what_was_asked_for_and_its_memory_again_when_that_was_dropped():
    ring = BufferPool()
    tensor = ring.lend(SHAPE)
    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (torch.uint8, SHAPE, True)
    place = tensor.data_ptr()
    del tensor
    assert ring.lend(SHAPE).data_ptr() == place
    assert ring.lend((1, 3, 2, 2)).data_ptr() == place  # a smaller one fits into it


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[1],
        lambda tensor: tensor.permute(0, 2, 3, 1),
        lambda tensor: tensor.view(-1)[-1:],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.numpy()[0, 1:, ::2],
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: tensor.detach(),
        lambda tensor: torch.as_tensor(tensor.numpy()),
    ],
)
def test_ring_keeps_memory_that_something_still_looks_at(view):
    ring = BufferPool()
    tensor = ring.lend(SHAPE).fill_(7)
    kept = view(tensor)
    del tensor
    others = [ring.lend(SHAPE).fill_(9) for _ in range(3)]
    assert (np.asarray(kept) == 7).all()
    assert all((other == 9).all() for other in others)


class Allocated:
    """Allocates in place of numpy, and knows how many of its arrays are alive."""

    uint8 = np.uint8

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[NDArray[np.uint8]]] = []

    def empty(self, size: int, dtype: type[np.uint8]) -> NDArray[np.uint8]:
        array = np.empty(size, dtype)
        self._arrays.append(weakref.ref(array))
        return array

    def __len__(self) -> int:
        return sum(array() is not None for array in self._arrays)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Allocated:
    counting = Allocated()
    monkeypatch.setattr(buffers, "np", counting)
    return counting


def test_ring_replaces_memory_that_is_too_small(allocated: Allocated):
    ring = BufferPool()
    for side in range(1, 50):
        ring.lend((1, 3, side, side))
    assert len(allocated) == 1


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that interrupts")
def test_an_interrupt_is_not_lost_where_memory_comes_back(monkeypatch, no_gc_callbacks: None):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    before = signal.signal(signal.SIGALRM, interrupt)
    caught = 0
    try:
        for i in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + i * 1e-6)
                ring = BufferPool()
                for _ in range(3000):
                    ring.lend(SHAPE)
            except KeyboardInterrupt:
                caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (caught, lost) == (300, [])


def test_ring_serves_many_threads(allocated: Allocated):
    ring = BufferPool()
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(300):
            tensor = ring.lend(SHAPE).fill_(value)
            if not (tensor == value).all():
                wrong.append(value)
            del tensor

    threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    assert len(allocated) <= 6


def test_ring_does_not_wait_for_itself_when_garbage_is_collected():
    # A tensor in a reference cycle ends when the collector runs, and that may be in the midst of lend().
    ring = BufferPool()

    def work() -> None:
        kept = []
        for threshold in range(1, 40):
            gc.set_threshold(threshold)
            for _ in range(150):
                cycle: list[object] = [ring.lend((1, 3, 8, 8))]
                cycle.append(cycle)
                del cycle
                kept.append([])

    before = gc.get_threshold()
    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "deadlock"
    finally:
        gc.set_threshold(*before)
