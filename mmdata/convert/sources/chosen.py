"""The rows of indexed tars that a conversion takes: `mmdata convert SHARDS OUT --select CONDITION`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ChosenRows:
    """Rows of an index, by the places of their images. Who knows conditions makes it: `mmdata.cli.chosen`.

    Attributes:
        words: the condition, for messages and accounts.
        digest: equal for equal rows.
        offsets: by the name of a tar, the offsets of its chosen images, ascending int64.
    """

    words: str
    digest: str
    offsets: Mapping[str, NDArray[np.int64]]

    def holds(self, tar: str, offset: int | None) -> bool:
        """Whether the sample whose image begins at this offset of a tar is chosen; None: it is not in the index."""
        offsets = self.offsets.get(tar)
        if offset is None or offsets is None or not len(offsets):
            return False
        place = int(np.searchsorted(offsets, offset))
        return place < len(offsets) and int(offsets[place]) == offset

    def describe(self) -> dict[str, Any]:
        """What it adds to `Source.describe`."""
        return {"select": self.words, "selected": self.digest}
