"""Worker processes: the batches of threads, bit for bit, whichever process ends first; nothing is left behind."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Callable
from errno import EMFILE
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mmdata import Batch
from mmdata.errors import ConfigError, DataError, LoadError
from mmdata.images.user import CHECKED_ROWS
from mmdata.loader.workers import process
from tests.programs import PATIENCE_S
from tests.waiting import wait_until_no_new_shared_files

from .conftest import Corpus
from .worker_processes import PROCESS, nothing_left, open_files, program, transforms, worker_processes

Same = Callable[[Batch, Batch], bool]
__all__ = ["nothing_left"]  # a fixture


# The same batches


@pytest.mark.parametrize(
    "changes",
    [
        {"num_workers": 1, "prefetch_batches": 1},
        {"num_workers": 3, "num_processes": 2},
    ],
)
@pytest.mark.sweep(keep=1)
def test_worker_process_gives_the_batches_of_threads(corpus: Corpus, same: Same, changes: dict[str, Any]):
    loader, threads = corpus.loader(**{**PROCESS, **changes}), corpus.loader(**{**changes, "num_processes": 0})
    for _ in range(2):
        batches = list(loader)
        assert len(batches) >= 2
        assert all(same(a, b) for a, b in zip(batches, threads, strict=True))
    assert loader.state_dict() == threads.state_dict()
    counted = ("rows", "masked", "tokens", "token_places")
    assert [getattr(loader.stats, name) for name in counted] == [getattr(threads.stats, name) for name in counted]
    assert min(*loader.stats.wall_s.values(), loader.stats.wait_s) > 0


@pytest.mark.parametrize("num_processes", [1, 2])
def test_worker_process_left_in_the_middle_begins_anew(corpus: Corpus, same: Same, num_processes: int):
    loader, whole = corpus.loader(num_processes=num_processes), list(corpus.loader())
    started: set[int] = set()
    for left_at in range(5):
        loader.set_epoch(0)
        for step, batch in enumerate(loader):
            assert same(batch, whole[step])
            if step == left_at:
                break
        started.update(worker_processes())
    loader.set_epoch(0)
    assert all(same(a, b) for a, b in zip(loader, whole, strict=True))
    assert len(started) == num_processes  # once, for all iterations


# Memory


@pytest.mark.parametrize("num_processes", [0, 1])
def test_batches_may_be_kept_whole_and_in_part(corpus: Corpus, num_processes: int):
    loader = corpus.loader(num_processes=num_processes)
    kept: list[Any] = []
    copies: list[Any] = []
    for _ in range(3):
        for step, batch in enumerate(loader):
            for key in ("pixel_values", "input_ids", "valid", "rows"):
                value: Any = batch[key]
                kept.append([value, value[3:], value.numpy()[1:4], memoryview(value.numpy())][step % 4])
                copies.append(np.asarray(kept[-1]).copy())
            del batch, value
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(kept, copies, strict=True))
    del loader  # memory outlives the process that filled it
    gc.collect()
    assert worker_processes() == []
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(kept, copies, strict=True))


def test_worker_process_tensors_are_saved_without_their_neighbours(corpus: Corpus):
    batch = next(iter(corpus.loader(**PROCESS)))
    assert [batch[key].untyped_storage().nbytes() for key in ("rows", "valid", "labels")] == [64, 8, 64]


def test_worker_process_memory_is_used_again_and_nothing_grows_over_epochs(corpus: Corpus):
    gc.collect()
    shared = os.listdir("/dev/shm")
    loader = corpus.loader(num_workers=1, prefetch_batches=2, image_buckets=[[32, 32]], text_buckets=[32], **PROCESS)
    before, files, places = open_files(), [], set()
    for _ in range(20):
        for batch in loader:
            places.add(batch["pixel_values"].data_ptr())
            del batch
        files.append(open_files())
    assert len(places) <= 5  # two ahead, one in use, one just dropped, one more when the epoch begins
    assert max(files) <= before + 1 + 2 * len(places)
    wait_until_no_new_shared_files(shared)
    del loader
    gc.collect()
    assert open_files() <= before


def test_worker_process_memory_follows_the_size_of_batches(corpus: Corpus):
    # Buckets of growing size: buffers that are too small are released in both processes.
    loader = corpus.loader(
        image_buckets=[[16, 16], [96, 160], [320, 192]], global_batch_size=4, prefetch_batches=1, **PROCESS
    )
    counts: list[int] = []
    for _ in range(6):
        for batch in loader:
            del batch
        counts.append(open_files())
    assert max(counts) <= counts[0] + 4


# What is raised, masked and said


def test_transform_that_raises_in_a_process_masks_its_row(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    transforms(
        tmp_path,
        monkeypatch,
        """
        import torch

        def fail(image, size, generator):
            if image.shape[1] == 40:
                raise RuntimeError("no landscapes")
            return torch.full((3, *size), 7, dtype=torch.uint8)
        """,
    )
    changes: dict[str, Any] = {"transform": "my_transforms:fail", "max_bad_share": 1.0}
    loader, threads = corpus.loader(**PROCESS, **changes), corpus.loader(**changes)
    assert len(list(loader)) == len(list(threads)) == 7
    assert list(loader.ledger) == list(threads.ledger)
    assert {entry.detail for entry in loader.ledger} == {"RuntimeError: no landscapes"}
    assert loader.ledger.masked == threads.ledger.masked


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("undefined", "NameError: name 'undefined' is not defined"),
        ("raise SystemExit('no licence')", "^SystemExit: no licence$"),
    ],
)
def test_worker_process_module_that_fails_at_import_is_an_error(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, message: str
):
    transforms(
        tmp_path,
        monkeypatch,
        f"""
        import os

        if os.getpid() != {os.getpid()}:
            {statement}

        def mine(image, size, generator):
            return image
        """,
    )
    loader = corpus.loader(**PROCESS, transform="my_transforms:mine")
    for _ in range(2):
        with pytest.raises(LoadError, match=message) as caught:
            next(iter(loader))
        assert "my_transforms.py" in str(caught.value.__cause__)
        assert str(caught.value.__cause__).startswith("in the loader's worker process:\nTraceback")
    assert worker_processes() == []


def test_worker_process_error_of_a_shard_keeps_its_type_and_ends_the_epoch(corpus: Corpus, tmp_path: Path):
    damaged = corpus.copy(tmp_path / "corpus")
    loader = damaged.loader(**PROCESS)
    path = damaged.index.shard_path(1)
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(DataError, match=r"000001\.tar': \d+ bytes, and its index was made of \d+; the shard changed"):
        list(loader)


def test_worker_process_refuses_shards_that_changed_since_the_loader_was_built(corpus: Corpus, tmp_path: Path):
    changed = corpus.copy(tmp_path / "corpus")
    loader = changed.loader(**PROCESS)
    shutil.rmtree(changed.folder / "shards")
    (changed.folder / "shards").mkdir()
    corpus.write_beside(changed.folder / "shards", corpus.samples[:30])
    with pytest.raises(DataError, match=r"made another plan, \{.*\}, than this process, .*; build it anew"):
        next(iter(loader))


def test_worker_process_warnings_reach_the_loggers_of_the_program(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    transforms(
        tmp_path,
        monkeypatch,
        """
        import logging, torch

        def warn(image, size, generator):
            logging.getLogger("mmdata").warning("seen %d", image.shape[0])
            return torch.zeros(3, *size, dtype=torch.uint8)
        """,
    )
    with caplog.at_level(logging.WARNING, "mmdata"):
        list(corpus.loader(**PROCESS, num_workers=1, transform="my_transforms:warn"))
    said = [record.getMessage() for record in caplog.records].count("seen 3")
    assert 50 + CHECKED_ROWS <= said <= 2 * 50 + CHECKED_ROWS  # rows of the next epoch may be there, too


@pytest.mark.parametrize(("users", "there"), [(None, "false"), ("true", "true")])
def test_worker_process_has_no_threads_of_tokenizers_unless_they_are_asked_for(
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    users: str | None,
    there: str,
):
    transforms(
        tmp_path,
        monkeypatch,
        """
        import logging, os, torch

        def tell(image, size, generator):
            logging.getLogger("mmdata").warning("tokenizers: %s", os.environ.get("TOKENIZERS_PARALLELISM"))
            return torch.zeros(3, *size, dtype=torch.uint8)
        """,
    )
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if users:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", users)
    next(iter(corpus.loader(**PROCESS, transform="my_transforms:tell")))
    assert {record.getMessage() for record in caplog.records} == {f"tokenizers: {there}"}


@pytest.mark.parametrize("error", [RuntimeError("received 0 items of ancdata"), OSError(EMFILE, "no descriptor")])
def test_worker_process_that_gets_no_descriptor_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fail(connection: object) -> int:
        raise error

    monkeypatch.setattr(process, "recv_handle", fail)
    answers: Any = SimpleNamespace(connection=None)
    server = process._BatchServer(answers, lambda: cast(Any, SimpleNamespace()), (0, 1), 1)
    with pytest.raises(ConfigError, match=r"num_processes: no shared memory .*; raise the limit"):
        server.obey("next", 0)


def test_worker_process_without_descriptors_says_what_to_do(corpus: Corpus, tmp_path: Path):
    more = """
    import resource
    files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    kept = list(batches)
    """
    with program(corpus, tmp_path, more) as started:
        _, err = started.communicate(timeout=PATIENCE_S)
    last = err.strip().splitlines()[-1]
    assert last.startswith("mmdata.errors.ConfigError: data.loading.num_processes: ")
    assert last.endswith(
        "(`ulimit -n 65536` for files, the container's for memory), or set data.loading.num_processes to 0"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_processes": -1},
            r"'loading.num_processes': expected integer ≥ 0 or auto; got -1",
        ),
        (
            {"num_processes": 3},
            r"num_processes \(3\) share num_workers \(2\): set num_workers to as many or more",
        ),
    ],
)
def test_worker_process_refuses_settings(corpus: Corpus, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        corpus.loader(**changes)
