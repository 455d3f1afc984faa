"""Entries of batches that follow the crop of their image: what `data.targets` names.

They are read before an image is decoded, since a crop may have to hold its boxes, and written when its crop is known. A
row whose boxes are damaged, or are those of another image, is masked: a batch never has boxes that are not its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from threading import Event
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.config import DataConfig
from mmdata.config.targets import OF_CROPS, SOURCES, TargetsConfig
from mmdata.errors import BadSample, ConfigError, DataError, excerpt, meant
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
from mmdata.loader.entries.fields import PROBED_ROWS, PROBED_VALUES, Column, MemberField, Samples, member_field
from mmdata.plan import Bucket, Plan, Step
from mmdata.tables.joined import Joined
from mmdata.text.tokenizer import Tokenizer

logger = logging.getLogger("mmdata")

KINDS = {"box_texts": ("json",), "masks": ("json", "png")}
"""Kinds of members that a setting may name; those of the others may also hold arrays."""
NOTICEABLE = 1e-3
"""Pixels from which a box that reaches beyond its image counts as clipped."""
MANY_CLIPPED = 0.25
"""Share of boxes that reach beyond their image from which on a message doubts their format."""
NO_CLASS = 255
"""Of pixels of masks in rows that are not valid."""


class Targets:
    """What `data.targets` adds to each batch.

    Args:
        config: settings.
        joined: tars of other members.
        tokenizer: for phrases.

    Attributes:
        config, tokenizer: as given.
        sources: by setting, one of `config.targets.SOURCES`.
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

        None, too, in an evaluation on shards of their own whose samples have no such values, with a warning.

        Raises:
            ConfigError: see `Targets`; also if the first rows have no such values.
            DataError: a shard is not the one that was indexed.
        """
        if data.targets is None:
            return None
        targets = cls(data.targets, joined, tokenizer)
        store, rows = ShardStore(index), plan.rows.first(PROBED_ROWS)
        try:
            targets._probe(targets.samples(store), rows.tolist())
        except ConfigError as error:
            if data.shuffle or data.shards != data.val.shards:  # not those that only an evaluation has
                raise
            logger.warning("shards '%s' are evaluated without data.targets: %s", data.shards, error)
            return None
        if "boxes" in targets.sources:
            targets._tell_clipped(index, store, rows[:PROBED_VALUES])
        return targets

    def _probe(self, samples: dict[str, Samples], rows: list[int]) -> None:
        """See from the first rows how many key points objects have; refuse sources without values."""
        keys: set[str] = set()
        for name, field in self.sources.items():
            firsts: list[Any] = []
            for enough in (PROBED_VALUES, PROBED_ROWS):  # few objects may have key points
                found = field.first_values(samples[field.join], rows, enough=enough)
                firsts = [one for value in found if isinstance(value, (list, np.ndarray)) for one in as_list(value)]
                if any(one is not None for one in firsts):
                    break
            if firsts and all(one is None for one in firsts):
                key = field.selector.key.rpartition(".")[2]
                raise ConfigError(f'{field.setting}: no object of the first rows has "{key}"{meant(key, keys)}')
            if name == "boxes":
                keys = {key for one in firsts if isinstance(one, dict) for key in cast("dict[str, Any]", one)}
            elif name == "keypoints":
                self._probe_keypoints(field, firsts)
            elif name == "box_labels":
                self._probe_names(field, firsts)

    def _probe_keypoints(self, field: MemberField, firsts: list[Any]) -> None:
        if not (given := [one for one in firsts if isinstance(one, list) and len(flattened(one)) > 2]):
            raise ConfigError(f"{field.setting}: none of the first rows has x, y and visibility in a list")
        self.num_keypoints = len(flattened(given[0])) // 3
        if (last := max(chain.from_iterable(self.config.keypoint_swaps or [(0, 0)]))) >= self.num_keypoints:
            raise ConfigError(
                f"data.targets.keypoint_swaps: there is no key point {last}; they are 0 to {self.num_keypoints - 1}"
            )

    def _probe_names(self, field: MemberField, firsts: list[Any]) -> None:
        names = [one for one in firsts if isinstance(one, str)]
        if not self.classes:
            if not firsts or not isinstance(firsts[0], str):
                return
            listed = sorted(set(names))[:3]
            raise ConfigError(f"{field.setting}: names, such as {listed}: list them in data.targets.box_classes")
        if unknown := Counter(name for name in names if name not in self.classes):
            logger.warning(
                "%s: %d of the first %d boxes are of classes that are not in data.targets.box_classes, and are left "
                "out: %s",
                *(field.setting, unknown.total(), len(names)),
                ", ".join(f"{excerpt(name)} ({count})" for name, count in unknown.most_common(5)),
            )

    def _tell_clipped(self, index: Index, store: ShardStore, rows: NDArray[np.int64]) -> None:
        """Warn if many boxes of some rows reach beyond their image: they may have another format."""
        step = Step(0, 0, Bucket(0, 1, 1, boxes=1), rows, np.zeros_like(rows))
        entries, counts, number = TargetEntries(self, index, store, rows, step=step, stop=None), Counter[str](), 0
        for i in range(len(rows)):
            with suppress(BadSample, DataError):
                number += len(entries.read(i, counts).boxes)
        if counts["clipped"] > MANY_CLIPPED * number:
            logger.warning(
                "data.targets.boxes: %d of the first %d boxes reach beyond their image: is data.targets.box_format "
                "right, which is %s?",
                *(counts["clipped"], number, self.config.box_format),
            )

    def columns(self, bucket: Bucket) -> dict[str, Column]:
        """The entries of a batch, of as many rows as it has."""
        boxes, length, size = (bucket.boxes,), self.config.box_text_length, (bucket.height, bucket.width)
        integer, real, byte = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.uint8)
        classes = Column(byte, (*boxes, *size), 0) if self.outlines else Column(byte, size, NO_CLASS)
        columns = {
            "boxes": {"boxes": Column(real, (*boxes, 4), 0), "boxes_valid": Column(np.dtype(np.bool_), boxes, False)},
            "box_labels": {"box_labels": Column(integer, boxes, -1)},
            "box_texts": {
                "box_input_ids": Column(integer, (*boxes, length), self.tokenizer.pad_id if self.tokenizer else 0),
                "box_attention_mask": Column(integer, (*boxes, length), 0),
                "box_text_hash": Column(integer, boxes, 0),
            },
            "keypoints": {"keypoints": Column(real, (*boxes, self.num_keypoints, 3), 0)},
            "masks": {"masks": classes},
        }
        return {name: column for source in self.sources for name, column in columns[source].items()}

    @property
    def outlines(self) -> bool:
        """Whether masks are those of boxes, and not of the whole image."""
        return "masks" in self.sources and self.sources["masks"].kind == "json"

    @property
    def identity(self) -> dict[str, Any]:
        """What the entries depend on besides the pixels' transform and the plan, as JSON."""
        joined = {field.join for field in self.sources.values() if field.join}
        tars = {name: self._joined.shards[name].fingerprint for name in sorted(joined)}
        settings = self.config.model_dump(exclude_none=True, exclude={*OF_CROPS, "box_buckets"})
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
        self._columns = targets.columns(step.bucket)
        self._entries = {name: column.empty(len(step.rows)) for name, column in self._columns.items()}
        self._of_each: dict[str, Callable[[Any, Frame], Any]] = {
            "box_labels": lambda label, _: label_of(label, targets.classes),
            "box_texts": lambda text, _: phrase_of(text),
            "keypoints": lambda points, _: keypoints_of(points, targets.num_keypoints),
            "masks": outline_of,
        }

    def read(self, i: int, counts: Counter[str]) -> Regions:
        """Read the objects of the i-th of the rows; `counts` gets numbers of boxes, see `Stats.boxes`.

        Raises:
            BadSample: a member is missing or damaged, or is of another image; the row is masked for it.
            DataError: the same, where that is an error.
        """
        row, (height, width, orientation) = self._rows[i], self._sizes[i]
        config, sources, image = self._targets.config, self._targets.sources, oriented_size(height, width, orientation)
        frame = Frame((height, width), orientation, image)  # the image in whose pixels the objects are
        opened: dict[tuple[str, str], Any] = {}
        found: dict[str, Any] = {"boxes": np.empty((0, 4))}
        for name, field in sources.items():
            value = field.read_if_there(self._samples[field.join], row, opened, self._stop)
            try:
                if name == "boxes":
                    beside = opened.get((field.join, field.selector.extension))
                    frame = frame_of(beside, image, orientation, config.box_pixels)
                    found[name] = boxes_of(value, config.box_format, frame)
                elif name == "masks" and not self._targets.outlines:
                    found[name] = None if value is None else upright_mask(value, image, orientation, config.box_pixels)
                else:
                    each = of_each(value, len(found["boxes"]))
                    found[name] = [self._of_each[name](one, frame) for one in each]
            except BadSample as bad:
                raise field.blamed(bad, self._samples[field.join], row) from bad
        return self._inside(found, frame, counts)

    def _inside(self, found: dict[str, Any], frame: Frame, counts: Counter[str]) -> Regions:
        """The objects of a frame, those inside its image that have an area and a class."""
        number, keypoints, masks = len(found["boxes"]), None, found.get("masks")
        if "keypoints" in found:
            keypoints = np.array(found["keypoints"], np.float64).reshape(number, self._targets.num_keypoints, 3)
        regions = frame.upright(Regions(found["boxes"], keypoints))
        height, width = frame.image
        inside = regions.boxes.clip(0, [width, height, width, height])
        has_area = (inside[:, 2:] > inside[:, :2]).all(axis=1)
        labels, texts = found.get("box_labels", [-1] * number), found.get("box_texts", [""] * number)
        kept = [k for k in np.flatnonzero(has_area).tolist() if labels[k] is not None]
        clipped = (abs(regions.boxes - inside)[kept] > NOTICEABLE).any(axis=1)
        counts += Counter(clipped=int(clipped.sum()), left_out=number - len(kept))  # without zeros
        return Regions(
            inside[kept],
            None if regions.keypoints is None else regions.keypoints[kept],
            None if self._targets.outlines else masks,
            [masks[k] for k in kept] if self._targets.outlines and masks else None,
            [labels[k] for k in kept],
            [texts[k] for k in kept],
        )

    def write(self, place: int, objects: Regions, followed: Followed, counts: Counter[str]) -> int:
        """Write what a crop has kept of the objects of an image into row `place` of the batch.

        Returns:
            How many phrases of them were cut.
        """
        masks, outlines = followed.masks, self._targets.outlines
        if masks is not None and not outlines:
            self._entries["masks"][place] = masks
        if "boxes" not in self._entries:
            return 0
        areas = (followed.boxes[:, 2:] - followed.boxes[:, :2]).prod(axis=1)
        shown = np.sort(np.argsort(-areas, kind="stable")[: self._most])
        cropped, over = len(objects.labels) - len(followed.kept), len(followed.kept) - len(shown)
        counts += Counter(shown=len(shown), cropped=cropped, over=over)  # without zeros
        self._entries["boxes_valid"][place, : len(shown)] = True
        labels = np.array(objects.labels, np.int64)[followed.kept]
        values = {"boxes": followed.boxes, "box_labels": labels, "keypoints": followed.keypoints}
        for name, value in {**values, "masks": masks if outlines else None}.items():
            if value is not None and name in self._entries:
                self._entries[name][place, : len(shown)] = value[shown]
        if self._targets.tokenizer is None or "box_input_ids" not in self._entries:
            return 0
        return self._write_texts(place, [objects.texts[int(k)] for k in followed.kept[shown]], self._targets.tokenizer)

    def _write_texts(self, place: int, texts: list[str], tokenizer: Tokenizer) -> int:
        if not (given := [k for k, text in enumerate(texts) if text]):
            return 0
        ids, mask, num_cut = tokenizer.encode_cut([texts[k] for k in given], self._targets.config.box_text_length)
        self._entries["box_input_ids"][place, given] = ids
        self._entries["box_attention_mask"][place, given] = mask
        self._entries["box_text_hash"][place, given] = [hash64(one.tobytes()) for one in ids]
        return num_cut

    def entries(self, valid: Tensor) -> dict[str, Tensor]:
        """The entries of the batch, without values where not `valid` (B,)."""
        for name, values in self._entries.items():
            values[~valid.numpy()] = self._columns[name].fill
        if "box_attention_mask" in self._entries:
            # Attention over no token is NaN, and NaN reaches the gradient though the loss leaves the box out.
            self._entries["box_attention_mask"][..., 0] = 1
        return {name: torch.from_numpy(values) for name, values in self._entries.items()}
