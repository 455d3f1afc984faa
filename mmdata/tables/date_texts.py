"""Dates in conditions: texts of ISO 8601, compared with columns of dates and times as values, exactly.

A date is its midnight. A time without a zone is one of UTC.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import date, time
from typing import Any

import numpy as np

from mmdata.tables.three_valued import Evaluate, Values, pairwise

_ISO = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)"
    r"(?:[T ](?P<clock>\d\d:\d\d(?::\d\d)?)(?:(?<=:\d\d:\d\d)\.(?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?)?",
    re.ASCII,
)
EXAMPLES = {
    "date": "'2024-01-05'",
    "timestamp": "'2024-01-05' or '2024-01-05T16:30:00'",
    "timestamp with a zone": "'2024-01-05', '2024-01-05T16:30:00Z' or '2024-01-05T16:30:00+01:00'",
}
"""Texts for a column of each kind, for messages."""


def parse_date(text: str, *, has_zone: bool) -> np.datetime64:
    """A date, or a date and a time of day, in ISO 8601; exactly.

    Args:
        text: such as 2024-01-05, 2024-01-05T16:30 or 2024-01-05 16:30:00.25+01:00.
        has_zone: whether the text may name a zone.

    Raises:
        ValueError: it is something else; says what.
    """
    if (found := _ISO.fullmatch(text)) is None:
        raise ValueError("expected ISO 8601")
    zone, fraction = found["zone"], found["fraction"]
    if zone and not has_zone:
        raise ValueError(f"the column's times have no zone, and this has '{zone}': leave it out")
    try:
        day = np.datetime64(date.fromisoformat(found["date"]), "D")
        clock = time.fromisoformat(found["clock"] or "00:00")
    except ValueError as error:  # 30 February
        raise ValueError(str(error)) from None
    seconds = clock.hour * 3600 + clock.minute * 60 + clock.second
    if zone and zone != "Z":
        hours, minutes = int(zone[1:3]), int(zone[-2:])
        if hours > 23 or minutes > 59:
            raise ValueError(f"there is no zone '{zone}'")
        seconds -= (hours * 3600 + minutes * 60) * (-1 if zone[0] == "-" else 1)
    moment = day + np.timedelta64(seconds, "s")
    if not fraction:
        return moment
    if len(fraction) <= 6:
        return moment + np.timedelta64(int(fraction.ljust(6, "0")), "us")
    if not 1678 <= int(text[:4]) <= 2261:
        raise ValueError("fractions of seconds have up to 6 digits in this year")
    return moment + np.timedelta64(int(fraction.ljust(9, "0")), "ns")


def compared(operate: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    """A comparison of two moments of a row; unknown where one of them is missing."""

    def compare(one: Any, other: Any) -> Any:
        sides = [_parts(side) for side in (one, other)]
        order = 2 * np.sign(sides[0][0] - sides[1][0]) + np.sign(sides[0][1] - sides[1][1])
        return operate(order, 0)

    return pairwise(compare, left, right)


def is_in_dates(evaluate: Evaluate, moments: Sequence[np.datetime64]) -> Evaluate:
    """Whether a moment is one of several."""
    wanted = {tuple(int(part) for part in _parts(moment)) for moment in moments}

    def is_in(columns: Any) -> Values:
        found = evaluate(columns)
        days, rest = (part.tolist() for part in _parts(np.atleast_1d(found.values)))
        return Values(np.array([pair in wanted for pair in zip(days, rest, strict=True)], np.bool_), found.known)

    return is_in


def _parts(moments: Any) -> tuple[Any, Any]:
    """Days since 1970, and nanoseconds of the day: int64. Nanoseconds since 1970 would hold 292 years only."""
    moments = np.asarray(moments)
    days = moments.astype("datetime64[D]")
    return days.astype(np.int64), (moments - days).astype("timedelta64[ns]").astype(np.int64)
