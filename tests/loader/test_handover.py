"""Threads make batches while worker processes start: the same batches, whenever the handover comes."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from mmdata import Batch
from mmdata.errors import ConfigError, DataError
from mmdata.launcher import Ranks
from mmdata.loader.workers import choose, parent
from mmdata.loader.workers.handover import StoppableSteps
from mmdata.loader.workers.parent import WorkerProcesses
from tests.flat_settings import grouped
from tests.programs import PATIENCE_S, Program, run_program

from .conftest import Corpus
from .worker_processes import PROCESS, gone, wait_until_ready, worker_processes

Same = Callable[[Batch, Batch], bool]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert worker_processes() == []
    assert workers() == []


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Worker processes are forked from a template, and none is ready before the event is set, as if it started slowly.

    In the tests without this fixture they are new interpreters.
    """
    monkeypatch.setattr(parent, "subprocess", SimpleNamespace(Popen=Program, DEVNULL=subprocess.DEVNULL))
    event, are_ready = threading.Event(), WorkerProcesses.are_ready
    monkeypatch.setattr(WorkerProcesses, "are_ready", lambda self, *at: are_ready(self, *at) and event.is_set())
    return event


def workers() -> list[str]:
    """Worker threads of this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mmdata-worker")]


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("ready_at", [1, 3, 6, 7, 9])
def test_handover_gives_the_batches_of_threads_wherever_it_hands_over(
    corpus: Corpus, same: Same, ready: threading.Event, ready_at: int, num_processes: int
):
    loader = corpus.loader(num_workers=2, num_processes=num_processes, **PROCESS)
    threads = corpus.loader(worker_type="thread")
    steps = 0
    for _ in range(3):  # of 7 steps
        for batch, whole in zip(loader, threads, strict=True):
            assert same(batch, whole)
            steps += 1
            assert loader._source._threads or steps >= ready_at
            if steps == ready_at:
                ready.set()
                wait_until_ready(loader)
    assert loader._source._threads is None
    assert loader.state_dict() == threads.state_dict()
    assert (loader.stats.rows, loader.ledger.masked) == (threads.stats.rows, threads.ledger.masked) == (150, {})
    assert len(worker_processes()) == num_processes


def test_handover_starts_with_threads_and_ends_without(corpus: Corpus):
    loader = corpus.loader(**PROCESS)
    batches = iter(loader)
    next(batches)
    assert len(workers()) == 2
    wait_until_ready(loader)
    for batch in batches:
        del batch
    assert workers() == []
    (pid,) = worker_processes()
    loader.set_epoch(0)
    assert len(list(loader)) == 7  # by the process alone, from the first step on
    assert (workers(), worker_processes()) == ([], [pid])


def test_handover_hands_over_batches_that_are_in_progress_to_nobody(corpus: Corpus, same: Same, ready: threading.Event):
    # The process dies after it has been told where to begin: the threads' batches come, and then those of another.
    loader, whole = corpus.loader(**PROCESS), list(corpus.loader(worker_type="thread"))
    batches = iter(loader)
    assert same(next(batches), whole[0])
    ready.set()
    wait_until_ready(loader)
    assert same(next(batches), whole[1])
    (pid,) = worker_processes()
    os.kill(pid, signal.SIGKILL)
    assert all(same(a, b) for a, b in zip(batches, whole[2:], strict=True))


@pytest.mark.parametrize("left_at", [0, 2, 6])
def test_handover_left_in_the_middle_begins_anew_with_threads_then_processes(
    corpus: Corpus, same: Same, ready: threading.Event, left_at: int
):
    loader, whole = corpus.loader(**PROCESS), list(corpus.loader(worker_type="thread"))
    for when in ("starting", "starting", "ready", "ready"):
        if when == "ready":
            ready.set()
            wait_until_ready(loader)
        loader.set_epoch(0)
        for step, batch in enumerate(loader):
            assert same(batch, whole[step])
            if step == left_at:
                break
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 4})
    assert all(same(a, b) for a, b in zip(loader, whole[4:], strict=True))
    assert len(worker_processes()) == 1


def test_handover_of_a_process_killed_while_it_starts(corpus: Corpus, same: Same, caplog: pytest.LogCaptureFixture):
    loader, threads = corpus.loader(**PROCESS), corpus.loader(worker_type="thread")
    batches = iter(loader)
    first = next(batches)
    (killed,) = worker_processes()
    os.kill(killed, signal.SIGKILL)
    assert gone(killed)
    second = next(batches)
    wait_until_ready(loader)
    assert all(same(a, b) for a, b in zip([first, second, *batches], threads, strict=True))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        f"the loader's worker process {killed} has ended (killed by SIGKILL) while it opened the index"
    )
    assert said.endswith("Another continues at epoch 0, step 1; no batch is lost")
    assert killed not in worker_processes()


def test_handover_dropped_before_the_process_is_ready_leaves_nothing(corpus: Corpus):
    loader = corpus.loader(**PROCESS)
    batches = iter(loader)
    next(batches)
    (pid,) = worker_processes()
    del batches, loader
    gc.collect()
    with pytest.raises(ProcessLookupError):  # no zombie either
        os.kill(pid, 0)


def test_handover_of_a_forked_child_has_threads_of_its_own(corpus: Corpus):
    loader = corpus.loader(**PROCESS)
    batches = iter(loader)
    next(batches)
    pid = os.fork()
    if pid == 0:
        done = 1
        with suppress(BaseException):
            done = 0 if len(list(loader)) == 7 else 2
            loader._source._processes.close()
        os._exit(done)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(batches)) == 6


def test_handover_error_of_a_process_that_starts_ends_the_epoch(corpus: Corpus, tmp_path: Any):
    changed = corpus.copy(tmp_path / "corpus")
    loader = changed.loader(**PROCESS)
    batches = iter(loader)
    next(batches)
    (folder := changed.folder / "tokenizer").rename(changed.folder / "elsewhere")
    assert loader._source._processes._processes[0]._channel.wait(PATIENCE_S)
    with pytest.raises(ConfigError, match=f"'{folder}'"):
        next(batches)
    assert (worker_processes(), workers()) == ([], [])


def test_handover_that_was_chosen_stays_with_threads_where_no_process_starts(
    corpus: Corpus, same: Same, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(choose, "has_gpu", lambda: True)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    loader, threads = corpus.loader(), corpus.loader(worker_type="thread")
    for _ in range(2):
        assert all(same(a, b) for a, b in zip(loader, threads, strict=True))
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith("data.loading.worker_type process: '/nowhere/python' cannot be started: ")
    assert said.endswith(". Threads of this process make all batches")
    with pytest.raises(ConfigError, match="'/nowhere/python' cannot be started"):
        next(iter(corpus.loader(**PROCESS)))


def test_handover_error_of_a_worker_is_the_threads(corpus: Corpus, tmp_path: Any):
    damaged = corpus.copy(tmp_path / "corpus")
    loader = damaged.loader(**PROCESS)
    path = damaged.index.shard_path(1)
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(DataError, match=r"the shard changed"):
        list(loader)
    assert workers() == []


def test_stoppable_steps_end_where_the_processes_begin(corpus: Corpus):
    loader = corpus.loader(worker_type="thread")
    steps = StoppableSteps(loader.plan, loader.maker, Ranks())

    def position(taken: int) -> tuple[int, int] | None:
        rest = steps.begin(3, 5)
        for _ in range(taken):
            next(rest)
        end = steps.end()
        assert next(rest, None) is None
        return end

    assert [position(taken) for taken in (0, 1, 2, 3)] == [(3, 5), (3, 6), (4, 0), (4, 1)]


def test_handover_in_a_program_that_ends_while_the_process_starts(corpus: Corpus):
    program = (
        "import json, sys, mmdata\n"
        "loader = mmdata.Loader.from_config(json.loads(sys.argv[1]))\n"
        "print(len(next(iter(loader))['rows']), type(loader._source).__name__)\n"
    )
    settings = json.dumps(grouped(**corpus.settings, **PROCESS))
    done = run_program([sys.executable, "-c", program, settings], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr, done.returncode) == ("8 StartupHandover\n", "", 0)
