"""What the system allows a process, as it is on hosts and in containers: few open files, no room in /dev/shm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmdata.config import DataConfig
from mmdata.config.strict_yaml import parse
from mmdata.loader.corpus import files_needed, most_shards
from mmdata.plan import LengthAspectPolicy, Plan
from mmdata.tables.selection import Selection
from mmdata.text.tokenizer import Tokenizer
from tests.flat_settings import grouped
from tests.plan.conftest import FakeRows
from tests.programs import PATIENCE_S, run_program
from tests.shard_writer import ShardWriter

from .conftest import Corpus
from .worker_processes import ROOT, worker_processes

LIMITED = """
import json, os, resource, sys
from mmdata import Loader
from mmdata.config import DataConfig
from mmdata.loader.corpus import files_needed
from mmdata.config.strict_yaml import parse

settings = json.loads(sys.argv[1])
needed = files_needed(parse(DataConfig, settings, origin="test"), int(sys.argv[2]))
there = len(os.listdir("/proc/self/fd")) - 1  # listing opens one itself
"""


def limited(folder: Path, more: str, settings: dict[str, Any], num_shards: int) -> subprocess.CompletedProcess[str]:
    """Run a program that knows how many files are `there` and `needed`."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(LIMITED) + textwrap.dedent(more))
    return run_program(
        [sys.executable, str(path), json.dumps(settings), str(num_shards)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_files_needed_example_of_the_docstring():
    data: dict[str, Any] = {"shards": "s", "tokenizer": "t", "global_batch_size": 8}
    needed = [
        files_needed(
            parse(DataConfig, grouped(**data, num_processes=workers, num_workers=2, prefetch_batches=2), origin="test"),
            1000,
        )
        for workers in (0, 1)
    ]
    assert needed == [98, 110]


@pytest.mark.parametrize(("num_lanes", "share"), [(1, 1.0), (2, 1.0), (1, 0.4)])
def test_most_shards_are_enough_to_open_each_shard_once_an_epoch(num_lanes: int, share: float):
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 9, 600)
    rows = FakeRows(sizes.tolist())
    chosen = [draw.random(size) < share for size in sizes]
    if share < 1:
        rows.selection = Selection(rows.starts, chosen, name="some")
    plan = Plan(rows, LengthAspectPolicy([16], [(32, 32)]), global_batch_size=8, window_rows=200, num_lanes=num_lanes)
    most = most_shards(DataConfig(shards="s", global_batch_size=8), plan)
    assert 64 < most < 600
    opened, still_open = 0, dict[int, None]()
    for step in plan.steps(0):
        for shard in np.searchsorted(rows.starts, step.rows[step.rows >= 0], side="right").tolist():
            opened += shard not in still_open
            still_open.pop(shard, None)
            still_open[shard] = None
            if len(still_open) > most:
                del still_open[next(iter(still_open))]
    assert opened == sum(some.any() for some in chosen)


@pytest.fixture(scope="module")
def many_shards(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings for 70 shards of one row, more than stay open."""
    folder = tmp_path_factory.mktemp("many")
    tokenizer = Tokenizer.load(corpus.folder / "tokenizer")
    with ShardWriter(folder, shard_rows=1, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint) as writer:
        for sample in [*corpus.samples, *(replace(s, key=f"again-{s.key}") for s in corpus.samples[:20])]:
            writer.write(sample)
    return {**corpus.settings, "shards": str(folder)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.sweep(keep=1)
def test_loader_runs_with_as_many_files_as_it_asks_for(many_shards: dict[str, Any], tmp_path: Path, workers: int):
    more = """
    enough = there + needed + 1  # a worker process has a socket more when it begins
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, enough))
    loader = Loader.from_config(settings)
    print([sum(int(batch["valid"].sum()) for batch in loader) for epoch in range(3)])
    """
    done = limited(tmp_path, more, grouped(**many_shards, num_processes=workers, num_workers=4), 70)
    assert done.stdout == "[70, 70, 70]\n", done.stderr


def test_loader_raises_a_soft_limit_that_is_too_low(many_shards: dict[str, Any], tmp_path: Path):
    more = """
    resource.setrlimit(resource.RLIMIT_NOFILE, (there + 20, 2000))
    loader = Loader.from_config(settings)
    print(sum(int(batch["valid"].sum()) for batch in loader), resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    done = limited(tmp_path, more, many_shards, 70)
    assert done.stdout == "70 (2000, 2000)\n", done.stderr


def test_loader_leaves_a_soft_limit_that_is_enough(corpus: Corpus, tmp_path: Path):
    more = """
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 2000))
    loader = Loader.from_config(settings)
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    done = limited(tmp_path, more, corpus.settings, 3)
    assert done.stdout == "(300, 2000)\n", done.stderr


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_says_before_it_begins_that_files_are_too_few(corpus: Corpus, tmp_path: Path, workers: int):
    more = """
    from mmdata.errors import ConfigError
    resource.setrlimit(resource.RLIMIT_NOFILE, (there + 20, there + 20))
    try:
        Loader.from_config(settings)
    except ConfigError as error:
        print(error)
    print(there, open(f"/proc/self/task/{os.getpid()}/children").read().split())
    """
    done = limited(tmp_path, more, grouped(**corpus.settings, num_processes=workers), 3)
    said, _, there_and_children = done.stdout.strip().rpartition("\n")
    there = int(there_and_children.removesuffix(" []"))  # and no child
    needed = (37, 49)[workers]
    assert said.startswith(
        f"this process may open {there + 20} files, {there} are open, and a loader needs up to {needed} more (shards, "
        "buffers, sockets): let it open 4096 ("
    ), done.stderr
    assert said.endswith("), or set data.loading.num_workers or data.loading.prefetch_batches to less")


@pytest.mark.parametrize(("limit", "most"), [("2 * (needed + 4)", 68), ("2 * (needed + 6)", 70), ("needed + 1", 64)])
def test_loader_keeps_shards_open_with_half_of_the_files(
    many_shards: dict[str, Any], tmp_path: Path, limit: str, most: int
):
    more = f"""
    hard = there + {limit}
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 5, hard))
    loader = Loader.from_config(settings)
    print([sum(int(batch["valid"].sum()) for batch in loader) for epoch in range(2)])
    print(loader.builder.store.open_shards.most)
    """
    done = limited(tmp_path, more, grouped(**many_shards, num_workers=2), 70)
    assert done.stdout == f"[70, 70]\n{most}\n", done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts need root")
def test_worker_process_needs_no_room_in_dev_shm(corpus: Corpus, tmp_path: Path):
    # In a mount namespace of its own: /dev/shm is full, and read-only.
    mount = "mount -t tmpfs -o size=4k,ro tmpfs /dev/shm"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    more = """
    try:
        open("/dev/shm/x", "w")
    except OSError as error:
        print(error.strerror)
    print(sum(int(batch["valid"].sum()) for batch in Loader.from_config(settings)))
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(LIMITED) + textwrap.dedent(more))
    settings = json.dumps(grouped(**corpus.settings, num_processes=1))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, str(path), settings, "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == "Read-only file system\n50\n", done.stderr
    assert worker_processes() == []
