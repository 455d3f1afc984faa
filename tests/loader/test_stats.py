"""The loader's clock: what belongs to which stage, and what only waits for a core."""

from __future__ import annotations

import re

import pytest

from mmdata.loader import Stats
from mmdata.loader.stats import Bottleneck, StageClock

from .conftest import Corpus


def test_stats_add_and_since_undo_each_other():
    a = Stats(wait_s=1.0, rows=3, workers={"w0": {"read": 1.0, "rows": 3}})
    b = Stats(wait_s=2.0, rows=4, workers={"w0": {"read": 0.5, "rows": 2}, "w1": {"read": 0.25, "rows": 2}})
    b.wall_s["decode"] = 2.0
    total = a.copy()
    total.add(b)
    assert (total.wait_s, total.rows, total.wall_s["decode"]) == (3.0, 7, 2.0)
    assert total.workers == {"w0": {"read": 1.5, "rows": 5}, "w1": {"read": 0.25, "rows": 2}}
    assert total.since(a).workers["w1"] == {"read": 0.25, "rows": 2}
    assert total.since(a).wall_s == b.wall_s
    assert a.rows == 3  # a copy is its own
    assert (Stats().padding_share, Stats(tokens=7, token_places=10).padding_share) == (0.0, pytest.approx(0.3))


def timed(**seconds: tuple[float, float]) -> Stats:
    """Stats of stages, each (seconds of the wall, of the processor)."""
    stats = Stats()
    for stage, (wall, cpu) in seconds.items():
        stats.wall_s[stage], stats.cpu_s[stage] = wall, cpu
    return stats


def test_stats_what_a_stage_alone_waits_for_is_its_own():
    stats = timed(read=(9.5, 0.5), decode=(1.5, 1.0))  # read waits 9 s, decode 0.5
    assert stats.own_s == {"read": 9.0, "decode": 1.0, "transform": 0, "tokenize": 0, "collate": 0}
    assert stats.core_wait_s == 1.0
    assert stats.bottleneck() == Bottleneck("read", "read takes 82% of the workers' time")


def test_stats_of_batches_that_the_caller_makes_name_no_workers():
    stats = timed(read=(1.0, 1.0), decode=(3.0, 3.0))
    stats.workers = {"MainThread": {"rows": 8}}
    words = "decode takes 75% of the time that batches take to make (num_workers is 0)"
    assert stats.bottleneck() == Bottleneck("decode", words)
    stats.workers = {"mmdata-worker_0": {"rows": 8}}
    assert stats.bottleneck() == Bottleneck("decode", "decode takes 75% of the workers' time")


def test_stats_a_stage_that_holds_the_lock_is_named_and_not_those_that_wait_for_it():
    stats = timed(read=(2.2, 0.2), decode=(2.1, 0.3), transform=(2.0, 0.3), tokenize=(1.7, 1.2))
    assert stats.bottleneck() == Bottleneck(
        "tokenize",
        "tokenize takes 15% of the workers' time, and for 75% of it they wait for a core or the interpreter's lock",
    )


def test_stats_a_copy_longer_than_the_wait_for_batches_is_the_bottleneck():
    stats = timed(decode=(1.0, 1.0))
    stats.wait_s, stats.transfer_s = 0.1, 0.2
    assert stats.bottleneck() == Bottleneck("transfer", "the copy to the device takes longer than making the batches")


def test_stats_without_a_batch_name_nothing():
    assert Stats().bottleneck() is None


def test_clock_gives_each_moment_to_one_stage():
    clock = StageClock()
    stats = clock.stats
    stats.rows = 2
    clock.lap("collate")
    clock.watch(False)
    clock.lap("read")
    clock.watch(True)
    sum(range(100_000))
    clock.lap("decode")
    clock.stop()
    assert stats.wall_s["read"] > 0
    assert 0 < stats.cpu_s["decode"] <= stats.wall_s["decode"]
    assert stats.cpu_s["read"] == 0  # never watched
    assert stats.workers == {"MainThread": {**stats.wall_s, "rows": 2}}


@pytest.mark.parametrize("num_processes", [0, 1])
def test_loader_adds_up_the_clocks_of_its_workers(corpus: Corpus, num_processes: int):
    loader = corpus.loader(num_processes=num_processes, num_workers=2)
    assert sum(int(batch["valid"].sum()) for batch in loader) == 50
    stats = loader.stats
    assert stats.read_bytes == sum(len(sample.image) for sample in corpus.samples)
    for stage, seconds in stats.wall_s.items():
        assert seconds == pytest.approx(sum(worker[stage] for worker in stats.workers.values()))
        assert 0 < stats.cpu_s[stage] <= seconds
    assert sum(worker["rows"] for worker in stats.workers.values()) == 50


def test_loader_keeps_the_clocks_of_worker_processes_apart(corpus: Corpus):
    loader = corpus.loader(num_processes=2, num_workers=4)
    rows = [int(batch["valid"].sum()) for batch in loader]
    found = {0: 0.0, 1: 0.0}
    for name, worker in loader.stats.workers.items():
        parts = re.fullmatch(r"mmdata-process_([01])-worker_[01]", name)
        assert parts, name
        found[int(parts[1])] += worker["rows"]
    assert found == {0: sum(rows[0::2]), 1: sum(rows[1::2])}  # process p makes every second batch from the p-th on
