"""Functions that are called in other processes: order, errors, progress, and processes that die."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mmdata import processes
from mmdata.errors import DamagedShard, DataError
from mmdata.processes import (
    WORTH_BYTES,
    cpu_quota,
    map_concurrently,
    map_in_processes,
    most_workers,
    usable_cores,
    workers_for,
)
from tests.interrupts import forget_threads_that_never_began, interrupt_at_thread
from tests.loader.worker_processes import gone
from tests.programs import PATIENCE_S, run_program

Step = Callable[[int], None]
NAMES = [f"{number}.tar" for number in range(9)]


def described(number: int, step: Step) -> tuple[int, int]:
    for offset in range(3):
        time.sleep(0.15)  # reports are 0.2 s apart, and nothing waits for one
        step(100 * number + offset)
    return number, os.getpid()


def fails_at_2_and_5(number: int, step: Step) -> int:
    if number in (2, 5):
        raise DamagedShard(f"shard '{number}.tar', byte 9: cut", "fetch it again", ("a", 3))
    return number


def stays_at_work(number: int, step: Step) -> int:
    if number > 0:
        time.sleep(PATIENCE_S)
    return os.getpid()


def dies_at_3(number: int, step: Step) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def run(function: Callable[[int, Step], Any], told: list[tuple[int, int]] | None = None, workers: int = 2) -> Any:
    def step(place: int) -> Step:
        return lambda offset: None if told is None else told.append((place, offset))

    return map_in_processes(function, range(9), names=NAMES, workers=workers, step=step)


def test_results_come_in_order_from_several_processes():
    told: list[tuple[int, int]] = []
    numbers, pids = zip(*run(described, told), strict=True)
    assert list(numbers) == list(range(9))
    assert len({*pids, os.getpid()}) == 3
    assert {offset // 100 - place for place, offset in told} == {0}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_error_in_order_is_raised_as_it_is(workers: int):
    results = run(fails_at_2_and_5, workers=workers)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(DamagedShard, match=r"^shard '2\.tar', byte 9: cut; fetch it again$") as caught:
        next(results)
    assert (caught.value.what, caught.value.remedy) == ("shard '2.tar', byte 9: cut", "fetch it again")
    assert caught.value.sample == ("a", 3)


def test_a_process_that_dies_is_an_error_that_names_its_item():
    message = (
        r"^a process died \(signal 9\) at work on '3.tar'; has the machine memory enough\? --workers 1 needs least$"
    )
    with pytest.raises(DataError, match=message):
        list(run(dies_at_3))


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupt_while_a_thread_starts_is_a_keyboard_interrupt(is_begun: bool):
    ended, before = Event(), sys.gettrace()
    sys.settrace(interrupt_at_thread("mmdata-tars", is_begun=is_begun))
    try:
        with pytest.raises(KeyboardInterrupt):
            list(map_concurrently(str, range(9), threads=3, end=ended.set))
    finally:
        sys.settrace(before)
        forget_threads_that_never_began()
    assert ended.is_set()


def test_processes_start_in_a_program_without_a_guard_and_end_with_it(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "from tests.test_processes import run, stays_at_work\n"
        "import os, signal\n"
        "print(next(run(stays_at_work)), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).parents[1])
    done = run_program(
        [sys.executable, str(program)], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert gone(int(done.stdout), within_s=100)


def test_a_process_starts_for_each_core_where_there_is_enough_to_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mmdata.processes.usable_cores", lambda: 6)
    assert [workers_for(size, None) for size in (0, WORTH_BYTES - 1, WORTH_BYTES)] == [1, 1, 6]
    assert [workers_for(0, 3), workers_for(WORTH_BYTES, 1)] == [3, 1]


def test_cpu_quota_reads_both_cgroup_versions(tmp_path: Path):
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(tmp_path) == 0.5


def test_usable_cores_are_those_of_the_container_shared_by_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "num_cores", lambda: 16)
    assert usable_cores({}, cgroup=tmp_path) == 16
    assert usable_cores({"LOCAL_WORLD_SIZE": "8"}, cgroup=tmp_path) == 2
    assert usable_cores({"LOCAL_WORLD_SIZE": "many"}, cgroup=tmp_path) == 16
    (tmp_path / "cpu.max").write_text("650000 100000\n")
    assert usable_cores({}, cgroup=tmp_path) == 6
    assert usable_cores({"LOCAL_WORLD_SIZE": "64"}, cgroup=tmp_path) == 1
    assert most_workers(0) == 0
