"""What is no fault of a sample ends the iteration at once, says where it happened, and leaves no thread."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmdata import Loader
from mmdata.errors import LoadError
from mmdata.images.pixels import Written
from tests.programs import PATIENCE_S, Program

from .conftest import Corpus


def outcome(loader: Loader) -> BaseException | None:
    """What an epoch ends with, within 30 seconds; no thread of the loader may be left."""
    result: list[BaseException] = []

    def load() -> None:
        try:
            list(loader)
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the loader hangs"
    assert [t.name for t in threading.enumerate() if t.name.startswith("mmdata")] == []
    return result[0] if result else None


def step_of(corpus: Corpus, row: int) -> int:
    return next(step for step, batch in enumerate(corpus.loader()) if row in batch["rows"])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "words"), [(KeyError("colour"), "KeyError: 'colour'"), (MemoryError("full"), "MemoryError: full")]
)
def test_error_in_a_worker_names_the_row(
    corpus: Corpus, num_workers: int, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
):
    loader = corpus.loader(num_workers=num_workers)
    write = loader.builder.spec.transform.write

    def fail_at_33(*arguments: Any, number: int, **named: Any) -> Written:
        if number == 33:
            raise error
        return write(*arguments, number=number, **named)

    monkeypatch.setattr(loader.builder.spec.transform, "write", fail_at_33)
    found = outcome(loader)
    assert isinstance(found, LoadError)
    step = step_of(corpus, 33)
    assert str(found) == (
        f"epoch 0, step {step}, shard '000001.tar', sample '00033': {words}; "
        "`mmdata replay CONFIG 33 --epoch 0` makes this row alone"
    )
    assert found.__cause__ is error
    assert loader.state_dict()["step"] == step, "the batches before it came"


def test_no_memory_for_the_pixels_names_the_rows_of_the_batch(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    loader = corpus.loader(shuffle=False, text_buckets=[32], image_buckets=None, image_size=32)

    def fail(*arguments: object) -> None:
        raise MemoryError("full")

    monkeypatch.setattr("mmdata.loader.unfinished.BatchPixels", fail)
    assert str(outcome(loader)) == "epoch 0, step 0, 8 rows, the first [0]: MemoryError: full"


def test_error_in_the_tokenizer_names_the_rows_of_the_batch(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    loader = corpus.loader(shuffle=False, text_buckets=[32], image_buckets=None, image_size=32)
    monkeypatch.setattr("mmdata.text.tokenizer.Tokenizer.encode", lambda *arguments: 1 // 0)
    found = outcome(loader)
    assert str(found) == "epoch 0, step 0, 8 rows, the first [0]: ZeroDivisionError: integer division or modulo by zero"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds open shards in /proc")
def test_disk_that_stops_answering_is_named(corpus: Corpus, tmp_path: Path):
    loader = corpus.copy(tmp_path / "corpus").loader()
    iterator = iter(loader)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    folder = os.open(tmp_path, os.O_RDONLY)
    for link in Path("/proc/self/fd").iterdir():  # from here on reading a shard is an error of the system
        if link.is_symlink() and os.readlink(link).startswith(str(tmp_path)) and os.readlink(link).endswith(".tar"):
            os.dup2(folder, int(link.name))
    os.close(folder)
    found = outcome(loader)
    assert isinstance(found, LoadError)
    assert isinstance(found.__cause__, OSError)
    assert found.__cause__.errno == errno.EISDIR
    assert str(found).startswith("epoch 0, step 0, shard '00000")
    assert "': IsADirectoryError: [Errno 21] Is a directory; `mmdata replay CONFIG " in str(found)


PROGRAM = """
import sys, threading, time
from mmdata import Loader

def train():
    while True:
        for batch in Loader.from_config(sys.argv[1]):
            print("batch", flush=True)
            time.sleep(float(sys.argv[2]))

try:
    train()
except KeyboardInterrupt:
    if sys.argv[3] == "uncaught":
        raise
    print([thread.name for thread in threading.enumerate()], flush=True)
"""


@pytest.mark.parametrize(
    ("caught", "seconds_a_batch"), [("caught", 0.0), ("caught", 30.0), ("uncaught", 30.0), ("uncaught", 0.0)]
)
@pytest.mark.sweep(keep=2)
def test_sigint_in_mid_epoch_leaves_no_thread(corpus: Corpus, tmp_path: Path, caught: str, seconds_a_batch: float):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": corpus.settings}))
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "c.yaml"), str(seconds_a_batch), caught]
    with Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "batch\n"
            process.send_signal(signal.SIGINT)
            said, error = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    if caught == "caught":
        assert (process.returncode, said.splitlines()[-1]) == (0, "['MainThread']"), error
    else:
        assert process.returncode == -signal.SIGINT
        assert error.rstrip().endswith("KeyboardInterrupt")
