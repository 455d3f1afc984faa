"""A row as its source has it, and what a source is. A row's number in its source's fixed order is its identity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from mmdata.errors import Reason


@dataclass(frozen=True)
class Row:
    """One input row, as found: nothing in it is checked yet.

    Attributes:
        number: position in the source, from 0.
        place: where it stands, for people.
        image: path relative to the source's root; anything else is a fault to be found.
        captions: values of the caption columns: strings, lists of strings, None, or what else was there.
        label: class number or name, or None.
        extra: further columns to keep, by the name they are stored under.
        sidecars: paths of files that hold captions, label and extra instead.
        fault: reason and detail where the row could not be read at all.
    """

    number: int
    place: str
    image: Any = None
    captions: tuple[Any, ...] = ()
    label: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    sidecars: tuple[str, ...] = ()
    fault: tuple[Reason, str] | None = None


class Source(Protocol):
    """A raw corpus.

    Attributes:
        root: real path of the folder that all images lie below.
        rows_at_most: bound on the number of rows, exact for folders and Parquet.
    """

    root: str
    rows_at_most: int

    def rows(self) -> Iterator[Row]:
        """All rows, in the same order every time."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was read, without a machine's paths or clocks: equal for equal input."""
        ...
