"""Samples of a stream on their way to a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmdata.shards.columns import hash64
from mmdata.shards.decoder_warnings import sample_name
from mmdata.shards.texts import Loss
from mmdata.streaming.samples import StreamSample
from mmdata.transform.pixels import EncodedImage


@dataclass(frozen=True)
class Waiting:
    """A sample with its caption of this epoch, on its way to a batch.

    Attributes:
        row: the pass's number for it, unique over all ranks.
        tokens: of the caption, untruncated.
    """

    row: int
    sample: StreamSample
    caption: str
    tokens: int


class WaitingSamples:
    """Samples that were waiting, as an `Assembler` takes them."""

    def __init__(self, waiting: list[Waiting]) -> None:
        self._waiting = waiting
        self.keys = [one.sample.key for one in waiting]

    def shard(self, i: int) -> str:
        """Name of the shard."""
        return self._waiting[i].sample.shard

    def offset(self, i: int, kind: Literal["image", "caption"]) -> int:
        """Unknown: -1."""
        return -1

    def image(self, i: int) -> EncodedImage:
        """The image; its random numbers are those of its bytes, so they do not change with the order of a pass."""
        sample = self._waiting[i].sample
        number = sample.image_hash % 2**63
        return EncodedImage(sample.image, sample.info.format, sample.info.orientation, number, checked=True)

    def caption(self, i: int) -> str:
        """The caption chosen for this epoch."""
        return self._waiting[i].caption

    def labels(self) -> NDArray[np.int64]:
        """int64 (n,), -1 where a sample has none."""
        return np.asarray([one.sample.label for one in self._waiting], np.int64)

    def losses(self) -> list[tuple[str, dict[Loss, str]]]:
        """(place, what was lost) of the samples that have lost something."""
        samples = [one.sample for one in self._waiting if one.sample.losses]
        return [(sample_name(sample.shard, sample.key), sample.losses) for sample in samples]

    def image_hashes(self) -> NDArray[np.int64]:
        """int64 (n,)."""
        return np.asarray([one.sample.image_hash for one in self._waiting], np.int64)

    def caption_hashes(self) -> NDArray[np.int64]:
        """int64 (n,)."""
        return np.asarray([hash64(one.caption.encode()) for one in self._waiting], np.int64)
