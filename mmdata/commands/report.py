"""What runs' models find, for the report: the model of a run's newest checkpoint searches the run's validation set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mmdata.errors import ConfigError, DataError
from mmdata.inspect.page import ReportSection
from mmdata.inspect.queries import TITLE, queries
from mmdata.inspect.runs import short_names
from mmdata.trained import TrainedRun

MAX_SECONDS = 60.0
"""After this time the report embeds no further images; several runs share it."""


def found_by(runs: Sequence[Path], *, max_rows: int) -> list[ReportSection]:
    """Sections with queries and what they find, on the CPU; where something is missing, a section that says what.

    Args:
        runs: folders that `mmdata train` wrote. Runs with one validation set get the same queries.
        max_rows: images to search; with 0 there are no sections.
    """
    if not max_rows:
        return []
    sections: list[ReportSection] = []
    for run, name in zip(runs, short_names(runs), strict=True):
        found = _found_by(run, max_rows, MAX_SECONDS / len(runs))
        sections += [replace(part, title=f"{part.title}: {name}") for part in found] if len(runs) > 1 else found
    return sections


def _found_by(run: Path, max_rows: int, max_seconds: float) -> list[ReportSection]:
    try:
        trained = TrainedRun.load(run)
        with trained.numerics():
            return queries(
                trained.model,
                trained.config.data,
                name=str(run),
                max_rows=max_rows,
                max_seconds=max_seconds,
                autocast_dtype=trained.autocast_dtype,
            )
    except (ConfigError, DataError, OSError) as error:
        return [ReportSection(TITLE, missing=f"No queries: {error}")]
