"""Rank and world size of this process, from the environment variables of the launcher that started it.

The data half takes rank and world size as arguments and never asks torch.distributed. Without arguments it asks this
module.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from mmdata.errors import ConfigError

logger = logging.getLogger("mmdata")

UNTRUSTED = {
    "srun": "SLURM_STEP_NUM_TASKS",
    "mpirun (Open MPI)": "OMPI_COMM_WORLD_SIZE",
    "mpirun (MPICH, Intel MPI)": "PMI_SIZE",
    "Lightning or another launcher that sets no RANK": "WORLD_SIZE",
}
"""Launchers, and their variables for the number of processes. These launchers also start independent processes, or one
process per machine that starts the others. So no rank is taken from them; there is only a warning. Only for `mmdata
train` and `mmdata evaluate`, whose processes are always ranks, srun is one: see `slurm_variables`."""


class Ranks(NamedTuple):
    """Which share of each global batch a process has.

    Attributes:
        rank: 0 … world_size-1.
        world_size: processes that share each global batch.
    """

    rank: int = 0
    world_size: int = 1


def launched(environment: Mapping[str, str] | None = None) -> Ranks | None:
    """Rank and world size from RANK and WORLD_SIZE; None unless both are set.

    `torch.distributed.init_process_group` reads the same variables. torchrun, `accelerate launch`, DeepSpeed's launcher
    and Ray Train set both in each process that they start.

    Args:
        environment: the variables; None takes those of this process.

    Raises:
        ConfigError: they are not whole numbers with 0 <= RANK < WORLD_SIZE.
    """
    variables = os.environ if environment is None else environment
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    words = variables["RANK"], variables["WORLD_SIZE"]
    rank, world_size = (int(word) if word.isascii() and word.isdecimal() else -1 for word in words)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"the environment has RANK={words[0]!r} and WORLD_SIZE={words[1]!r}: expected whole numbers, "
            "0 <= RANK < WORLD_SIZE, as torchrun sets them; unset both, or pass rank and world_size"
        )
    return Ranks(rank, world_size)


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, for the tasks of an srun: each is a rank.

    Empty outside a step of several tasks. A batch script of sbatch has SLURM_PROCID and SLURM_NTASKS too, but no step.
    Under one torchrun a task, torchrun says the ranks.

    Args:
        environment: the variables of this process. Those of torch that are set are kept.

    Returns:
        RANK, WORLD_SIZE, LOCAL_RANK (0 where the task sees a single GPU), MASTER_ADDR, the first host of the step, and
        MASTER_PORT, drawn from the numbers of job and step.

    Raises:
        ConfigError: one of them is set and contradicts these, or torchrun spans not all tasks.

    Example:
        Task 5 of 8 on hosts of 4: RANK 5, WORLD_SIZE 8, LOCAL_RANK 1.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    if not tasks.isdecimal() or int(tasks) == 1:
        return {}
    torchruns = environment.get("GROUP_WORLD_SIZE", tasks)
    if torchruns != tasks:
        raise ConfigError(
            f"srun started {tasks} tasks (SLURM_STEP_NUM_TASKS), and torchrun here joins {torchruns} of them "
            "(GROUP_WORLD_SIZE): the others would train the same run; start one torchrun a node "
            "(srun --ntasks-per-node 1), each with --nnodes and --rdzv-endpoint, or start the program without torchrun"
        )
    if "GROUP_WORLD_SIZE" in environment:
        return {}
    one_gpu = re.fullmatch("[^,]+", environment.get("CUDA_VISIBLE_DEVICES", ""))
    ours = {
        "RANK": environment.get("SLURM_PROCID", ""),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": "0" if one_gpu else environment.get("SLURM_LOCALID", "0"),
    }
    for name, value in ours.items():
        if environment.get(name, value) != value:
            raise ConfigError(
                f"{name}={environment[name]} contradicts {value}, that of task {ours['RANK']} of {tasks} that srun "
                f"started: unset {name}, or start the program with torchrun, one a node"
            )
    first_host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", environment.get("SLURM_STEP_NODELIST", "")).partition(",")[0]
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    place = {"MASTER_ADDR": first_host, "MASTER_PORT": str(15_000 + (job + step) % 10_000)}
    return ours | {name: environment.get(name, value) for name, value in place.items()}


def resolve_ranks(rank: int | None, world_size: int | None, *, warn: bool = True) -> Ranks:
    """Rank and world size as given, or else from the launcher, or else 0 and 1.

    Logs once per process that they came from the launcher, or that several processes were started without RANK.

    Args:
        rank: 0 … world_size-1.
        world_size: processes that share each global batch. Given with rank.
        warn: False where a trainer may set other ranks before any row is given: then no warning of equal rows.

    Raises:
        ConfigError: see `launched`.
        ValueError: one of the two is given without the other.
    """
    if rank is not None and world_size is not None:
        return Ranks(rank, world_size)
    if rank is not None or world_size is not None:
        raise ValueError(f"rank and world_size go together: got rank={rank}, world_size={world_size}")
    found = launched()
    if found is None:
        for launcher, variable in UNTRUSTED.items():
            count = os.environ.get(variable, "")
            if warn and count.isdecimal() and int(count) > 1:
                _warn_of_equal_rows(launcher, variable, int(count))
                break
        return Ranks()
    if found.world_size > 1:
        _say_taken(*found)
    return found


@cache
def _say_taken(rank: int, world_size: int) -> None:
    level = logging.WARNING if rank == 0 else logging.INFO  # one warning for all ranks is enough
    logger.log(
        level,
        "the launcher started %d processes (RANK and WORLD_SIZE): loaders, streams and samplers without rank and "
        "world_size take the share of rank %d. Pass rank=0, world_size=1 for all rows in each process, also where "
        "accelerator.prepare shares out a sampler's batches",
        world_size,
        rank,
    )


@cache
def _warn_of_equal_rows(launcher: str, variable: str, count: int) -> None:
    logger.warning(
        "%s=%d: several processes were started by %s. This one gives all rows, and the others give the same rows: pass "
        "rank and world_size to share them out, or start the program with torchrun, which says them in RANK and "
        "WORLD_SIZE. In Lightning, give Trainer.fit a LoaderDataModule in place of a loader",
        variable,
        count,
        launcher,
    )
