"""Small records of many images, kept as JSON text: about their size on disk, where dictionaries take ten times that."""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np


class GroupedRecords:
    """Records in groups, read back group by group in the order in which they were added."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ends = array("q", [0])
        self._groups = array("q")
        self._order = np.zeros(0, np.int64)
        self._sorted = np.zeros(0, np.int64)

    def add(self, group: int, record: dict[str, Any]) -> None:
        """Add a record to a group, a number from 0."""
        self._data += json.dumps(record, separators=(",", ":")).encode()
        self._ends.append(len(self._data))
        self._groups.append(group)

    def close(self) -> None:
        """Make the records readable; none is added after it."""
        groups = np.array(self._groups, np.int64)
        self._order = np.argsort(groups, kind="stable")
        self._sorted = groups[self._order]
        self._groups = array("q")

    def of(self, group: int) -> list[dict[str, Any]]:
        """The records of one group."""
        first, end = np.searchsorted(self._sorted, [group, group + 1])
        places = (int(place) for place in self._order[first:end])
        return [json.loads(self._data[self._ends[place] : self._ends[place + 1]]) for place in places]
