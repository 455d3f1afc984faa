"""Twenty epochs take no more than two: descriptors, threads, processes, memory of batches."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from mmdata.index import store
from mmdata.loader.workers import buffers
from mmdata.text.tokenizer import Tokenizer
from tests.flat_settings import grouped
from tests.programs import PATIENCE_S, run_program
from tests.shard_writer import ShardWriter
from tests.waiting import wait_until

from .conftest import Corpus
from .worker_processes import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="counts in /proc")


class Held(NamedTuple):
    """What this process and its children hold."""

    descriptors: int
    """Of all but buffers of shared memory."""
    threads: int
    children: int
    buffers: int
    """How many there are depends on how far the workers were ahead."""
    private_mb: float


def held() -> Held:
    """Once two counts are alike: workers that are still ahead open files for a moment."""
    counts = [count_held()]

    def are_alike() -> bool:
        sleep(0.1)
        counts.append(count_held())
        return counts[-1][:3] == counts[-2][:3]

    wait_until(are_alike)
    return counts[-1]


def links(process: int) -> Iterator[str]:
    """What its descriptors are."""
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(link)


def count_held() -> Held:
    gc.collect()
    own = os.getpid()
    children = [int(i) for file in Path(f"/proc/{own}/task").glob("*/children") for i in file.read_text().split()]
    lines = [line for i in (own, *children) for line in Path(f"/proc/{i}/smaps_rollup").read_text().splitlines()]
    files = [link for i in (own, *children) for link in links(i)]
    buffers = sum("memfd:mmdata" in link for link in files)
    return Held(
        len(files) - buffers,
        threading.active_count(),
        len(children),
        buffers,
        sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty:", "Shared_Dirty:"))) / 1024,
    )


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_loader_holds_no_more_after_twenty_epochs_than_after_two(corpus: Corpus, num_processes: int):
    settings = {**corpus.settings, "image_buckets": [[224, 224], [192, 256]], "global_batch_size": 32}
    # In a process of its own: threads of tests before this one may end while this one counts.
    out = run_program(
        [sys.executable, "-c", TWENTY_EPOCHS, json.dumps(grouped(**settings, num_processes=num_processes))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert out.returncode == 0, out.stderr
    after = [Held(*counts) for counts in json.loads(out.stdout)]
    assert len(after) == 20
    # A batch of 4.8 MB that is lost in every epoch would be 86 MB, and 18 buffers.
    assert after[-1].private_mb < after[1].private_mb + 24
    assert after[-1].buffers < after[1].buffers + 12
    assert [later[:3] for later in after[2:]] == [after[1][:3]] * 18


TWENTY_EPOCHS = """
import json, os, sys
from mmdata import Loader
from tests.loader.test_growth import held
from tests.waiting import wait_until_no_new_shared_files

settings = json.loads(sys.argv[1])
loader = Loader.from_config(settings)
after = []
for _ in range(20):
    assert sum(int(batch["valid"].sum()) for batch in loader) == len(loader.index)
    after.append(held())
    if len(after) == 2:
        shared = os.listdir("/dev/shm")
wait_until_no_new_shared_files(shared)
print(json.dumps(after))
"""


def test_loader_allocates_no_buffer_after_the_first_epochs(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []

    def allocate(size: int, dtype: type[np.uint8]) -> NDArray[np.uint8]:
        made.append(size)
        return np.empty(size, dtype)

    monkeypatch.setattr(buffers, "np", SimpleNamespace(empty=allocate, uint8=np.uint8))
    loader: Any = corpus.loader(image_buckets=[[32, 32]], global_batch_size=8, num_workers=5)
    for _ in range(20):
        for _batch in loader:
            pass
    # Two ahead, however many workers; the one in use, and one that comes while that is still looked at.
    assert len(made) <= 4


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"num_processes": 0}, {"num_processes": 1}], ids=str)
def test_batch_that_its_user_dropped_is_gone_before_the_next_is_asked_for(corpus: Corpus, settings: dict[str, Any]):
    batches = iter(corpus.loader(**settings))
    for _ in range(3):
        pixels = weakref.ref(next(batches)["pixel_values"])
        wait_until(lambda pixels=pixels: pixels() is None)  # the thread that finished a batch may hold it for a moment


@pytest.fixture(scope="module")
def shards_of_one_row(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 shards, twice as many as stay open without a plan."""
    folder = tmp_path_factory.mktemp("of_one_row")
    tokenizer = Tokenizer.load(corpus.folder / "tokenizer")
    with ShardWriter(folder, shard_rows=1, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint) as writer:
        for i in range(128):
            writer.write(replace(corpus.samples[i % len(corpus.samples)], key=f"{i:05d}"))
    return folder


@pytest.mark.parametrize("changes", [{"num_workers": 0}, {"num_workers": 4}, {"select": "key >= '00028'"}], ids=str)
def test_loader_opens_each_shard_of_two_windows_once(
    corpus: Corpus, shards_of_one_row: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
):
    opened: Counter[str] = Counter()
    system = os.open

    def count(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith(".tar"):
            opened[Path(path).name] += 1
        return system(path, *more, **named)

    monkeypatch.setattr(os, "open", count)
    with corpus.loader(shards=str(shards_of_one_row), **changes) as loader:
        for _ in range(3):
            for _batch in loader:
                pass
        assert len(opened) == loader.plan.num_rows > store.MAX_OPEN
    # Two threads may open a shard at the same moment; one of them closes it.
    assert sum(opened.values()) <= len(opened) * (1 if changes.get("num_workers") == 0 else 2)


def test_loader_keeps_no_more_shards_open_than_two_windows_have(corpus: Corpus, shards_of_one_row: Path):
    def most_open(window_rows: int) -> int:
        loader = corpus.loader(shards=str(shards_of_one_row), num_workers=0, shuffle_window_rows=window_rows)
        most = 0
        for _batch in loader:
            paths = [link for link in links(os.getpid()) if link.startswith(str(shards_of_one_row))]
            most = max(most, sum(path.endswith(".tar") for path in paths))
        return most

    assert (most_open(50), most_open(8)) == (100, 64)
