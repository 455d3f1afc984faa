"""What a run's model finds, for the report: the model of its newest checkpoint searches its validation set."""

from __future__ import annotations

from pathlib import Path

from mmdata.errors import ConfigError, DataError
from mmdata.inspect.page import Section
from mmdata.inspect.queries import TITLE, queries
from mmdata.trained import TrainedRun

QUERY_ROWS = 1000
"""Images that the queries of a report are asked among."""
MAX_SECONDS = 60.0
"""After this time the report embeds no further images."""


def found_by(run: Path, *, max_rows: int = QUERY_ROWS) -> list[Section]:
    """Sections with queries and what they find, on the CPU; where something is missing, a section that says what.

    Args:
        run: folder that `mmdata train` wrote.
        max_rows: images to search; with 0 there are no sections.
    """
    if not max_rows:
        return []
    try:
        trained = TrainedRun.load(run)
        return queries(
            trained.model,
            trained.config.data,
            name=str(run),
            max_rows=max_rows,
            max_seconds=MAX_SECONDS,
            autocast_dtype=trained.autocast_dtype,
        )
    except (ConfigError, DataError, OSError) as error:
        return [Section(TITLE, missing=f"No queries: {error}")]
