"""Dates and times of tables: what a condition compares, and the texts of ISO 8601 that batches have."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute

compute: Any = pyarrow.compute  # pyarrow's functions have no types

DateKind = Literal["date", "timestamp", "timestamp with a zone"]
DATES: tuple[DateKind, ...] = ("date", "timestamp", "timestamp with a zone")


def date_kind(kind: Any) -> DateKind | None:
    """What an Arrow type holds; None if it holds no dates."""
    if pa.types.is_date(kind):
        return "date"
    if not pa.types.is_timestamp(kind):
        return None
    return "timestamp" if kind.tz is None else "timestamp with a zone"


def iso_texts(values: Any) -> Any:
    """Dates and times as texts, an Arrow array: 2024-01-07, 2024-01-07T16:00:00, 2024-01-07T16:00:00.250000Z.

    Times of a zone are those of UTC. A fraction of 0 is left out.
    """
    if pa.types.is_timestamp(values.type) and values.type.tz is not None:
        values = values.cast(pa.timestamp(values.type.unit, "UTC"))
    texts = compute.replace_substring_regex(values.cast(pa.string()), r"^([^ ]*) ", r"\1T", max_replacements=1)
    return compute.replace_substring_regex(texts, r"\.0+(Z?)$", r"\1")
