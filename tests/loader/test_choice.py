"""`workers: auto`: threads, or side processes where there is a GPU or a transform holds the GIL; said in words."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata import Batch, Loader
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.loader.workers import resolve_workers
from mmdata.loader.workers.handover import StartupHandover
from mmdata.loader.workers.parent import WorkerProcesses
from mmdata.loader.workers.threads import ThreadedBatches

from .conftest import Corpus
from .sides import SIDE, transforms

Same = Callable[[Batch, Batch], bool]
TRANSFORMS = """
    import torch

    def python(image, size, generator):
        brightest = sum(i * i % 7 for i in range(20_000))
        return torch.full((3, *size), brightest % 256, dtype=torch.uint8)

    def resize(image, size, generator):
        large = torch.nn.functional.interpolate(image[None], (2400, 2400))
        return torch.nn.functional.interpolate(large, size, mode="bicubic", antialias=True)[0]

    def fails(image, size, generator):
        raise RuntimeError("never")
"""


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU, with a file of transforms."""
    caplog.set_level(logging.INFO, "mmdata")
    monkeypatch.setattr(resolve_workers, "has_gpu", lambda: False)
    transforms(tmp_path, monkeypatch, TRANSFORMS)


def chosen(loader: Loader) -> tuple[str, int]:
    source: Any = loader._source
    if isinstance(source, ThreadedBatches):
        return "thread", 0
    return type(source).__name__, (source if isinstance(source, WorkerProcesses) else source._beside)._num_processes


def test_auto_is_the_default_and_threads_on_a_machine_without_a_gpu(corpus: Corpus, caplog: pytest.LogCaptureFixture):
    assert DataConfig.model_validate({**corpus.settings, "image_buckets": None}).workers == "auto"
    assert chosen(corpus.loader()) == ("thread", 0)
    assert caplog.records == []


def test_auto_is_a_side_process_where_there_is_a_gpu(
    corpus: Corpus, same: Same, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(resolve_workers, "has_gpu", lambda: True)
    loader = corpus.loader()
    assert chosen(loader) == (StartupHandover.__name__, 1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "there is a GPU, and threads would keep the loop that feeds it waiting for Python's lock (the GIL): batches "
        "are made in 1 side process. Set data.loading.worker_type to thread to have none, or to process "
        "(data.loading.num_processes=1) not "
        "to see this again"
    )
    assert all(same(a, b) for a, b in zip(loader, corpus.loader(workers="thread"), strict=True))
    assert chosen(corpus.loader(num_workers=0)) == ("thread", 0)
    assert chosen(corpus.loader(workers="thread")) == ("thread", 0)


def test_auto_of_an_evaluation_is_threads(corpus: Corpus):
    for workers, expected in (("auto", "thread"), ("thread", "thread"), ("process", "process")):
        settings = {**corpus.settings, "val_shards": corpus.settings["shards"], "workers": workers}
        assert evaluation_data(section(settings)).workers == expected


def section(settings: dict[str, Any]) -> DataConfig:
    return DataConfig.model_validate({**settings, "image_buckets": None})


def test_auto_moves_a_transform_that_holds_the_lock_to_processes(
    corpus: Corpus, same: Same, caplog: pytest.LogCaptureFixture
):
    loader = corpus.loader(transform="my_transforms:python", num_workers=3)
    source, processes = chosen(loader)
    assert source == StartupHandover.__name__
    assert processes in (2, 3)  # a share that is measured beside a load is smaller
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelno == logging.WARNING
    assert said.startswith("transform 'my_transforms:python' holds Python's lock (the GIL) for ")
    assert (
        f" % of a row's time, and 3 threads would wait for each other: batches are made in {processes} side processes. "
    ) in said.replace("%", " %")
    assert said.endswith("; calls into torch or torchvision that take long let go of the lock")
    threads = corpus.loader(transform="my_transforms:python", workers="thread")
    assert all(same(a, b) for a, b in zip(loader, threads, strict=True))


def test_auto_leaves_a_transform_that_lets_go_of_the_lock_to_threads(corpus: Corpus, caplog: pytest.LogCaptureFixture):
    loader = corpus.loader(transform="my_transforms:resize", num_workers=2)
    assert chosen(loader) == ("thread", 0)
    assert resolve_workers.held_share(loader.plan, loader.worker, rank=0, world_size=1) < 0.35
    assert caplog.records == []


def test_auto_leaves_the_number_of_torchs_threads_as_it_was(corpus: Corpus):
    loader, before = corpus.loader(transform="my_transforms:resize", workers="thread"), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        resolve_workers.held_share(loader.plan, loader.worker, rank=0, world_size=1)
        with ThreadPoolExecutor(1) as born_later:
            assert born_later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_auto_measures_nothing_for_one_worker_or_a_transform_of_ours(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resolve_workers, "held_share", lambda *args, **kwargs: pytest.fail("measured"))
    corpus.loader(transform="my_transforms:python", num_workers=1)
    corpus.loader(transform="my_transforms:python", workers="thread")
    corpus.loader(num_workers=8)


@pytest.mark.parametrize(
    ("held", "gpu", "expected"),
    [
        (0.1, False, 0),
        (0.17, False, 0),
        (0.18, False, 2),
        (0.5, False, 3),
        (0.9, False, 4),
        (0.1, True, 1),
        (0.5, True, 3),
    ],
)
def test_auto_takes_as_many_processes_as_the_lock_needs(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, held: float, gpu: bool, expected: int
):
    monkeypatch.setattr(resolve_workers, "has_gpu", lambda: gpu)
    monkeypatch.setattr(resolve_workers, "held_share", lambda *args, **kwargs: held)
    loader = corpus.loader(transform="my_transforms:python", num_workers=4)
    assert chosen(loader) == ((StartupHandover.__name__, expected) if expected else ("thread", 0))


def test_auto_leaves_a_transform_of_the_program_itself_to_threads(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(resolve_workers, "has_gpu", lambda: True)
    monkeypatch.setattr(sys.modules["__main__"], "mine", lambda image, size, generator: image, raising=False)
    loader = corpus.loader(transform="__main__:mine", num_workers=1)
    assert chosen(loader) == ("thread", 0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("there is a GPU, and threads would keep the loop")
    assert said.endswith(
        "; another process cannot import what is defined in the program itself, so threads make the batches: put the "
        "transform into a file of its own"
    )


def test_auto_leaves_a_transform_that_fails_to_the_loop(corpus: Corpus):
    loader = corpus.loader(transform="my_transforms:fails", num_workers=1, max_bad_share=1.0)
    assert len(list(loader)) == 7
    assert loader.masked == {"transform_failed": 50}


def test_process_with_a_transform_of_a_user_is_not_bridged(corpus: Corpus):
    assert chosen(corpus.loader(transform="my_transforms:resize", **SIDE)) == (WorkerProcesses.__name__, 1)
    assert chosen(corpus.loader(**SIDE)) == (StartupHandover.__name__, 1)
