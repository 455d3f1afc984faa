"""The samples of the report: thumbnails of images, with their captions, labels and boxes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from mmdata.config import DataConfig
from mmdata.errors import BadSample
from mmdata.images import FORMATS
from mmdata.images.pixels import PixelTransform
from mmdata.index import Index, Manifest, ShardStore
from mmdata.inspect.page import Card, ReportSection
from mmdata.inspect.replay import Replay, replay, steps_of, upright_image
from mmdata.loader.builder import BatchBuilder, BatchSpec
from mmdata.loader.entries.targets import Targets
from mmdata.loader.reader import RowReader
from mmdata.plan import Plan, Step
from mmdata.tables.joined import Joined
from mmdata.tars import captions_of
from mmdata.text.tokenizer import load_tokenizer

GALLERY = 24
THUMBNAIL = (200, 150)
"""Largest width and height of a thumbnail, in pixels."""


def samples(index: Index, data: DataConfig | None = None, plan: Plan | None = None) -> ReportSection:
    """Samples at even distances in the index, those of a plan with their boxes and crops.

    Args:
        index: of the shards.
        data: says what the boxes are. None: no box is drawn, since their form is not known.
        plan: of `data`; what the crop of epoch 0 leaves out is grey. Samples that are in none of its batches are drawn
            without boxes. A user's transform, whose crops nobody knows, is not run.
    """
    rows = np.unique(np.linspace(0, len(index) - 1, GALLERY).round().astype(np.int64)) if len(index) else []
    store, note, with_crop = ShardStore(index), f"{len(rows)} of {len(index):,}, evenly over the index.", False
    builder, steps = None, dict[int, Step]()
    if data is not None and plan is not None:
        if with_crop := data.transform in ("train", "eval"):
            note += " Grey is what the crop of epoch 0 leaves out."
        transform = PixelTransform.from_config(data if with_crop else data.model_copy(update={"transform": "eval"}))
        tokenizer = load_tokenizer(data) if data.targets else None
        targets = Targets.from_config(data, index, Joined.from_config(data, index), tokenizer, plan)
        builder = BatchBuilder(index, BatchSpec(transform, targets=targets))
        steps = {int(step.rows[0]): step for step in steps_of(plan, rows, 0)}
    cards: list[Card] = []
    for row in map(int, rows):
        made = replay(builder, steps[row]) if builder and row in steps else None
        cards.append(_card(index, store, row, made, with_crop=with_crop))
    return ReportSection("Samples", note, cards=cards)


def _card(index: Index, store: ShardStore, row: int, made: Replay | None, *, with_crop: bool = False) -> Card:
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
    if made is None:
        picture = picture_of(RowReader(index, store, rows, np.zeros(1, np.int64)), 0, size=THUMBNAIL)
        return Card(key, captions, note, *picture)
    faults = [entry.detail for entry in made.made.masked if entry.stage == "field"]
    try:
        return Card(key, captions, " · ".join([note, *faults]), _as_uri(made.original(THUMBNAIL, with_crop=with_crop)))
    except BadSample as error:
        return Card(key, captions, note, problem=str(error))


def class_name(manifest: Manifest, label: int) -> str:
    """The name of a label, or its number if the corpus has no names."""
    names: Sequence[str] = (manifest.accounts or {}).get("classes") or []
    return names[label] if label < len(names) else str(label)


def picture_of(samples: RowReader, i: int, *, size: tuple[int, int]) -> tuple[str, str]:
    """A sample's image as a small WebP in a data URI and "", or "" and why it cannot be shown.

    Args:
        samples: reads the image.
        i: place of the sample among them.
        size: largest width and height, in pixels.
    """
    try:
        picture = upright_image(samples.image(i))
    except BadSample as error:
        return "", str(error)
    picture.thumbnail(size, Image.Resampling.LANCZOS)
    return _as_uri(picture), ""


def _as_uri(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=72)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
