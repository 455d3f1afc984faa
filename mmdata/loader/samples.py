"""What a batch is made of: the samples of a task, read when they are asked for, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mmdata.transform.pixels import EncodedImage


class Samples(Protocol):
    """The n samples of a task, for its rows that are not -1, in that order; i is 0 … n-1."""

    @property
    def keys(self) -> Sequence[str]:
        """n keys."""
        ...

    def shard(self, i: int) -> str:
        """Name of the shard, for messages."""
        ...

    def offset(self, i: int, kind: Literal["image", "caption"]) -> int:
        """Of a member in its shard, in bytes; -1: unknown."""
        ...

    def image(self, i: int) -> EncodedImage:
        """The image, not yet decoded; raises BadSample."""
        ...

    def caption(self, i: int) -> str:
        """The caption chosen for this epoch; raises BadSample."""
        ...

    def labels(self) -> NDArray[np.int64]:
        """int64 (n,), -1 where a sample has none."""
        ...

    def image_hashes(self) -> NDArray[np.int64]:
        """int64 (n,)."""
        ...

    def caption_hashes(self) -> NDArray[np.int64]:
        """Of the chosen captions, int64 (n,)."""
        ...
