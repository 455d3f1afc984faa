"""Rank and world size that are left out: those that the launcher says in the environment, and never silently equal."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from torch.utils.data import DistributedSampler

from mmdata import launcher
from mmdata.errors import ConfigError
from mmdata.launcher import launched, resolve_ranks, slurm_variables
from mmdata.samplers import BucketBatchSampler, TwoStreamBatchSampler
from tests.logs import of_mmdata

VARIABLES = ["RANK", *launcher.UNTRUSTED.values()]


@pytest.fixture(autouse=True)
def _said_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    launcher._say_taken.cache_clear()
    launcher._warn_of_equal_rows.cache_clear()
    yield
    launcher._say_taken.cache_clear()
    launcher._warn_of_equal_rows.cache_clear()


def set_ranks(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_launched_takes_rank_and_world_size_only_together():
    assert launched({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}) == (2, 4)
    assert launched({"RANK": "0", "WORLD_SIZE": "1"}) == (0, 1)
    for alone in ({}, {"RANK": "2"}, {"WORLD_SIZE": "4"}, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}):
        assert launched(alone) is None


@pytest.mark.parametrize(
    ("rank", "world_size"), [("2", "2"), ("-1", "2"), ("one", "2"), ("0", ""), ("0", "0"), ("²", "4")]
)
def test_launched_refuses_what_is_no_rank_in_a_world(rank: str, world_size: str):
    with pytest.raises(
        ConfigError, match=rf"RANK='{rank}' and WORLD_SIZE='{world_size}': expected whole numbers, 0 <= R"
    ):
        launched({"RANK": rank, "WORLD_SIZE": world_size})


def test_resolve_ranks_says_once_what_it_takes_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    set_ranks(monkeypatch, RANK="0", WORLD_SIZE="2")
    assert [resolve_ranks(None, None) for _ in range(3)] == [(0, 2)] * 3
    (record,) = of_mmdata(caplog)
    assert record.getMessage().startswith(
        "the launcher started 2 processes (RANK and WORLD_SIZE): loaders, streams and"
    )
    assert record.levelno == logging.WARNING
    set_ranks(monkeypatch, RANK="1")
    with caplog.at_level(logging.INFO):
        resolve_ranks(None, None)
    assert [(one.levelno, one.args) for one in of_mmdata(caplog)[1:]] == [(logging.INFO, (2, 1))]


def test_resolve_ranks_prefers_what_is_given_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    set_ranks(monkeypatch, RANK="1", WORLD_SIZE="2")
    assert resolve_ranks(0, 1) == (0, 1)
    assert resolve_ranks(3, 8) == (3, 8)
    set_ranks(monkeypatch, RANK="0", WORLD_SIZE="1")
    assert resolve_ranks(None, None) == (0, 1)
    assert of_mmdata(caplog) == []


def test_resolve_ranks_wants_both():
    with pytest.raises(ValueError, match="rank and world_size go together: got rank=1, world_size=None"):
        resolve_ranks(1, None)
    with pytest.raises(ValueError, match="rank and world_size go together: got rank=None, world_size=2"):
        resolve_ranks(None, 2)


@pytest.mark.parametrize("variable", launcher.UNTRUSTED.values())
def test_resolve_ranks_warns_once_where_a_launcher_says_no_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
):
    set_ranks(monkeypatch, **{variable: "1"})
    assert resolve_ranks(None, None) == (0, 1)
    assert of_mmdata(caplog) == []
    set_ranks(monkeypatch, **{variable: "4"})
    assert [resolve_ranks(None, None) for _ in range(2)] == [(0, 1)] * 2
    (record,) = of_mmdata(caplog)
    assert f"{variable}=4: several processes were started by " in record.getMessage()
    assert "the others give the same rows: pass rank and world_size" in record.getMessage()
    assert record.getMessage().endswith("In Lightning, give Trainer.fit a LoaderDataModule in place of a loader")


def test_samplers_warn_of_equal_rows_where_they_give_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    set_ranks(monkeypatch, WORLD_SIZE="2")  # as in a process that Lightning has started
    left_out = BucketBatchSampler([1, 2, 3, 4], 2)
    shares = DistributedSampler(range(4), num_replicas=2, rank=1)
    for known in (
        BucketBatchSampler([1, 2, 3, 4], 1, sampler=shares),
        BucketBatchSampler([1] * 4, 2, rank=0, world_size=1),
    ):
        assert len(list(known)) == 2
    assert of_mmdata(caplog) == []
    list(left_out)
    (record,) = of_mmdata(caplog)
    assert "WORLD_SIZE=2: several processes were started by " in record.getMessage()


def test_samplers_take_the_launchers_ranks_unless_others_are_given(monkeypatch: pytest.MonkeyPatch):
    set_ranks(monkeypatch, RANK="1", WORLD_SIZE="2")
    for make in (
        lambda **ranks: BucketBatchSampler([1, 2, 3, 4] * 4, 2, **ranks),
        lambda **ranks: TwoStreamBatchSampler(range(16), range(16, 20), 4, 1, **ranks),
    ):
        taken, given, alone = make(), make(rank=1, world_size=2), make(rank=0, world_size=1)
        assert (taken.rank, taken.world_size) == (1, 2)
        assert list(taken) == list(given)
        assert (alone.rank, alone.world_size) == (0, 1)


TASK = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1234567"}
TASK |= {"SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "node[07-08]"}


def test_slurm_variables_of_a_task_are_those_of_torchrun():
    assert slurm_variables(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": "19569",
    }
    assert slurm_variables({**TASK, "CUDA_VISIBLE_DEVICES": "3"})["LOCAL_RANK"] == "0"
    assert slurm_variables({**TASK, "CUDA_VISIBLE_DEVICES": "3,4"})["LOCAL_RANK"] == "1"
    assert slurm_variables({**TASK, "MASTER_ADDR": "10.0.0.1", "RANK": "5"})["MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    "hosts", ["alpha", "alpha,beta[1-2]", "node[01-04,7],gpu3", "node[3,5]", "a-b[010-012]", "10.0.0.[1-3]"]
)
def test_slurm_variables_take_the_first_host_as_lightning_does(hosts: str):
    environments = pytest.importorskip("lightning.fabric.plugins.environments")
    first = environments.SLURMEnvironment.resolve_root_node_address(hosts)
    assert slurm_variables({**TASK, "SLURM_STEP_NODELIST": hosts})["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},  # a batch script of sbatch
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},  # an interactive shell of salloc
        {**TASK, "GROUP_WORLD_SIZE": "8", "RANK": "11", "WORLD_SIZE": "64"},  # one torchrun a task
    ],
)
def test_slurm_variables_are_none_where_srun_starts_no_ranks(variables: dict[str, str]):
    assert slurm_variables(variables) == {}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "8"},
            "RANK=0 contradicts 5, that of task 5 of 8 that srun started: unset RANK, or",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 contradicts 8, that of task 5 of 8 that srun started: unset WORLD_SIZE"),
        ({"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "0"}, "LOCAL_RANK=5 contradicts 0, that of task 5 of 8 that srun"),
        (
            {"GROUP_WORLD_SIZE": "1"},
            r"srun started 8 tasks .*, and torchrun here joins 1 of them .* start one torchrun a",
        ),
    ],
)
def test_slurm_variables_that_contradict_torchs_are_refused(variables: dict[str, str], said: str):
    with pytest.raises(ConfigError, match=said):
        slurm_variables({**TASK, **variables})
