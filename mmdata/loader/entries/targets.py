"""Entries of batches that follow the crop of their image: what `data.targets` names.

They are read before an image is decoded, since a crop may have to hold its boxes, and written when its crop is known. A
row whose boxes are damaged, or are those of another image, is masked: a batch never has boxes that are not its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from threading import Event
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.config import DataConfig
from mmdata.config.targets import TargetsConfig
from mmdata.errors import BadSample, ConfigError
from mmdata.hashing import hash64
from mmdata.images.decode import oriented_size
from mmdata.images.outlines import Frame, outline_of
from mmdata.images.regions import Followed, Regions
from mmdata.index import Index, ShardStore
from mmdata.loader.entries.annotations import (
    as_list,
    boxes_of,
    flattened,
    frame_of,
    keypoints_of,
    label_of,
    of_each,
    phrase_of,
    upright_mask,
)
from mmdata.loader.entries.fields import PROBED_ROWS, PROBED_VALUES, MemberField, Samples, member_field
from mmdata.plan import Plan, Step
from mmdata.tables.joined import Joined
from mmdata.text.tokenizer import Tokenizer

SOURCES = ("boxes", "box_labels", "box_texts", "keypoints", "masks")
"""Settings that name members; in this order a row's values are checked."""
KINDS = {"box_texts": ("json",), "masks": ("json", "png")}
"""Kinds of members that a setting may name; those of the others may also hold arrays."""
NOTICEABLE = 1e-3
"""Pixels from which a box that reaches beyond its image counts as clipped."""
NO_CLASS = 255
"""Of pixels of masks in rows that are not valid."""


@dataclass(frozen=True)
class Objects:
    """What is known of an image's objects.

    Attributes:
        regions: their boxes, key points and outlines, and the mask of all.
        labels: the class of each box, -1 where it has none.
        texts: the phrase of each box, "" where it has none.
    """

    regions: Regions
    labels: list[int]
    texts: list[str]


class Targets:
    """What `data.targets` adds to each batch.

    Args:
        config: settings.
        joined: tars of other members.
        tokenizer: for phrases.

    Attributes:
        config, tokenizer: as given.
        sources: by setting, one of `SOURCES`.
        num_keypoints: of each box; 0: there are none.
        classes: numbers of those that have names.

    Raises:
        ConfigError: no such source, or it has no such values.
    """

    def __init__(self, config: TargetsConfig, joined: Joined, tokenizer: Tokenizer | None) -> None:
        self.config, self.tokenizer, self.num_keypoints = config, tokenizer, 0
        self._joined = joined
        self.sources: dict[str, MemberField] = {}
        for name in SOURCES:
            if (source := getattr(config, name)) is None:
                continue
            field = self.sources[name] = member_field(name, source, joined, section="data.targets")
            if field.kind not in (kinds := KINDS.get(name, ("json", "npy", "npz"))):
                raise ConfigError(f"{field.setting}: member '{source}' is none of {', '.join(kinds)}")
        if self.outlines and config.boxes is None:
            raise ConfigError(f"data.targets.masks: '{config.masks}' are outlines of boxes: set data.targets.boxes")
        self.classes = {name: number for number, name in enumerate(config.box_classes or [])}

    @classmethod
    def from_config(
        cls, data: DataConfig, index: Index, joined: Joined, tokenizer: Tokenizer | None, plan: Plan
    ) -> Targets | None:
        """Those of a section `data`, whose plan says which rows come first; None if it has no `targets`.

        Raises:
            ConfigError: see `Targets`; also if the first rows have no such values.
            DataError: a shard is not the one that was indexed.
        """
        if data.targets is None:
            return None
        targets = cls(data.targets, joined, tokenizer)
        samples, rows = targets.samples(ShardStore(index)), plan.rows.first(PROBED_ROWS).tolist()
        for name, field in targets.sources.items():
            enough = PROBED_ROWS if name == "keypoints" else PROBED_VALUES  # few objects may have key points
            found = field.first_values(samples[field.join], rows, enough=enough)
            if name in ("box_labels", "keypoints"):
                lists = [as_list(value) for value in found if isinstance(value, (list, np.ndarray))]
                targets._probe(field, list(chain.from_iterable(lists)))
        return targets

    def _probe(self, field: MemberField, firsts: list[Any]) -> None:
        """See from the values of the first objects how many key points they have; refuse names without a list."""
        if field.name == "keypoints":
            if not (given := [one for one in firsts if isinstance(one, list) and one]):
                raise ConfigError(f"{field.setting}: none of the first rows has x, y and visibility in a list")
            self.num_keypoints = len(flattened(given[0])) // 3
        elif not self.classes and firsts and isinstance(firsts[0], str):
            names = sorted({one for one in firsts if isinstance(one, str)})[:3]
            raise ConfigError(f"{field.setting}: names, such as {names}: list them in data.targets.box_classes")

    @property
    def outlines(self) -> bool:
        """Whether masks are those of boxes, and not of the whole image."""
        return "masks" in self.sources and self.sources["masks"].kind == "json"

    @property
    def identity(self) -> dict[str, Any]:
        """What the entries depend on besides the pixels' transform and the plan, as JSON."""
        elsewhere = {"min_visible", "keep_boxes", "keypoint_swaps", "box_buckets", "max_boxes"}
        joined = {field.join for field in self.sources.values() if field.join}
        tars = {name: self._joined.shards[name].fingerprint for name in sorted(joined)}
        settings = self.config.model_dump(exclude_none=True, exclude=elsewhere)
        return {**settings, "joined": tars, "num_keypoints": self.num_keypoints}

    def samples(self, store: ShardStore) -> dict[str, Samples]:
        """What finds the members, by the name of the tars."""
        return {"": store, **self._joined.shards}


