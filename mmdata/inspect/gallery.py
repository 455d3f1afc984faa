"""The samples of the report: thumbnails of images, with their captions and labels."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from mmdata.errors import BadSample
from mmdata.images import FORMATS
from mmdata.images.decode import decode
from mmdata.index import Index, Manifest, ShardStore
from mmdata.inspect.page import Card, ReportSection
from mmdata.loader.reader import RowReader
from mmdata.tars import captions_of

GALLERY = 24
THUMBNAIL = (200, 150)
"""Largest width and height of a thumbnail, in pixels."""


def samples(index: Index) -> ReportSection:
    """Samples at even distances in the index, as a model sees them except for the crop."""
    rows = np.unique(np.linspace(0, len(index) - 1, GALLERY).round().astype(np.int64)) if len(index) else []
    store = ShardStore(index)
    note = f"{len(rows)} of {len(index):,}, evenly over the index."
    return ReportSection("Samples", note, cards=[_card(index, store, int(row)) for row in rows])


def _card(index: Index, store: ShardStore, row: int) -> Card:
    rows = np.array([row])
    shard = int(index.locate(rows)[0][0])
    names = ["image_format", "height", "width", "caption_offset", "caption_bytes", "caption_format", "label"]
    cells = {name: int(values[0]) for name, values in index.take(rows, names).items()}
    tokens = index.take_lists(rows, "caption_tokens")[1]
    notes = [f"{cells['height']} × {cells['width']} {FORMATS[cells['image_format']]}"]
    notes.append(f"{tokens[0]} tokens" if len(tokens) else "")
    notes.append(f"label {class_name(index.part(shard)[0], cells['label'])}" if cells["label"] >= 0 else "")
    key, note = index.keys(rows)[0], " · ".join(filter(None, notes))
    try:
        found = store.read(shard, cells["caption_offset"], cells["caption_bytes"])
        captions = captions_of(found, cells["caption_format"], index.caption_keys(shard))
    except BadSample as error:
        return Card(key, [], note, problem=str(error))
    return Card(key, captions, note, *picture_of(RowReader(index, store, rows, np.zeros(1, np.int64)), 0))


def class_name(manifest: Manifest, label: int) -> str:
    """The name of a label, or its number if the corpus has no names."""
    names: Sequence[str] = (manifest.accounts or {}).get("classes") or []
    return names[label] if label < len(names) else str(label)


def picture_of(samples: RowReader, i: int, *, size: tuple[int, int] = THUMBNAIL) -> tuple[str, str]:
    """A sample's image as a small WebP in a data URI and "", or "" and why it cannot be shown.

    Args:
        samples: reads the image.
        i: place of the sample among them.
        size: largest width and height, in pixels.
    """
    try:
        image = samples.image(i)
        pixels = decode(image.data, format=image.format, orientation=image.orientation)
    except BadSample as error:
        return "", str(error)
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail(size, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=72)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode(), ""
