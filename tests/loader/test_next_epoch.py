"""The workers go on into the next epoch, as far as ever, until somebody goes elsewhere; threads end with the loader."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mmdata import Batch, Loader
from mmdata.loader.workers.threads import Work
from mmdata.plan import Step
from tests.programs import PATIENCE_S, run_program
from tests.waiting import wait_until

from .conftest import Corpus

Same = Callable[[Batch, Batch], bool]


class Watched:
    """A loader with two threads, three batches ahead in all, and the steps that its worker has begun."""

    def __init__(self, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loader = corpus.loader(prefetch_batches=3)
        self.begun: list[tuple[int, int]] = []
        begun, begin = self.begun, self.loader.builder.begin  # the threads must not hold the loader

        def watched(step: Step, stop: threading.Event | None = None) -> Work:
            begun.append((step.epoch, step.number))
            return begin(step, stop)

        monkeypatch.setattr(self.loader.builder, "begin", watched)

    def begins(self, epoch: int, steps: list[int]) -> None:
        """Steps of an epoch that are begun once all threads wait: these, and no more."""

        def found() -> list[int]:
            return sorted(step for e, step in self.begun if e == epoch)

        wait_until(lambda: len(found()) >= len(steps))
        time.sleep(0.3)
        assert found() == steps


@pytest.fixture
def watched(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(corpus, monkeypatch)


def workers() -> list[str]:
    """Names of the threads, once loaders of earlier tests are gone."""
    gc.collect()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mmdata")]


def test_first_batches_of_the_next_epoch_are_made_before_it_is_asked_for(watched: Watched):
    assert len(list(watched.loader)) == 7
    watched.begins(1, [0, 1, 2])
    assert watched.loader.state_dict()["epoch"] == 1
    assert watched.loader.state_dict()["step"] == 0, "a state counts what was yielded"
    assert len(list(watched.loader)) == 7
    watched.begins(1, [0, 1, 2, 3, 4, 5, 6])  # each once


def left_at_the_end(loader: Loader) -> None:
    for _ in islice(loader, len(loader)):  # never asks for the end of the epoch, as Lightning and Hugging Face do
        pass


@pytest.mark.parametrize("tell", [lambda loader: None, lambda loader: loader.set_epoch(1)])
def test_loop_that_counts_to_len_finds_them_too(watched: Watched, tell: Callable[[Loader], None]):
    left_at_the_end(watched.loader)
    watched.begins(1, [0, 1, 2])
    tell(watched.loader)
    left_at_the_end(watched.loader)
    watched.begins(1, [0, 1, 2, 3, 4, 5, 6])


def test_another_epoch_gives_them_up(watched: Watched, corpus: Corpus, same: Same):
    first = list(watched.loader)
    watched.begins(1, [0, 1, 2])
    watched.loader.set_epoch(0)
    assert workers() == []
    assert all(same(a, b) for a, b in zip(watched.loader, first, strict=True))
    watched.begins(1, [0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("changes", [{}, {"num_processes": 1}])
@pytest.mark.sweep(keep=1)
def test_closed_loader_has_no_worker_and_goes_on_where_it_was(corpus: Corpus, same: Same, changes: dict[str, Any]):
    whole, others = list(corpus.loader()), children()
    with corpus.loader(**changes) as loader:
        some = [next(batches := iter(loader)), next(batches)]
        state = loader.state_dict()
    assert workers() == []
    assert set(children()) <= set(others)
    loader.load_state_dict(state)
    assert all(same(a, b) for a, b in zip([*some, *loader], whole, strict=True))
    loader.close()
    loader.close()
    assert workers() == []
    assert set(children()) <= set(others)


def children() -> list[str]:
    """Processes that this one has started and that run, by their numbers."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.mark.parametrize("changes", [{}, {"num_processes": 1}])
def test_state_loaded_between_epochs_gives_them_up(corpus: Corpus, same: Same, changes: dict[str, Any]):
    loader, whole = corpus.loader(**changes), list(corpus.loader())
    state = {**loader.state_dict(), "step": 4}
    for _ in range(2):
        assert all(same(a, b) for a, b in zip(loader, whole, strict=True))
        loader.load_state_dict(state)
        assert all(same(a, b) for a, b in zip(loader, whole[4:], strict=True))
        loader.set_epoch(0)


def test_dropped_loader_ends_its_threads(watched: Watched):
    list(watched.loader)
    assert len(workers()) == 3  # two that do the work, and one that begins it
    del watched.loader
    assert workers() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_loader_in_a_forked_child_makes_its_own(corpus: Corpus):
    program = """
import json, os, sys
import mmdata
loader = mmdata.Loader.from_config(json.loads(sys.argv[1]))
list(loader)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or len(list(loader)) - 7)
os._exit(len(list(loader)) - 7)
"""
    assert run(program, corpus) == (0, "")


@pytest.mark.parametrize("end", ["", "raise SystemExit", "next(iter(loader))"])
@pytest.mark.sweep(keep=1)
def test_program_ends_while_its_loader_has_more_to_make(corpus: Corpus, end: str):
    program = """
import json, sys
import mmdata
loader = mmdata.Loader.from_config(json.loads(sys.argv[1]))
list(loader)
"""
    assert run(program + end, corpus) == (0, "")


def run(program: str, corpus: Corpus) -> tuple[int, str]:
    """Exit code and what it wrote to stderr, of a program that is given the settings."""
    command = [sys.executable, "-W", "ignore", "-c", program, json.dumps(corpus.settings)]
    done = run_program(command, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stderr
