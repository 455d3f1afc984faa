"""`num_processes: auto`: threads, or a worker process where there is a GPU; said in words."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmdata import Batch, Loader
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.loader import source
from mmdata.loader.workers.process import WorkerProcesses
from mmdata.loader.workers.threads import ThreadedBatches
from tests.flat_settings import grouped

from .conftest import Corpus
from .worker_processes import transforms

Same = Callable[[Batch, Batch], bool]
TRANSFORMS = """
    import torch

    def resize(image, size, generator):
        large = torch.nn.functional.interpolate(image[None], (2400, 2400))
        return torch.nn.functional.interpolate(large, size, mode="bicubic", antialias=True)[0]
"""


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU, with a file of transforms."""
    caplog.set_level(logging.INFO, "mmdata")
    monkeypatch.setattr(source, "has_gpu", lambda: False)
    transforms(tmp_path, monkeypatch, TRANSFORMS)


def chosen(loader: Loader) -> tuple[str, int]:
    workers: Any = loader._source
    if isinstance(workers, ThreadedBatches):
        return "thread", 0
    assert isinstance(workers, WorkerProcesses)
    return "process", workers._num_processes


def test_auto_is_the_default_and_threads_on_a_machine_without_a_gpu(corpus: Corpus, caplog: pytest.LogCaptureFixture):
    assert DataConfig.model_validate({**corpus.settings, "image_buckets": None}).loading.num_processes == "auto"
    assert chosen(corpus.loader()) == ("thread", 0)
    assert caplog.records == []


def test_auto_is_a_worker_process_where_there_is_a_gpu(
    corpus: Corpus, same: Same, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(source, "has_gpu", lambda: True)
    loader = corpus.loader(num_workers=4)
    assert chosen(loader) == ("process", 1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "there is a GPU, and threads would keep the loop that feeds it waiting for Python's lock (the GIL): batches "
        "are made in 1 worker process. Set data.loading.num_processes to 0 for no worker process, or to 1 to "
        "silence this message"
    )
    assert all(same(a, b) for a, b in zip(loader, corpus.loader(num_processes=0), strict=True))
    assert chosen(corpus.loader(num_workers=0)) == ("thread", 0)
    assert chosen(corpus.loader(num_processes=0)) == ("thread", 0)


@pytest.mark.parametrize(("workers", "processes"), [(1, 1), (4, 1), (5, 2), (16, 4), (200, 8)])
def test_auto_is_a_worker_process_for_each_four_threads(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, workers: int, processes: int
):
    monkeypatch.setattr(source, "has_gpu", lambda: True)
    assert chosen(corpus.loader(num_workers=workers)) == ("process", processes)


def test_auto_of_an_evaluation_is_threads(corpus: Corpus):
    for workers, expected in (("auto", 0), (0, 0), (2, 2)):
        settings = grouped(**corpus.settings, val={"shards": corpus.settings["shards"]}, num_processes=workers)
        assert evaluation_data(section(settings)).loading.num_processes == expected


def section(settings: dict[str, Any]) -> DataConfig:
    return DataConfig.model_validate({**settings, "image_buckets": None})


def test_auto_leaves_a_transform_of_the_program_itself_to_threads(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(source, "has_gpu", lambda: True)
    monkeypatch.setattr(sys.modules["__main__"], "mine", lambda image, size, generator: image, raising=False)
    loader = corpus.loader(transform="__main__:mine", num_workers=1)
    assert chosen(loader) == ("thread", 0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("there is a GPU, and threads would keep the loop")
    assert said.endswith(
        "; another process cannot import transform '__main__:mine', so threads make the batches: define it at the top "
        "of a file of its own"
    )
