"""Makes one row again, as in its batch, and keeps what happens at each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import BadSample, ConfigError, DataError, excerpt
from mmdata.images.decode import decode, oriented_size
from mmdata.images.pixels import EncodedImage
from mmdata.images.regions import Regions
from mmdata.index import Index
from mmdata.loader.builder import BatchBuilder
from mmdata.loader.entries.targets import TargetEntries
from mmdata.loader.reader import RowReader
from mmdata.loader.unfinished import LoadedBatch
from mmdata.picture import GAP, PAPER, draw_boxes, greyed, pixels_of, show
from mmdata.plan import Plan, Step
from mmdata.plan.rows import MAX_EPOCH
from mmdata.plan.weights import WeightedPlan

MAX_NUMBERS = 16
"""Numbers of an entry that are listed."""
MAX_SHOWN = 200
"""Characters of an entry that are shown."""
MAX_DRAWN = (640, 640)
"""Largest width and height of an original that is drawn, in pixels."""
LOST_BOXES = {
    "cropped": "left out by the crop",
    "over": "left out, for want of room in the batch",
    "left_out": "left out, without area or of another class",
}
"""Boxes of a row that its batch does not have, by their name in `Stats.boxes`."""


@dataclass(frozen=True)
class Replay:
    """What became of a row.

    Attributes:
        step: its batch's epoch, step and bucket, with this row alone.
        samples: reads this row alone.
        image: as read from the shard.
        size: (height, width) of the image as displayed, in pixels, by the index.
        caption: as a `text_transform` changes it; "" where it cannot be used.
        caption_source: where it lies, where rows draw from several sources; else "".
        fields: what `data.fields` names, by name.
        objects: what `data.targets` says of the image; None: nothing, or the row is masked for it.
        words: the phrase or class of each box of these.
        made: the batch of this one row, with its ledger line where it is masked.
    """

    step: Step
    samples: RowReader
    image: EncodedImage
    size: tuple[int, int]
    caption: str
    caption_source: str
    fields: Mapping[str, Any]
    objects: Regions | None
    words: list[str]
    made: LoadedBatch

    @property
    def is_masked(self) -> bool:
        """Whether the row is not trained on."""
        return not bool(self.made.batch["valid"].all())

    @property
    def crop(self) -> list[float] | None:
        """Top, left, height and width of what the pixels show, in the upright image; None: nothing, or nobody knows."""
        crop = self.made.batch.get("crop")
        return None if crop is None or not crop.any() else crop[0].tolist()

    def stages(self) -> Iterator[tuple[str, str, float | None]]:
        """What happened, in order: (name, words, seconds), seconds only where the stage was timed."""
        step, batch, wall_s = self.step, self.made.batch, self.made.stats.wall_s
        yield "row", f"{step.rows[0]}, key '{self.samples.keys[0]}', shard '{self.samples.shard(0)}'", None
        yield "batch", f"epoch {step.epoch}, step {step.number}: {step.bucket.length} tokens, {step.bucket.image}", None
        image_offset, caption_offset = (self.samples.offset(0, kind) for kind in ("image", "caption"))
        read = f"image {len(self.image.data):,} bytes at {image_offset}; caption at {caption_offset}"
        yield "read", read, wall_s["read"]
        image = f"{self.image.format} {_by(self.size)}, EXIF orientation {self.image.orientation}"
        yield "decode", image, wall_s["decode"]
        if self.crop is not None:
            top, left, height, width = self.crop
            crop, size = f"{height:.1f} × {width:.1f} at ({top:.1f}, {left:.1f})", pixels_of(batch, 0).shape[:2]
            yield "transform", f"crop {crop}, to {_by(size)}", wall_s["transform"]
        if counts := self.made.stats.boxes:
            lost = [f", {counts[name]} {words}" for name, words in LOST_BOXES.items() if counts[name]]
            yield "boxes", str(counts["shown"] + sum(counts[name] for name in LOST_BOXES)) + "".join(lost), None
        if self.caption:
            yield "caption", repr(self.caption) + (f", {self.caption_source}" if self.caption_source else ""), None
        if "input_ids" in batch and "attention_mask" in batch:
            ids = batch["input_ids"][0][batch["attention_mask"][0] == 1].tolist()
            yield "tokenize", f"{len(ids)} tokens: {' '.join(map(str, ids))}", wall_s["tokenize"]
        pixels = batch["pixel_values"][0]
        yield "pixels", f"uint8 {_by(pixels.shape)}, mean {float(pixels.float().mean()):.1f}", None
        for name, value in self.fields.items():
            yield "field", f"{name}: {_value(value)}", None
        for entry in self.made.masked:
            yield "masked", f"at {entry.stage}: {entry.reason}: {entry.detail}", None

    def save(self, path: Path) -> Path:
        """Write the row's pixels as an image; patches are put together.

        Returns:
            Path of a second image beside it: what `original` draws, and the row as it is in its batch.
        """
        Image.fromarray(pixels_of(self.made.batch, 0).numpy()).save(path)
        left, right = self.original(MAX_DRAWN), show(self.made.batch)
        both = Image.new("RGB", (left.width + GAP + right.width, max(left.height, right.height)), PAPER)
        both.paste(left)
        both.paste(right, (left.width + GAP, 0))
        both.save(drawn := path.with_stem(f"{path.stem}-crop"))
        return drawn

    def original(self, size: tuple[int, int], *, with_crop: bool = True) -> Image.Image:
        """The upright image with its boxes, at most of this width and height.

        Args:
            size: largest width and height, in pixels.
            with_crop: what the crop leaves out is grey, where the crop is known.

        Raises:
            BadSample: it does not decode, or is not the one indexed.
        """
        image = upright_image(self.samples.image(0))
        height, width = image.height, image.width
        image.thumbnail(size, Image.Resampling.LANCZOS)
        y, x = image.height / height, image.width / width
        if self.objects is not None:
            draw_boxes(image, (self.objects.boxes * (x, y, x, y)).tolist(), self.words)
        if self.crop is None or not with_crop:
            return image
        top, left, height, width = self.crop
        return greyed(image, (top * y, left * x, height * y, width * x))


def upright_image(encoded: EncodedImage) -> Image.Image:
    """An image as it is displayed, at full size; raises BadSample."""
    pixels = decode(encoded.data, format=encoded.format, orientation=encoded.orientation)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def _value(value: Any) -> str:
    """The value of a row's entry, or, of many numbers, their type and shape."""
    if not isinstance(value, Tensor):
        return excerpt(value, MAX_SHOWN)
    if value.numel() <= MAX_NUMBERS:
        return str(value.tolist())
    return f"{str(value.dtype).removeprefix('torch.')} {_by(value.shape)}, mean {float(value.double().mean()):.4g}"