class TargetEntries:
    """The targets of one batch while it is made; rows are written in place, by any thread.

    Args:
        targets: what they are.
        index: of the rows.
        store: reads the shards.
        rows: int64 (n,), those of the step that are not padding.
        step: the batch.
        stop: once it is set, reads raise Interrupted.
    """

    def __init__(
        self,
        targets: Targets,
        index: Index,
        store: ShardStore,
        rows: NDArray[np.int64],
        *,
        step: Step,
        stop: Event | None,
    ) -> None:
        self._targets, self._samples, self._stop = targets, targets.samples(store), stop or Event()
        columns = index.take(rows, ["height", "width", "orientation"])
        self._sizes = np.stack([columns["height"], columns["width"], columns["orientation"]], axis=1).tolist()
        self._rows, self._most = rows.tolist(), step.bucket.boxes
        self._entries: dict[str, tuple[NDArray[Any], int]] = {}  # and what stands where there is nothing
        shape, config, sources = (len(step.rows), self._most), targets.config, targets.sources
        if "boxes" in sources:
            self._add("boxes", (*shape, 4), np.float32)
            self._add("boxes_valid", shape, np.bool_)
        if "box_labels" in sources:
            self._add("box_labels", shape, np.int64, -1)
        if "box_texts" in sources:
            assert targets.tokenizer is not None, "the settings say so"
            self._add("box_input_ids", (*shape, config.box_text_length), np.int64, targets.tokenizer.pad_id)
            self._add("box_attention_mask", (*shape, config.box_text_length), np.int64)
            self._add("box_text_hash", shape, np.int64)
        if "keypoints" in sources:
            self._add("keypoints", (*shape, targets.num_keypoints, 3), np.float32)
        if "masks" in sources:
            size = (step.bucket.height, step.bucket.width)
            if targets.outlines:
                self._add("masks", (*shape, *size), np.uint8)
            else:
                self._add("masks", (len(step.rows), *size), np.uint8, NO_CLASS)

    def _add(self, name: str, shape: tuple[int, ...], dtype: Any, fill: int = 0) -> None:
        self._entries[name] = np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype), fill

    def read(self, i: int, counts: Counter[str]) -> Objects:
        """Read the objects of the i-th of the rows; `counts` gets numbers of boxes, see `Stats.boxes`.

        Raises:
            BadSample: a member is missing or damaged, or is of another image; the row is masked for it.
            DataError: the same, where that is an error.
        """
        row, (height, width, orientation) = self._rows[i], self._sizes[i]
        image = oriented_size(height, width, orientation)
        opened: dict[tuple[str, str], Any] = {}
        found: dict[str, Any] = {}
        for name, field in self._targets.sources.items():
            found[name] = field.read_if_there(self._samples[field.join], row, opened, self._stop)

        frame = Frame((height, width), orientation, image)
        boxes = self._targets.sources.get("boxes")
        needs_size = self._targets.config.box_format != "relative" or len(self._targets.sources) > 1
        if boxes is not None and needs_size:
            with self._named("boxes", row):
                frame = frame_of(opened.get((boxes.join, boxes.selector.extension)), image, orientation)
        objects = self._objects(row, found, frame, counts)
        if self._targets.outlines or (mask := found.get("masks")) is None:
            return objects
        with self._named("masks", row):
            return replace(objects, regions=replace(objects.regions, mask=upright_mask(mask, image, orientation)))

    def _objects(self, row: int, found: dict[str, Any], frame: Frame, counts: Counter[str]) -> Objects:
        """The objects of an image, inside it; `frame` is the image that they were annotated in."""
        targets, values = self._targets, {name: found.get(name) for name in SOURCES}
        with self._named("boxes", row):
            given = boxes_of(values["boxes"], targets.config.box_format, frame)
        number = len(given)
        with self._named("box_labels", row):
            labels = [label_of(one, targets.classes) for one in of_each(values["box_labels"], number)]
        with self._named("box_texts", row):
            texts = [phrase_of(one) for one in of_each(values["box_texts"], number)]
        with self._named("keypoints", row):
            points = [keypoints_of(one, targets.num_keypoints) for one in of_each(values["keypoints"], number)]
        outlines: list[Any] | None = None
        if targets.outlines:
            with self._named("masks", row):
                outlines = [outline_of(one, frame) for one in of_each(values["masks"], number)]
        keypoints = np.array(points, np.float64).reshape(number, targets.num_keypoints, 3)
        regions = frame.upright(Regions(given, keypoints if targets.num_keypoints else None, None, outlines))
        height, width = frame.image
        inside = regions.boxes.clip(0, [width, height, width, height])
        has_area = (inside[:, 2:] > inside[:, :2]).all(axis=1)
        kept = np.flatnonzero(has_area & np.array([label is not None for label in labels], bool))
        clipped = (abs(regions.boxes - inside)[kept] > NOTICEABLE).any(axis=1)
        _count(counts, clipped=int(clipped.sum()), left_out=number - len(kept))
        listed = kept.tolist()
        regions = Regions(
            inside[kept],
            None if regions.keypoints is None else regions.keypoints[kept],
            None,
            None if outlines is None else [outlines[k] for k in listed],
        )
        return Objects(regions, [cast(int, labels[k]) for k in listed], [texts[k] for k in listed])

    @contextmanager
    def _named(self, name: str, row: int) -> Generator[None]:
        """A fault in here is one of the setting `name`, in the members of a row."""
        try:
            yield
        except BadSample as bad:
            field = self._targets.sources[name]
            raise field.blamed(bad, self._samples[field.join], row) from bad

    def write(self, place: int, objects: Objects, followed: Followed, counts: Counter[str]) -> int:
        """Write what a crop has kept of the objects of an image into row `place` of the batch.

        Returns:
            How many phrases of them were cut.
        """
        if followed.masks is not None and not self._targets.outlines:
            self._entries["masks"][0][place] = followed.masks
        if "boxes" not in self._entries:
            return 0
        shown = np.arange(len(followed.kept))
        if len(shown) > self._most:
            sides = followed.boxes[:, 2:] - followed.boxes[:, :2]
            shown = np.sort(np.argsort(-sides.prod(axis=1), kind="stable")[: self._most])
        cropped, over = len(objects.labels) - len(followed.kept), len(followed.kept) - len(shown)
        _count(counts, shown=len(shown), cropped=cropped, over=over)
        of_objects, into = followed.kept[shown].tolist(), slice(0, len(shown))
        values: dict[str, Any] = {"boxes": followed.boxes[shown], "boxes_valid": True}
        values["box_labels"] = [objects.labels[k] for k in of_objects]
        if followed.keypoints is not None:
            values["keypoints"] = followed.keypoints[shown]
        if followed.masks is not None and self._targets.outlines:
            values["masks"] = followed.masks[shown]
        for name, value in values.items():
            if name in self._entries:
                self._entries[name][0][place, into] = value
        if self._targets.tokenizer is not None and "box_input_ids" in self._entries:
            return self._write_texts(place, [objects.texts[k] for k in of_objects], self._targets.tokenizer)
        return 0

    def _write_texts(self, place: int, texts: list[str], tokenizer: Tokenizer) -> int:
        given = [k for k, text in enumerate(texts) if text]
        if not given:
            return 0
        phrases = [texts[k] for k in given]
        ids, mask, num_cut = tokenizer.encode_cut(phrases, self._targets.config.box_text_length)
        self._entries["box_input_ids"][0][place, given] = ids
        self._entries["box_attention_mask"][0][place, given] = mask
        self._entries["box_text_hash"][0][place, given] = [hash64(phrase.encode()) for phrase in phrases]
        return num_cut

    def entries(self, valid: Tensor) -> dict[str, Tensor]:
        """The entries of the batch, without values where not `valid` (B,)."""
        for values, fill in self._entries.values():
            values[~valid.numpy()] = fill
        if "box_attention_mask" in self._entries:
            # Attention over no token is NaN, and NaN reaches the gradient though the loss leaves the box out.
            self._entries["box_attention_mask"][0][..., 0] = 1
        return {name: torch.from_numpy(values) for name, (values, _) in self._entries.items()}


def _count(counts: Counter[str], **numbers: int) -> None:
    counts.update({name: number for name, number in numbers.items() if number})
