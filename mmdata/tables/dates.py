"""Dates and times of tables: what a condition compares, and the texts of ISO 8601 that batches have."""

from __future__ import annotations

import re
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute

compute: Any = pyarrow.compute  # pyarrow's functions have no types

DateKind = Literal["date", "timestamp", "timestamp with a zone"]
DATES: tuple[DateKind, ...] = ("date", "timestamp", "timestamp with a zone")
_EXAMPLES = {
    "date": "'2024-01-05'",
    "timestamp": "'2024-01-05' or '2024-01-05T16:30:00'",
    "timestamp with a zone": "'2024-01-05', '2024-01-05T16:30:00Z' or '2024-01-05T16:30:00+01:00'",
}
_ZONE = re.compile(r"(?:Z|[+-]\d\d(?::?\d\d)?)$")
_DATE_CHARACTERS = 10  # 2024-01-05


def date_kind(kind: Any) -> DateKind | None:
    """What an Arrow type holds; None if it holds no dates."""
    if pa.types.is_date(kind):
        return "date"
    if not pa.types.is_timestamp(kind):
        return None
    return "timestamp" if kind.tz is None else "timestamp with a zone"


def examples_of(kind: Any) -> str:
    """Texts for a column of an Arrow type, for messages."""
    return _EXAMPLES[date_kind(kind) or "date"]


def compared_type(kind: Any) -> Any:
    """The type in which a column of dates is compared: times of UTC, in nanoseconds where the column has them.

    A date is its midnight. Microseconds hold all years from 1 to 9999, nanoseconds those from 1678 to 2261.
    """
    return pa.timestamp("ns" if pa.types.is_timestamp(kind) and kind.unit == "ns" else "us")


def parse_date(text: str, kind: Any) -> Any:
    """A date, or a date and a time of day, in ISO 8601: a scalar of `compared_type(kind)`.

    A time without a zone is one of UTC. Beside nanoseconds, a year that they do not hold is the nearest time they do.

    Args:
        text: such as 2024-01-05, 2024-01-05T16:30 or 2024-01-05 16:30:00.25+01:00.
        kind: Arrow's type of the column beside the text.

    Raises:
        ValueError: it is something else; says what.
    """
    zone = _ZONE.search(text, _DATE_CHARACTERS)
    if zone and date_kind(kind) != "timestamp with a zone":
        raise ValueError(f"the column's times have no zone, and this has '{zone[0]}': leave it out")
    wanted = compared_type(kind)
    try:
        return pa.scalar(text).cast(pa.timestamp(wanted.unit, "UTC" if zone else None)).cast(wanted)
    except pa.ArrowInvalid:
        if wanted.unit == "us":
            raise ValueError(f"expected a date that exists, in ISO 8601, such as {examples_of(kind)}") from None
    year = parse_date(text, pa.timestamp("us", kind.tz)).as_py().year
    return pa.scalar(2**63 - 1 if year > 1970 else 1 - 2**63, wanted)


def iso_texts(values: Any) -> Any:
    """Dates and times as texts, an Arrow array: 2024-01-07, 2024-01-07T16:00:00, 2024-01-07T16:00:00.250000Z.

    Times of a zone are those of UTC. A fraction of 0 is left out.
    """
    if pa.types.is_timestamp(values.type) and values.type.tz is not None:
        values = values.cast(pa.timestamp(values.type.unit, "UTC"))
    texts = compute.replace_substring_regex(values.cast(pa.string()), r"^([^ ]*) ", r"\1T", max_replacements=1)
    return compute.replace_substring_regex(texts, r"\.0+(Z?)$", r"\1")
