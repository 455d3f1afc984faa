"""The samples of a step, each member read by its offset when it is needed."""

from __future__ import annotations

from threading import Event
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import BadSample, Interrupted, Reason
from mmdata.hashing import fast_hash, hash64
from mmdata.images import FORMATS
from mmdata.images.pixels import EncodedImage
from mmdata.index import Index, ShardStore
from mmdata.plan import CaptionSources, choose_captions
from mmdata.tables.captions import TableCaptions
from mmdata.tars import captions_of


class ChosenCaptions(NamedTuple):
    """Which of their captions n samples have.

    Attributes:
        numbers: int64 (n,), place among the captions of the source that have text, from 0.
        sources: names of the n sources, as in `data.captions`; None where it names none. "" for a sample without.
    """

    numbers: NDArray[np.int64]
    sources: list[str] | None


COLUMNS = [
    "image_offset",
    "image_bytes",
    "image_format",
    "orientation",
    "caption_offset",
    "caption_bytes",
    "caption_format",
    "label",
    "image_hash",
    "image_xxh3",
]


CheckImages = Literal["auto", "never"]
"""See `LoadingConfig.check_images`."""


class RowReader:
    """Reads the samples of n rows of an index by their offsets in the shards.

    Args:
        index: of the shards.
        store: reads the members.
        rows: int64 (n,).
        passes: int64 (n,); the pass decides which of its captions a row has.
        check_images: see `LoadingConfig.check_images`.
        stop: once it is set, reads raise Interrupted.
        captions: sources from which the rows draw their captions; None: those of the shards in turn.
    """

    def __init__(
        self,
        index: Index,
        store: ShardStore,
        rows: NDArray[np.int64],
        passes: NDArray[np.int64],
        *,
        check_images: CheckImages = "auto",
        stop: Event | None = None,
        captions: CaptionSources | None = None,
    ) -> None:
        self._index = index
        self._check_images = check_images
        self._store = store
        self._stop = stop or Event()
        self._rows = rows
        self._shards, _ = index.locate(rows)
        self._columns = index.take(rows, COLUMNS)
        self._hash_offsets, self._hashes = index.take_lists(rows, "caption_hash")
        # (n,), caption of each row; a row of a corpus of labels only has none, and is never asked for it
        self._chosen = choose_captions(rows, np.maximum(np.diff(self._hash_offsets), 1), passes)
        self._sources, self._passes = captions, passes
        if captions is not None:
            self._source, self._chosen = captions.choose(rows, passes)
        self.keys = index.keys(rows)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The rows, which key their random numbers: int64 (n,)."""
        return self._rows

    def shard(self, i: int) -> str:
        """Name of the sample's shard, for messages."""
        return self._index.shard_name(int(self._shards[i]))

    def offset(self, i: int, kind: Literal["image", "caption"]) -> int:
        """Offset of a member in its shard, in bytes."""
        return int(self._columns[f"{kind}_offset"][i])

    def image(self, i: int) -> EncodedImage:
        """The encoded image, with the row as number; raises BadSample if it is not the one indexed."""
        image = self.stored_image(i)
        if self._check_images == "never":
            return image
        if fast_hash(image.data) != self._columns["image_xxh3"][i]:
            raise BadSample(Reason.FILE_CHANGED, "image is not the one indexed; `mmdata verify` tells what changed")
        return image._replace(checked=True)  # whoever indexed it has compared the checksums within

    def stored_image(self, i: int) -> EncodedImage:
        """The encoded image as it is in the shard, not compared with its hash."""
        image_format = FORMATS[self._columns["image_format"][i]]
        orientation = int(self._columns["orientation"][i])
        return EncodedImage(self._read(i, "image"), image_format, orientation, int(self._rows[i]))

    def caption(self, i: int) -> str:
        """The caption chosen for this pass; raises BadSample."""
        if self._sources is not None:
            if (number := int(self._source[i])) < 0:
                raise BadSample(Reason.MISSING_CAPTION, f"no caption in {', '.join(self._sources.names)}")
            if isinstance(source := self._sources.sources[number], TableCaptions):
                return source.text(int(self._rows[i]), int(self._chosen[i]))
        keys = self._index.caption_keys(int(self._shards[i]))
        captions = captions_of(self._read(i, "caption"), int(self._columns["caption_format"][i]), keys)
        indexed = self._hashes[self._hash_offsets[i] : self._hash_offsets[i + 1]]
        if not len(indexed):
            raise BadSample(Reason.MISSING_CAPTION, "the shards hold labels and no captions")
        chosen = int(self._chosen[i])
        # The length of the indexed caption decided the row's bucket; another caption may not fit into it.
        if len(captions) != len(indexed) or hash64(captions[chosen].encode()) != indexed[chosen]:
            raise BadSample(Reason.FILE_CHANGED, "caption is not the one indexed; `mmdata verify` tells what changed")
        return captions[chosen]

    def labels(self) -> NDArray[np.int64]:
        """Labels, int64 (n,); -1 where a row has none."""
        return self._columns["label"]

    def image_hashes(self) -> NDArray[np.int64]:
        """Hashes of the images, int64 (n,)."""
        return self._columns["image_hash"]

    def caption_hashes(self) -> NDArray[np.int64]:
        """Hashes of the chosen captions, int64 (n,)."""
        if self._sources is not None:
            return self._sources.hashes(self._rows, self._passes)
        return self._hashes[self._hash_offsets[:-1] + self._chosen]

    def chosen_captions(self) -> ChosenCaptions:
        """Which of their captions the samples have."""
        if self._sources is None:
            return ChosenCaptions(self._chosen, None)
        names = [*self._sources.names, ""]  # -1 is the last
        return ChosenCaptions(self._chosen, [names[number] for number in self._source.tolist()])

    def _read(self, i: int, kind: Literal["image", "caption"]) -> bytes:
        size = int(self._columns[f"{kind}_bytes"][i])
        if self._stop.is_set():
            raise Interrupted(self.shard(i))
        return self._store.read(int(self._shards[i]), self.offset(i, kind), size, self._stop)
