"""The samples of a step, each member read by its offset when it is needed."""

from __future__ import annotations

from threading import Event
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import BadSample, Interrupted, Reason
from mmdata.hashing import fast_hash, hash64
from mmdata.images import FORMATS
from mmdata.images.pixels import Decoded, EncodedImage, SmallImage
from mmdata.index import Index, ShardStore
from mmdata.loader.pixel_cache import PixelCache
from mmdata.plan import CaptionSources, ShardCaptions
from mmdata.tables.captions import TableCaptions
from mmdata.tars import captions_of

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


class RowReader:
    """Reads the samples of n rows of an index by their offsets in the shards.

    Args:
        index: of the shards.
        store: reads the members.
        rows: int64 (n,).
        passes: int64 (n,); the pass decides which of its captions a row has.
        captions: sources from which the rows draw their captions; default: those of the shards in turn.
        stop: once it is set, reads raise Interrupted.
        kept: keeps decoded images; None: nothing does.

    Attributes:
        rows: as given; they key the rows' random numbers.
        keys: of the samples.
        chosen: the source, and the place among its captions, of the caption that each row has in its pass.
    """

    def __init__(
        self,
        index: Index,
        store: ShardStore,
        rows: NDArray[np.int64],
        passes: NDArray[np.int64],
        *,
        captions: CaptionSources | None = None,
        stop: Event | None = None,
        kept: PixelCache | None = None,
    ) -> None:
        self._index, self._store, self._kept, self._stop = index, store, kept, stop or Event()
        self.rows, self._passes = rows, passes
        self._shards, _ = index.locate(rows)
        self._columns = index.take(rows, COLUMNS)
        self._hash_offsets, self._hashes = index.take_lists(rows, "caption_hash")
        self._captions = captions or CaptionSources.in_turn(ShardCaptions(index))
        self.chosen = self._captions.choose(rows, passes)
        self.keys = index.keys(rows)

    def shard(self, i: int) -> str:
        """Name of the sample's shard, for messages."""
        return self._index.shard_name(int(self._shards[i]))

    def offset(self, i: int, kind: Literal["image", "caption"]) -> int:
        """Offset of a member in its shard, in bytes."""
        return int(self._columns[f"{kind}_offset"][i])

    def image(self, i: int) -> EncodedImage:
        """The encoded image, with the row as number; raises BadSample if it is not the one indexed."""
        image = self.stored_image(i)
        if fast_hash(image.data) != self._columns["image_xxh3"][i]:
            raise BadSample(Reason.FILE_CHANGED, "image is not the one indexed; `mmdata verify` tells what changed")
        return image._replace(checked=True)  # whoever indexed it has compared the checksums within

    def kept_image(self, i: int) -> SmallImage | None:
        """What `keep` has kept of the image, which is then not read; None: nothing."""
        return None if self._kept is None else self._kept.read(int(self.rows[i]))

    def keep(self, i: int, decoded: Decoded) -> None:
        """Keep what was decoded of an image, as small as `shorter_side` says, if decoded images are kept."""
        if self._kept is not None:
            self._kept.write(decoded.small)

    def stored_image(self, i: int) -> EncodedImage:
        """The encoded image as it is in the shard, not compared with its hash."""
        image_format = FORMATS[self._columns["image_format"][i]]
        orientation = int(self._columns["orientation"][i])
        return EncodedImage(self._read(i, "image"), image_format, orientation, int(self.rows[i]))

    def caption(self, i: int) -> str:
        """The caption chosen for this pass; raises BadSample."""
        number, chosen = int(self.chosen.source[i]), int(self.chosen.position[i])
        if number < 0:
            raise BadSample(Reason.MISSING_CAPTION, f"no caption in {', '.join(self._captions.names)}")
        if isinstance(source := self._captions.sources[number], TableCaptions):
            return source.text(int(self.rows[i]), chosen)
        keys = self._index.caption_keys(int(self._shards[i]))
        captions = captions_of(self._read(i, "caption"), int(self._columns["caption_format"][i]), keys)
        indexed = self._hashes[self._hash_offsets[i] : self._hash_offsets[i + 1]]
        # The length of the indexed caption decided the row's bucket; another caption may not fit into it.
        if len(captions) != len(indexed) or hash64(captions[chosen].encode()) != indexed[chosen]:
            raise BadSample(Reason.FILE_CHANGED, "caption is not the one indexed; `mmdata verify` tells what changed")
        return captions[chosen]

    def column(self, name: Literal["label", "image_hash"]) -> NDArray[np.int64]:
        """A column of the index, int64 (n,): labels, -1 where a row has none, or hashes of the images."""
        return self._columns[name]

    def caption_hashes(self) -> NDArray[np.int64]:
        """Hashes of the chosen captions, int64 (n,)."""
        return self._captions.hashes(self.rows, self._passes)

    def caption_sources(self) -> list[str]:
        """Names of the sources of the chosen captions, as in `data.captions`; "" for a sample without one."""
        names = [*self._captions.names, ""]  # -1 is the last
        return [names[number] for number in self.chosen.source.tolist()]

    def _read(self, i: int, kind: Literal["image", "caption"]) -> bytes:
        size = int(self._columns[f"{kind}_bytes"][i])
        if self._stop.is_set():
            raise Interrupted(self.shard(i))
        return self._store.read(int(self._shards[i]), self.offset(i, kind), size, self._stop)
