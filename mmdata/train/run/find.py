"""Finds the checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

from mmdata.config.wrong_place import not_a_run
from mmdata.errors import DataError
from mmdata.recognize import CHECKPOINTS, Kind, recognize
from mmdata.train.run.checkpoint import latest_checkpoint


def find_checkpoint(run: Path) -> Path:
    """The checkpoint itself, or the newest checkpoint of a run's folder.

    Raises:
        DataError: `run` is neither; says what it is, and what to give instead.
    """
    if recognize(run) is Kind.CHECKPOINT:
        return run
    if (path := latest_checkpoint(run / CHECKPOINTS)) is not None:
        return path
    raise DataError(f"'{run}': {not_a_run(run)}")
