"""How worker processes end, and what is left then: nothing; a killed one is an error that says how to go on."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack

import pytest

from mmdata import Batch
from mmdata.errors import LoadError
from tests.programs import PATIENCE_S
from tests.waiting import wait_until

from .conftest import Corpus
from .worker_processes import PROCESS, gone, nothing_left, open_files, program, transforms, worker_processes

Same = Callable[[Batch, Batch], bool]
__all__ = ["nothing_left"]  # a fixture

MOMENTS = {
    "before the first batch": (0, 0),
    "in mid-epoch": (0, 3),
    "before the last batch": (0, 6),
    "between epochs": (0, 7),
    "in the next epoch": (1, 2),
}


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.sweep(keep=1)
def test_worker_process_killed_is_an_error_and_resuming_is_exact(
    corpus: Corpus, same: Same, moment: str, num_processes: int
):
    loader, threads = corpus.loader(num_processes=num_processes), corpus.loader()
    for each in (loader, threads):
        list(each)
        each.set_epoch(0)
    gc.collect()
    files, whole = open_files(), [*threads, *threads]
    made = 0

    def take(kill_at: tuple[int, int]) -> None:
        """Take all batches that come until two epochs are over."""
        nonlocal made
        while (epoch := made // 7) < 2:
            for step, batch in enumerate(loader, start=made % 7):
                assert same(batch, whole[made])
                made += 1
                del batch
                if (epoch, step + 1) == kill_at:
                    kill()
            if kill_at == (epoch + 1, 0):
                kill()

    def kill() -> None:
        killed.append(worker_processes()[0])
        os.kill(killed[0], signal.SIGKILL)
        assert gone(killed[0])

    killed: list[int] = []
    at = MOMENTS[moment]
    if at == (0, 0):
        kill()
    with pytest.raises(LoadError) as caught:
        take(at)
    said = str(caught.value)
    del caught  # its traceback holds the loader
    assert re.match(
        rf"the loader's worker process {killed[0]} has ended \(killed by SIGKILL\) before (the batch of epoch [01], "
        r"step \d|it got '(begin|next)'); the kernel's out-of-memory killer does this where memory is short: lower "
        r"data\.loading\.prefetch_batches or data\.loading\.num_workers\. Resuming is exact: ",
        said,
    )
    assert worker_processes() == []
    loader.load_state_dict(loader.state_dict())
    take((-1, -1))
    assert made == 14
    assert len(worker_processes()) == num_processes
    loader.close()
    gc.collect()
    assert open_files() <= files


def test_worker_process_killed_by_a_batch_names_the_signal(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    transforms(
        tmp_path,
        monkeypatch,
        """
        import os, signal, torch

        def kill(image, size, generator):
            if image.shape[1] == 40:
                os.kill(os.getpid(), signal.SIGSEGV)
            return torch.zeros(3, *size, dtype=torch.uint8)
        """,
    )
    loader = corpus.loader(**PROCESS, num_workers=1, prefetch_batches=1, transform="my_transforms:kill")
    with pytest.raises(
        LoadError,
        match=r"worker process \d+ has ended \(killed by SIGSEGV\) before the batch of epoch 0, step \d; a defect in a "
        r"library .*\. Resuming is exact: ",
    ):
        list(loader)
    assert worker_processes() == []


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_worker_process_transform_that_would_end_a_program_is_an_error(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    transforms(tmp_path, monkeypatch, f"def end(image, size, generator):\n    raise {kind}('no licence')")
    with pytest.raises(LoadError, match=f"^{kind}: no licence$") as caught:
        list(corpus.loader(**PROCESS, transform="my_transforms:end"))
    assert "my_transforms.py" in str(caught.value.__cause__)
    assert worker_processes() == []


def test_worker_process_goes_on_into_the_next_epoch_while_nobody_asks(corpus: Corpus, same: Same):
    loader, threads = corpus.loader(**PROCESS), corpus.loader()
    assert all(same(a, b) for a, b in zip(loader, threads, strict=True))
    (pid,) = worker_processes()
    assert loader._source._processes[0]._connection.poll(PATIENCE_S)
    os.kill(pid, signal.SIGSTOP)  # what comes from here on was there before
    try:
        assert same(next(iter(loader)), next(iter(threads)))
    finally:
        os.kill(pid, signal.SIGCONT)


def test_worker_process_works_in_a_program_without_a_guard_and_ends_with_it(corpus: Corpus, tmp_path: Path):
    with program(corpus, tmp_path, "print(1 + len(list(batches)))\nsys.stdin.read()") as started:
        pids = worker_processes(started.pid)
        out, err = started.communicate(timeout=PATIENCE_S)
    assert (out, err, started.returncode) == ("7\n", "", 0)
    assert len(pids) == 1
    assert gone(pids[0])


def test_worker_process_ends_when_its_parent_is_killed(corpus: Corpus, tmp_path: Path):
    with program(corpus, tmp_path, "time.sleep(60)", num_processes=2) as started:
        pids = worker_processes(started.pid)
        started.kill()
        assert len(pids) == 2
        assert all(gone(pid) for pid in pids)
        assert started.communicate(timeout=PATIENCE_S) == ("", "")  # nobody holds its output open


def test_worker_process_ends_when_its_parent_is_killed_and_a_fork_of_it_lives(corpus: Corpus, tmp_path: Path):
    fork = """
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    time.sleep(60)
    """
    with program(corpus, tmp_path, fork) as started:
        (pid,) = worker_processes(started.pid)
        assert started.stdout is not None
        child = int(started.stdout.readline())
        started.kill()
        assert gone(pid)
        assert not gone(child, within_s=0.05)
        os.kill(child, signal.SIGKILL)


def test_worker_process_says_nothing_at_an_interrupt(corpus: Corpus, tmp_path: Path):
    with program(corpus, tmp_path, "while True:\n    list(loader)") as started:
        pids = worker_processes(started.pid)
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.communicate(timeout=PATIENCE_S)
    assert out == ""
    assert err.count("Traceback (most recent call last)") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "in the loader's worker process" not in err
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("import signal; signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
        ("import builtins; builtins.kept = loader, batches", 0, ""),
        ("import mmdata.loader.loader as gone; vars(gone).update(dict.fromkeys(vars(gone)))", 0, ""),
        ("from itertools import cycle; endless = cycle(loader); next(endless)", 0, ""),
    ],
)
@pytest.mark.sweep(keep=1)
def test_worker_process_says_nothing_when_a_program_ends_in_mid_epoch(
    corpus: Corpus, tmp_path: Path, end: str, code: int, last: str
):
    with program(corpus, tmp_path, end) as started:
        _, err = started.communicate(timeout=PATIENCE_S)
    assert (err.count("Traceback"), (err.splitlines() or [""])[-1], started.returncode) == (bool(last), last, code)


def functions(thread: threading.Thread) -> list[str]:
    """Names of those that a thread is in."""
    assert thread.ident is not None
    return [frame.f_code.co_name for frame, _ in walk_stack(sys._current_frames()[thread.ident])]


def test_worker_process_closed_while_a_thread_waits_is_an_error(corpus: Corpus):
    # As a daemon thread's at the end of the program.
    loader = corpus.loader(**PROCESS)
    raised: list[Exception] = []

    def wait() -> None:
        try:
            while True:
                list(loader)
        except LoadError as error:
            raised.append(error)

    next(iter(loader))
    (pid,) = worker_processes()
    os.kill(pid, signal.SIGSTOP)  # the thread soon waits for it
    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: "recv" in functions(thread))
    loader._source.close()
    thread.join(PATIENCE_S)
    message = rf"process {pid} was closed before the batch of epoch 0, step \d: the program ends, or another thread"
    assert re.search(message, str(raised[0]))
    assert worker_processes() == []


def test_worker_process_interrupted_loader_goes_on(corpus: Corpus, tmp_path: Path):
    # As a cell of a notebook: stopped by hand at any moment, and run again.
    more = """
    import signal
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(4):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            while True:
                list(loader)
        except KeyboardInterrupt:
            pass
    print(len(list(loader)))
    """
    with program(corpus, tmp_path, more) as started:
        assert started.communicate(timeout=PATIENCE_S) == ("7\n", "")


def test_worker_process_works_from_a_thread(corpus: Corpus, same: Same):
    found: list[Batch] = []
    thread = threading.Thread(target=lambda: found.extend(corpus.loader(**PROCESS)))
    thread.start()
    thread.join(PATIENCE_S)
    assert all(same(a, b) for a, b in zip(found, corpus.loader(), strict=True))
