"""Rank and world size of this process, from the environment variables of the launcher that started it.

The data half takes rank and world size as arguments and never asks torch.distributed. Without arguments it asks this
module.
"""

from __future__ import annotations

import logging
import os
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
process per machine that starts the others. So no rank is taken from them; there is only a warning."""


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
