"""Merges the rows of one image into one sample with all their captions. The order of the rows decides.

The rows are read three times: for the images that repeat, for the captions of those rows, and to convert. What must
wait for that waits in temporary files, of which one at a time is in memory. Images are one if they have one path, or
equal bytes; of those, only files whose size and last bytes are equal are read whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from mmdata.convert.row.blur import parse_boxes
from mmdata.convert.row.examine import Examiner
from mmdata.convert.settle.repeats import Repeats
from mmdata.convert.settle.spill import Spill
from mmdata.convert.sources.files import glimpse_file
from mmdata.convert.sources.rows import KEY_BYTES, InputRow, Merge, image_key, row_key
from mmdata.convert.sources.tars import PackedFiles
from mmdata.convert.units.engines import chunks, in_order
from mmdata.errors import BadSample, Reason, excerpt
from mmdata.processes import usable_cores
from mmdata.tars.captions import MAX_CAPTION_BYTES
from mmdata.tars.texts import Loss

MAX_MERGED_BYTES = MAX_CAPTION_BYTES // 2
"""Most bytes of captions of a merged sample: a path such as "none.jpg" may come in any number of rows."""
BUCKET_ROWS = 2**16
"""Rows whose merges, or whose captions, are in memory at once."""

CHUNK = 4096
"""Rows of which is known at once whether their images repeat."""


class Merges:
    """The merges of a corpus: none until they are found. A context manager.

    The first row of an image with usable captions gets those that the others have and it has not, and the boxes of all.
    The others stay rows, so that each is accounted for: they are merged, duplicates (they add no caption), or one with
    too many captions for a sample. Rows whose captions or label cannot be used are left as they are.

    Args:
        folder: for temporary files.
        number_of: gives the number of a row in the whole source, for people.
    """

    def __init__(self, folder: Path, number_of: Callable[[Any], Any] = int) -> None:
        self._folder = folder
        self._number_of = number_of
        self._merges = Spill(folder)
        self._last: tuple[int, dict[int, Merge]] = -1, {}  # the bucket that was read last

    def find(
        self,
        rows: Callable[[str], Iterable[InputRow]],
        examiner: Examiner,
        *,
        by_content: bool,
        num_rows: int,
    ) -> None:
        """Find the merges.

        Args:
            rows: gives all rows, for a purpose that is shown. It is called once, and again if an image repeats.
            examiner: reads captions, labels and images.
            by_content: whether images with equal bytes are one; otherwise those with one path, or one binary cell.
            num_rows: of the source.
        """
        workers = usable_cores() if by_content else 1
        key_of = partial(_content_key, examiner) if by_content else image_key
        line_of = partial(_line, examiner, examiner.digest if by_content else None)
        with Repeats(self._folder, num_rows, with_firsts=True) as repeats, Spill(self._folder) as said:
            start = 0
            for chunk in chunks(in_order(workers, key_of, rows("compare images")), CHUNK):
                repeats.add(b"".join(chunk), np.arange(start, start + len(chunk)))
                start += len(chunk)
            repeats.sort()
            if not repeats.num_found:
                return
            for first, line in in_order(workers, line_of, _repeated(rows("group captions"), repeats)):
                said.add(first // BUCKET_ROWS, line)
            for bucket in range(-(-start // BUCKET_ROWS)):
                self._merge(said.read(bucket))

    def between(self, start: int, stop: int) -> dict[int, Merge]:
        """The merges of the rows from `start` to before `stop`, by row; fastest in ascending order."""
        merges: dict[int, Merge] = {}
        for bucket in range(start // BUCKET_ROWS, -(-stop // BUCKET_ROWS)):
            if self._last[0] != bucket:
                lines = self._merges.read(bucket).splitlines()
                self._last = bucket, {number: _merge_of(*values) for number, *values in map(json.loads, lines)}
            merges.update((row, merge) for row, merge in self._last[1].items() if start <= row < stop)
        return merges

    def close(self) -> None:
        """Remove the temporary files."""
        self._merges.close()

    def __enter__(self) -> Merges:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _merge(self, said: bytes) -> None:
        """Merge the rows of some images; `said` has their captions, in the order of the rows."""
        groups: dict[tuple[int, str], _Group] = {}
        for line in said.splitlines():
            first, digest, row, said_of_row, boxes = json.loads(line)
            group = groups.setdefault((first, digest), _Group(self._number_of))
            group.boxes.append(boxes)
            if said_of_row is None:
                continue
            captions, label = said_of_row
            if group.row < 0:
                group.begin(row, captions, label, boxes)
            else:
                self._write(row, [(), {}, None, group.row, group.take(row, captions, label)])
        for group in groups.values():
            boxes, fault = group.all_boxes()
            if group.row >= 0 and len(group.boxes) > 1 and (group.added or group.losses or boxes is not None or fault):
                self._write(group.row, [group.added, group.losses, boxes, None, fault])

    def _write(self, row: int, values: list[Any]) -> None:
        self._merges.add(row // BUCKET_ROWS, json.dumps([row, *values]).encode() + b"\n")


@dataclass
class _Group:
    """The rows of one image, as they come.

    Attributes:
        number_of: gives the number of a row in the whole source, for people.
        row: the first with usable captions, which takes those of the others; -1 for none so far.
        label: of that row.
        own_boxes: of that row.
        known: captions so far.
        size: their bytes.
        added: captions of the others.
        boxes: of each row, or why they are none.
    """

    number_of: Callable[[Any], Any]
    row: int = -1
    label: int | str | None = None
    own_boxes: Any = None
    known: set[str] = field(default_factory=set[str])
    size: int = 0
    added: list[str] = field(default_factory=list[str])
    losses: dict[Loss, str] = field(default_factory=dict[Loss, str])
    boxes: list[list[list[float]] | str] = field(default_factory=list[Any])

    def begin(self, row: int, captions: list[str], label: int | str | None, boxes: Any) -> None:
        """Take a row as the first."""
        self.row, self.label, self.own_boxes = row, label, boxes
        self.known.update(captions)
        self.size = _size(captions)

    def all_boxes(self) -> tuple[list[list[float]] | None, tuple[Reason, str] | None]:
        """The boxes of all rows, None if the first has them all; and why there are none: one bad cell is one of all."""
        if bad := next((boxes for boxes in self.boxes if isinstance(boxes, str)), None):
            return None, (Reason.BROKEN_ROW, bad)
        found = [list(box) for box in dict.fromkeys(tuple(box) for boxes in self.boxes for box in boxes)]
        return (None if found == self.own_boxes else cast("list[list[float]]", found)), None

    def take(self, row: int, captions: list[str], label: int | str | None) -> tuple[Reason, str] | None:
        """Add the captions of a row; why it cannot be merged, or None."""
        if label not in (self.label, None):
            other, own = excerpt(label), excerpt(self.label)
            detail = f"row {self.number_of(row)} of the same image has label {other}, and this one {own}"
            self.losses.setdefault(Loss.OTHER_LABEL, detail)
        new = [caption for caption in dict.fromkeys(captions) if caption not in self.known]
        if not new:
            return (
                Reason.DUPLICATE_IMAGE,
                f"the image of row {self.number_of(self.row)} again, with no caption that is new",
            )
        self.size += _size(new)
        if self.size > MAX_MERGED_BYTES:
            taker = self.number_of(self.row)
            detail = f"the rows before it have given row {taker} more than {MAX_MERGED_BYTES} bytes of captions"
            return Reason.CAPTION_TOO_LONG, detail
        self.known.update(new)
        self.added += new
        return None


def _merge_of(
    captions: list[str],
    losses: dict[str, str],
    boxes: list[list[float]] | None,
    into: int | None,
    fault: list[str] | None,
) -> Merge:
    """A merge as `Merges` has written it."""
    found = {Loss(name): detail for name, detail in losses.items()}
    return Merge(tuple(captions), found, boxes, into, (Reason(fault[0]), fault[1]) if fault else None)


def _content_key(examiner: Examiner, row: InputRow) -> bytes:
    """KEY_BYTES that are equal for rows with equal images, and seldom for others."""
    seen: Any = None
    with suppress(BadSample):  # the examination of the row names it
        if isinstance(row.files, PackedFiles):  # its tar is read in any case
            seen = examiner.read_image(row)
        else:
            seen = glimpse_file(examiner.root, row.image) if isinstance(row.image, str) else row.image
    if row.fault or not isinstance(seen, bytes):
        return row_key(row.number)
    return hashlib.sha256(seen).digest()[:KEY_BYTES]


def _repeated(rows: Iterable[InputRow], repeats: Repeats) -> Iterator[tuple[InputRow, int]]:
    """The rows whose key repeats, each with the first row of its key."""
    for chunk in chunks(rows, CHUNK):
        found = repeats.between(chunk[0].number, chunk[-1].number + 1)
        firsts = dict(zip(found.rows.tolist(), found.firsts.tolist(), strict=True))
        yield from ((row, firsts[row.number]) for row in chunk if row.number in firsts)


def _line(
    examiner: Examiner, digest_of: Callable[[InputRow], bytes] | None, repeated: tuple[InputRow, int]
) -> tuple[int, bytes]:
    """What a row says, for `Merges`: the first row of its key, its image, number, captions and label, and boxes.

    The image is told by its digest, or by the row where it cannot be read; without `digest_of` by its key alone.
    """
    row, first = repeated
    digest = "" if digest_of is None else digest_of(row).hex() or f"row {row.number}"
    said, boxes = None, list[Any]()
    with suppress(BadSample):  # the examination of the row names its fault, and the writer the next one
        said = examiner.say(row)
    try:
        boxes = parse_boxes(row.boxes)
    except BadSample as bad:
        boxes = bad.detail
    text = json.dumps([first, digest, row.number, said, boxes], ensure_ascii=False)
    if len(text.encode("utf-8", "surrogatepass")) > MAX_CAPTION_BYTES:
        text = json.dumps([first, digest, row.number, None, boxes], ensure_ascii=False)
    return first, text.encode("utf-8", "surrogatepass") + b"\n"


def _size(captions: list[str]) -> int:
    """Bytes of captions in a sample's JSON."""
    return len(json.dumps(captions, ensure_ascii=False).encode())
