"""Two real processes under torchrun: whose share a loader gives that was told nothing, and who ends at bad rows."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mmdata
from mmdata.samplers import BucketBatchSampler
from tests.programs import PATIENCE_S, run_program

from .conftest import TARGETS, Corpus, with_boxes

ALL_STEPS = 7  # of an epoch of 50 rows, 8 a step


def rows_of(corpus: Corpus, rank: int) -> list[list[int]]:
    return [batch["rows"].tolist() for batch in corpus.loader(rank=rank, world_size=2)]


def streamed(corpus: Corpus) -> dict[str, Any]:
    """Settings that read the corpus's shards without its index, in order."""
    shapes = {"image_buckets": None, "image_size": 32, "text_buckets": [32], "shuffle": False}
    loading = {"max_bad_share": 0.0}
    return {**corpus.settings, **shapes, "shards": str(corpus.folder / "shards"), "loading": loading}


@pytest.fixture(scope="module")
def corpus(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The corpus with boxes, which make no more shapes of batches."""
    boxed = with_boxes(corpus, tmp_path_factory.mktemp("boxed"))
    return replace(boxed, more={"targets": {**TARGETS, "box_buckets": [4]}})


@pytest.fixture(scope="module")
def bad(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The corpus; images of the first step that rank 1 of 2 gets are damaged, as are the first of the second shard."""
    damaged = corpus.copy(tmp_path_factory.mktemp("bad") / "corpus")
    for row in {*rows_of(corpus, 1)[0], 17, 18}:
        damaged.overwrite(row, "image", bytes(400))
    return damaged


@pytest.fixture(scope="module")
def seen(corpus: Corpus, bad: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw; neither hung or failed."""
    out = tmp_path_factory.mktemp("seen")
    settings = {**bad.settings, "loading": {"max_bad_share": 0.0}}
    spec = {"data": corpus.settings, "bad": settings, "stream": streamed(bad), "out": str(out)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(Path(__file__).with_name("ranks.py")), json.dumps(spec)]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_program(command, capture_output=True, text=True, env=quiet, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_ranks_left_out_are_those_of_torchrun(seen: list[dict[str, Any]], corpus: Corpus, bad: Corpus):
    for rank, found in enumerate(seen):
        assert found["loader"] == rows_of(corpus, rank)
        stream = mmdata.stream(None, streamed(bad), rank=rank, world_size=2, steps_per_epoch=2)
        assert found["stream"] == [batch["keys"] for batch in stream]
        assert found["sampler"] == list(BucketBatchSampler([3, 4, 5] * 8, 4, rank=rank, world_size=2))
    assert seen[0]["stream"] != seen[1]["stream"]
    assert [len(found["said"]) for found in seen] == [1, 0]  # rank 0 says it for all, once


def test_bad_rows_of_one_rank_leave_nobody_waiting_in_a_loop_of_ones_own(seen: list[dict[str, Any]]):
    for found in seen:
        assert [found["own loop"][0], found["own loop of a stream"][0]] == [ALL_STEPS, 2]
    for kind in ("own loop", "own loop of a stream"):
        said = {found[kind][1].partition(" (")[0] for found in seen}  # what follows names the first row, if it is known
        assert len(said) == 1
        assert next(iter(said)).endswith("rows could not be used")
    assert any(message.startswith("rank 1 of 2: ") for message in seen[1]["warned"])
    for found in seen:
        assert all("check_rows(merge_states(states)), called with the states" in m for m in found["warned"])
        assert len(found["warned"]) <= 3  # once for each of the three that saw damaged rows


def test_bad_rows_end_every_rank_of_an_integration_with_one_error(seen: list[dict[str, Any]], bad: Corpus):
    loaders = [bad.loader(rank=rank, world_size=2, max_bad_share=1.0) for rank in range(2)]
    for loader in loaders:
        list(loader)
    masked = sum(loader.ledger.masked.total() for loader in loaders)
    assert loaders[1].ledger.masked.total() > 0
    for found in seen:
        assert re.match(r"over 2 ranks, \d of 10\d\d rows could not be used \(", found["integration of a stream"])
        assert found["integration"].startswith(f"over 2 ranks, {masked} of 1050 rows could not be used (")
