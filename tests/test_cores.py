from __future__ import annotations

from pathlib import Path

import pytest

from mmdata import cores
from mmdata.cores import cpu_quota, most_workers, usable_cores


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
    monkeypatch.setattr(cores, "num_cores", lambda: 16)
    assert usable_cores({}, cgroup=tmp_path) == 16
    assert usable_cores({"LOCAL_WORLD_SIZE": "8"}, cgroup=tmp_path) == 2
    assert usable_cores({"LOCAL_WORLD_SIZE": "many"}, cgroup=tmp_path) == 16
    (tmp_path / "cpu.max").write_text("650000 100000\n")
    assert usable_cores({}, cgroup=tmp_path) == 6
    assert usable_cores({"LOCAL_WORLD_SIZE": "64"}, cgroup=tmp_path) == 1
    assert most_workers(0) == 0
