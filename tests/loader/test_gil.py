"""The share of a function's time with the GIL: Python code against calls into C++ that let go of it."""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmdata.loader.workers.gil_share import Held, time_with_gil


def squares(count: int) -> int:
    return sum(i * i for i in range(count))


def resized(image: Tensor) -> Tensor:
    return interpolate(image, (224, 224), mode="bicubic", antialias=True)


@pytest.fixture(scope="module")
def photo() -> Tensor:
    return torch.zeros(1, 3, 1000, 1000, dtype=torch.uint8)


def test_gil_share_tells_python_from_a_resize(photo: Tensor):
    # Other programs on the same cores blur a share, and each of the two needs but one measurement that they do not.
    tries = range(20)
    assert any(time_with_gil(squares, [20_000, 10_000]).share > 0.7 for _ in tries)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        assert any(pool.submit(time_with_gil, resized, [photo]).result().share < 0.3 for _ in tries)


def test_gil_every_item_is_called(photo: Tensor):
    called: list[int] = []
    time_with_gil(called.append, [1, 2, 3], seconds=0.0)
    assert called[:3] == [1, 2, 3]


def test_gil_share_is_part_of_both_times():
    assert Held(held_s=0.001, free_s=0.003).share == 0.25
    assert Held(0.0, 0.0).share == 0.0


def test_gil_measure_ends_at_ctrl_c():
    threads = threading.active_count()

    def interrupts(item: int) -> None:
        signal.raise_signal(signal.SIGINT)
        squares(item)

    with pytest.raises(KeyboardInterrupt):
        time_with_gil(interrupts, [10_000], seconds=600.0)
    assert threading.active_count() == threads


def test_gil_measure_hands_on_an_error_and_leaves_nothing_behind():
    interval, threads = sys.getswitchinterval(), threading.active_count()

    def fails(item: int) -> None:
        raise KeyError(item)

    with pytest.raises(KeyError, match="7"):
        time_with_gil(fails, [7])
    time_with_gil(squares, [100], seconds=0.01)
    assert (sys.getswitchinterval(), threading.active_count()) == (interval, threads)