def _by(size: Sequence[int]) -> str:
    return " × ".join(map(str, size))


def find_step(plan: Plan, row: int, epoch: int) -> Step:
    """The row's place in an epoch, as a step of one row.

    Args:
        plan: of the epoch; as much of it is made as lies before the row.
        row: in the index.
        epoch: from 0.

    Raises:
        ConfigError: there is no such row or epoch; says which there are.
        DataError: no batch has it.
    """
    rows = int(plan.rows.starts[-1])
    if not 0 <= row < rows:
        raise ConfigError(f"row {row}: there is no such row; the rows of these shards are 0 to {rows - 1:,}")
    if not 0 <= epoch <= MAX_EPOCH:
        raise ConfigError(f"epoch {epoch}: there is no such epoch; they are 0 to {MAX_EPOCH:,}")
    if (selection := plan.rows.selection) is not None and not selection.has(row):
        what = f"row {row} is not loaded: {selection.name}"
        raise ConfigError(f"{what}; `mmdata replay SHARDS` makes any row of a folder of shards")
    weights = plan.weights if isinstance(plan, WeightedPlan) else None
    if weights is not None and (first := weights.next_epoch(row, epoch)) != epoch:
        if first is None:
            of_epochs = "any epoch" if not weights.values[row] > 0 else f"any epoch from {epoch} on"
            raise ConfigError(
                f"row {row} is in no batch of {of_epochs}: its weight is {weights.values[row]:g} ({weights.name})"
            )
        raise ConfigError(
            f"row {row} is in no batch of epoch {epoch}: its weight is {weights.values[row]:g} ({weights.name}), and "
            f"it comes next in epoch {first}: try --epoch {first}"
        )
    for found in steps_of(plan, [row], epoch):
        return found
    raise DataError(
        f"row {row} is in no batch of epoch {epoch}; a mixture leaves some rows for later epochs: "
        f"try --epoch {epoch + 1}"
    )


def steps_of(plan: Plan, rows: Sequence[int] | NDArray[np.int64], epoch: int) -> Iterator[Step]:
    """The places of some rows in an epoch, in its order, each as a step of one row."""
    for step in plan.steps(epoch):
        for i in np.flatnonzero(np.isin(step.rows, rows)).tolist():
            yield step._replace(rows=step.rows[i : i + 1], passes=step.passes[i : i + 1])


def replay(builder: BatchBuilder, step: Step) -> Replay:
    """Make the row of a step of one row.

    Args:
        builder: of batches.
        step: of the row.

    Raises:
        DataError: its shard is not the one that was indexed.
    """
    samples = builder.read(step.rows, step.passes)
    image, epoch = samples.stored_image(0), int(step.passes[0])
    size = builder.index.take(step.rows, ["height", "width"])
    caption, objects = "", None
    if targets := builder.spec.targets:
        found = TargetEntries(targets, builder.index, builder.store, step.rows, step=step, stop=None)
        with suppress(BadSample):
            objects = found.read(0, Counter())
    with suppress(BadSample):  # the batch's ledger line says it
        caption = builder.spec.text_transform(samples.caption(0), number=int(step.rows[0]), epoch=epoch)
    made = builder.make(step)
    entries: dict[str, Any] = dict(builder.added(made.batch))
    fields = {name: values[0] for name, values in entries.items() if name not in Batch.__annotations__}
    source = ""
    if builder.spec.captions is not None and caption:
        source = f"of {samples.caption_sources()[0]}, number {int(samples.chosen.position[0])}"
    height, width = (int(size[name][0]) for name in ("height", "width"))
    displayed = oriented_size(height, width, image.orientation)
    words = list[str]()
    if targets and objects:
        names = list(targets.classes)
        classes = ["" if label < 0 else names[label] if names else str(label) for label in objects.labels]
        words = [text or class_ for text, class_ in zip(objects.texts, classes, strict=True)]
    return Replay(step, samples, image, displayed, caption, source, fields, objects, words, made)


def row_of_key(index: Index, key: str) -> int:
    """The row with a key; all keys are read.

    Raises:
        DataError: no row has it, or several have.
    """
    try:
        return index.sample(key).row
    except KeyError as error:
        raise DataError(error.args[0]) from None
