"""`num_workers: auto`: what the tuner makes of numbers, and two real runs."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from mmdata.loader.workers import autotune
from mmdata.loader.workers.autotune import AGAIN, LONG, Tuner

from .conftest import Corpus


def look(tuner: Tuner, rate: float, share: float) -> int:
    """As many batches of 100 rows as one look takes, and those before it that do not count."""
    for _ in range(3 + 10):
        count = tuner.add(100, 100 / rate, share * 100 / rate)
    return count


def skipped_look(tuner: Tuner, rate: float, share: float) -> int:
    """The same, where no batch is left out because nothing changed."""
    for _ in range(10):
        count = tuner.add(100, 100 / rate, share * 100 / rate)
    return count


def test_tuner_adds_workers_as_long_as_they_help(caplog: pytest.LogCaptureFixture):
    tuner = Tuner(most=8)
    assert tuner.count == 2
    with caplog.at_level(logging.INFO, "mmdata"):
        assert look(tuner, 40, 0.6) == 3
        assert look(tuner, 50, 0.4) == 3  # judged: kept
        assert skipped_look(tuner, 50, 0.4) == 4
        assert look(tuner, 50.5, 0.4) == 3  # judged: taken back
    assert caplog.messages == [
        "num_workers auto: 2 → 3 workers: 40 → 50 samples/s (+25%), waiting 60% → 40% of the time",
        "num_workers auto: 3 → 4 workers: 50 → 50 samples/s (+1%), waiting 40% → 40% of the time; back to 3",
    ]


def test_tuner_looks_over_epochs_that_are_shorter_than_one_look():
    tuner, counts = Tuner(most=8), []
    for _ in range(4):
        tuner.pause()
        counts.append([tuner.add(100, 2.5, 1.5) for _ in range(3 + 4)])
    # Four batches of each epoch count, and ten make a look.
    assert counts == [[2] * 7, [2] * 7, [2] * 4 + [3] * 3, [3] * 7]


def test_tuner_tries_again_later_and_ever_more_rarely():
    tuner = Tuner(most=8)
    look(tuner, 40, 0.6)
    assert look(tuner, 40, 0.6) == 2
    waits: list[int] = []
    for _ in range(2):
        looks = 1
        look_once = look  # the first after a change
        while look_once(tuner, 40, 0.6) == 2:
            looks, look_once = looks + 1, skipped_look
        waits.append(looks)
        assert look(tuner, 40, 0.6) == 2
    assert waits == [AGAIN, 2 * AGAIN]


def test_tuner_leaves_a_loop_that_does_not_wait():
    tuner = Tuner(most=8)
    assert [look(tuner, 40, 0.01) for _ in range(2 * LONG)] == [2] * 2 * LONG


def test_tuner_takes_a_worker_away_after_a_long_while_and_gives_it_back_when_it_is_missed():
    tuner = Tuner(most=8, start=4)
    looks = 1
    while skipped_look(tuner, 40, 0.0) == 4:
        looks += 1
    assert looks in (LONG, LONG + 1)  # the first batches are in no look
    assert tuner.count == 3
    assert look(tuner, 30, 0.3) == 4


def test_tuner_has_at_most_the_cores_and_steps_of_a_quarter():
    tuner, counts = Tuner(most=13, start=10), []
    rate = 40.0
    for _ in range(6):
        counts.append(look(tuner, rate, 0.5))
        rate *= 1.2
    assert counts == [12, 12, 13, 13, 13, 13]
    assert [look(Tuner(most=1), 40, 0.9) for _ in range(2)] == [1, 1]


class Slow:
    """A transform that waits as a disk or a call into a library does: without the interpreter's lock."""

    def __init__(self, write: Any, seconds: float) -> None:
        self.write, self.seconds = write, seconds

    def __call__(self, *arguments: Any, **more: Any) -> None:
        time.sleep(self.seconds)
        self.write(*arguments, **more)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "INTERVAL_S", 0.1)
    monkeypatch.setattr(autotune, "INTERVAL_BATCHES", 4)
    monkeypatch.setattr("mmdata.loader.workers.threads.usable_cores", lambda: 6)


def workers_after(corpus: Corpus, *, row_s: float, step_s: float, epochs: int, **changes: Any) -> int:
    loader = corpus.loader(num_workers="auto", workers="thread", **changes)
    transform: Any = loader.worker.transform
    transform.write = Slow(transform.write, row_s)
    for _ in range(epochs):
        for _batch in loader:
            time.sleep(step_s)
    source: Any = loader._source
    return source._tuner.count


def test_loader_that_keeps_its_caller_waiting_has_more_workers_in_the_end(corpus: Corpus, quick: None):
    assert workers_after(corpus, row_s=0.02, step_s=0.0, epochs=12) > 2


def test_loader_of_a_slow_caller_does_not_grow(corpus: Corpus, quick: None):
    assert workers_after(corpus, row_s=0.0, step_s=0.15, epochs=3) <= 2


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_batches_are_the_same_with_any_number_of_workers(corpus: Corpus, same: Any, workers: str):
    whole = list(corpus.loader(num_workers=0))
    loader = corpus.loader(num_workers="auto", workers=workers)
    assert all(same(a, b) for a, b in zip(loader, whole, strict=True))
