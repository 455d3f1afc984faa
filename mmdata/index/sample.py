"""One sample of an index as a person looks at it: `index[3]`. Its members are read when they are asked for."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdata.errors import DataError, excerpt, nearest
from mmdata.hashing import fast_hash
from mmdata.images.probe import FORMATS
from mmdata.index.store import ShardStore
from mmdata.processes import cached_property
from mmdata.tars.scan import NO_IMAGE

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmdata.index.index import Index

COLUMNS = ("image_offset", "image_bytes", "image_format", "height", "width", "label", "image_xxh3")
MAX_CANDIDATES = 100_000
"""The first keys of an index, among which the one nearest to an unknown key is looked for; more
would take seconds."""


@dataclass(frozen=True)
class IndexedSample:
    """A sample of an index.

    Attributes:
        row: its number in the index.
        key: name of its members in the shard.
        shard: name of the shard.
        label: class number; None if it has none.
        format: of the image file, such as JPEG; "" for a sample without an image.
        num_captions: how many captions it has.
    """

    row: int
    key: str
    shard: str
    label: int | None
    format: str
    num_captions: int
    _columns: dict[str, int] = field(compare=False)
    _shard: int = field(compare=False)
    _store: ShardStore = field(compare=False)

    @classmethod
    def at(cls, index: Index, store: ShardStore, row: int) -> IndexedSample:
        """The sample in row 0 … len(index)-1."""
        rows = np.array([row])
        columns = {name: int(values[0]) for name, values in index.take(rows, COLUMNS).items()}
        shard = int(index.locate(rows)[0][0])
        return cls(
            row=row,
            key=index.keys(rows)[0],
            shard=index.shard_name(shard),
            label=columns["label"] if columns["label"] >= 0 else None,
            format="" if columns["image_format"] == NO_IMAGE else FORMATS[columns["image_format"]],
            num_captions=len(index.take_lists(rows, "caption_hash")[1]),
            _columns=columns,
            _shard=shard,
            _store=store,
        )

    def __repr__(self) -> str:
        label = "" if self.label is None else f", label {self.label}"
        image = f"{self.format} {self._columns['height']} × {self._columns['width']}" if self.format else "no image"
        captions = {0: "", 1: ", 1 caption"}.get(self.num_captions, f", {self.num_captions} captions")
        return f"Sample(row {self.row}, key '{self.key}', {image}{captions}{label}, in '{self.shard}')"

    @cached_property
    def captions(self) -> list[str]:
        """The captions, cleaned as the loader cleans them; empty if the sample has a label only.

        Raises:
            DataError: the shard is not the one that was indexed.
        """
        return self._store.captions(np.array([self.row]))[0] if self.num_captions else []

    @cached_property
    def image_bytes(self) -> bytes:
        """The image file as it is in the shard.

        Raises:
            DataError: it is not the one that was indexed, or the sample has none.
        """
        if not self.format:
            why = "no image: its members come to the rows of others (data.join)"
            raise DataError(f"shard '{self.shard}', sample '{self.key}': {why}")
        data = self._store.read(self._shard, self._columns["image_offset"], self._columns["image_bytes"])
        if fast_hash(data) != self._columns["image_xxh3"]:
            raise DataError(
                f"shard '{self.shard}', sample '{self.key}': the image is not the one that was indexed; `mmdata "
                "verify` says what has changed"
            )
        return data

    @cached_property
    def image(self) -> Image:
        """The image, decoded by Pillow and turned as its orientation says, as `datasets` decodes images.

        Its mode is that of the file: `sample.image.convert("RGB")`. The loader decodes with other, faster decoders.
        """
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(self.image_bytes)) as opened:
            opened.load()
            return ImageOps.exif_transpose(opened)


def row_of_key(index: Index, key: str) -> int:
    """The row with a key. Reads the keys of all shards.

    Raises:
        KeyError: no row has the key, or several have.
    """
    from pyarrow import compute  # imports pandas, which an index does without

    arrow: Any = compute  # pyarrow has no types
    rows: list[int] = []
    candidates: list[str] = []
    for shard in range(index.num_shards):
        keys: Any = index.shard(shard).keys
        first = int(index.starts[shard])
        rows += [first + int(i) for i in arrow.indices_nonzero(arrow.equal(keys, key)).to_numpy()]
        candidates += keys.slice(0, MAX_CANDIDATES - len(candidates)).to_pylist()
    if len(rows) > 1:
        raise KeyError(f"key {excerpt(key)}: rows {', '.join(map(str, rows[:8]))} have it; give the number of the row")
    if not rows:
        number = key.lstrip("0")  # the same number with other zeros before it is nearest
        same = (other for other in candidates if number and other.lstrip("0") == number)
        near = next(same, None) or nearest(key, candidates)
        meant = f"; did you mean '{near}'?" if near else f"; the first key is '{candidates[0]}'" if candidates else ""
        raise KeyError(f"key {excerpt(key)}: none of {len(index):,} rows has it{meant}")
    return rows[0]
