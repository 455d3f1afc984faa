"""The samples of the report: thumbnails of images, with their captions, labels and boxes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from contextlib import suppress
from threading import Event
from typing import Any, cast

import numpy as np
from PIL import Image

from mmdata.config import DataConfig
from mmdata.config.targets import TargetsConfig
from mmdata.errors import BadSample
from mmdata.images import FORMATS
from mmdata.images.decode import oriented_size
from mmdata.images.pixels import PixelTransform
from mmdata.index import Index, Manifest, ShardStore
from mmdata.inspect.page import Card, ReportSection
from mmdata.inspect.replay import replay, steps_of, upright_image
from mmdata.loader.builder import BatchBuilder, BatchSpec
from mmdata.loader.entries.targets import Targets
from mmdata.loader.reader import RowReader
from mmdata.plan import Bucket, Plan, Step
from mmdata.tables.joined import Joined
from mmdata.tars import captions_of
from mmdata.tars.members import Selector, open_member, pick
from mmdata.text.tokenizer import load_tokenizer

GALLERY = 24
THUMBNAIL = (200, 150)
"""Largest width and height of a thumbnail, in pixels."""


def samples(index: Index, data: DataConfig | None = None, plan: Plan | None = None) -> ReportSection:
    """Samples at even distances in the index, as a model sees them, with their boxes.

    Args:
        index: of the shards.
        data: says what the boxes are, and what crops leave out, which is grey. None, or with a user's transform, whose
            crops nobody knows: boxes are those that `mmdata convert` writes, and nothing is cropped.
        plan: of `data`; the crops are those of epoch 0.
    """
    rows = np.unique(np.linspace(0, len(index) - 1, GALLERY).round().astype(np.int64)) if len(index) else []
    store, made = ShardStore(index), dict[int, tuple[BatchBuilder, Step]]()
    note = f"{len(rows)} of {len(index):,}, evenly over the index."
    if data is not None and plan is not None and data.transform in ("train", "eval"):
        tokenizer = load_tokenizer(data) if data.targets else None
        targets = Targets.from_config(data, index, Joined.from_config(data, index), tokenizer, plan)
        builder = BatchBuilder(index, BatchSpec(PixelTransform.from_config(data), targets=targets))
        made = {int(step.rows[0]): (builder, step) for step in steps_of(plan, rows, 0)}
        note += " Grey is what the crop of epoch 0 leaves out."
    cards = [_card(index, store, *(made.get(int(row)) or _uncropped(index, store, int(row)))) for row in rows]
    return ReportSection("Samples", note, cards=cards)


def _uncropped(index: Index, store: ShardStore, row: int) -> tuple[BatchBuilder, Step]:
    """What makes the whole image of a row, with the boxes that `mmdata convert` has written beside it."""
    content, targets, rows = None, None, np.array([row])
    with suppress(BadSample, KeyError):  # the row has no JSON, or a damaged one
        content = open_member(store.read_member(row, store.members(row)["json"], Event()), "json")
    if pick(content, Selector("json", "boxes")):
        config: dict[str, Any] = {"boxes": "json:boxes"}
        for key in ("phrase", "category"):
            names = pick(content, Selector("json", f"boxes.{key}"))
            if isinstance(names, list) and all(isinstance(name, str) for name in cast("list[Any]", names)):
                config |= {"box_labels": f"json:boxes.{key}", "box_classes": list(dict.fromkeys(names))}
        targets = Targets(TargetsConfig(**config), Joined([], index), None)
    size = index.take(rows, ["height", "width", "orientation"])
    bucket = Bucket(0, *oriented_size(*(int(values[0]) for values in size.values())), boxes=1)
    step = Step(0, 0, bucket, rows, np.zeros(1, np.int64))
    return BatchBuilder(
        index, BatchSpec(PixelTransform("eval", targets=targets and targets.config), targets=targets)
    ), step


def _card(index: Index, store: ShardStore, builder: BatchBuilder, step: Step) -> Card:
    rows = step.rows
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
    found = replay(builder, step)
    faults = [entry.detail for entry in found.made.masked if entry.stage == "field"]
    try:
        return Card(key, captions, " · ".join([note, *faults]), _as_uri(found.original(THUMBNAIL)))
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
