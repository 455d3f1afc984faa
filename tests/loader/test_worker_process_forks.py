"""Forked children of a program with worker processes: what they keep stays as it is, and the memory goes."""

from __future__ import annotations

import os

import pytest
from torch import Tensor

from mmdata import Batch

from .conftest import Corpus
from .worker_processes import PROCESS, nothing_left, open_files

__all__ = ["nothing_left"]  # a fixture

FEW = {**PROCESS, "num_workers": 1, "prefetch_batches": 1, "image_buckets": [[32, 32]], "text_buckets": [32]}
"""Settings with which the next batch but one lies where the first did."""


def contents(batch: Batch) -> dict[str, bytes]:
    return {key: value.numpy().tobytes() for key, value in batch.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("num_held", [1, 2])
def test_worker_process_batches_that_a_forked_child_keeps_stay_as_they_are(corpus: Corpus, num_held: int):
    loader = corpus.loader(**FEW)
    batches = iter(loader)
    held = [next(batches) for _ in range(num_held)]
    before = [contents(batch) for batch in held]
    parent_is_done, done = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(parent_is_done, 1)
        os._exit(0 if [contents(batch) for batch in held] == before else 1)
    held.clear()
    list(batches)
    list(loader)
    os.write(done, b"1")
    assert os.waitpid(child, 0)[1] == 0
    os.close(parent_is_done)
    os.close(done)


@pytest.mark.sweep
def test_worker_process_memory_does_not_grow_with_forks(corpus: Corpus):
    loader = corpus.loader(**FEW)
    before = open_files()
    files: list[int] = []
    for _ in range(10):
        for batch in loader:
            fork_and_wait()
            del batch
        files.append(open_files())
    assert max(files) <= before + 1 + 2 * 5


def test_worker_process_memory_is_used_again_after_a_fork(corpus: Corpus):
    loader = corpus.loader(**FEW)
    next(iter(loader))
    fork_and_wait()
    places: set[int] = set()
    for _ in range(10):
        for batch in loader:
            places.add(batch["pixel_values"].data_ptr())
            del batch
    assert len(places) <= 5


def fork_and_wait() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
