"""Reads the text files of a foreign sample: captions, label, metadata, and what could not be used.

`mmdata index`, `mmdata convert` and `mmdata.stream` all use `read_texts`, so equal files give equal captions and
labels, or the same error. A sample with a usable caption may lose other parts; each loss is counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mmdata.errors import BadSample, Reason, excerpt
from mmdata.tars.captions import clean_captions, decode_text, parse_json
from mmdata.tars.members import USUAL, Members, Selector

TextKind = str
"""Extension of a text file of a sample: json, txt, cls, in folders caption, or one that `Members` names."""

ReadText = Callable[[TextKind], bytes]
"""Reads a text file of the sample; raises BadSample if it cannot be read or is too large."""

MAX_LABEL_NAME = 1000
"""Longest name of a class in characters."""


class Loss(str, Enum):
    """What a usable sample has lost. The list is closed: accounts rely on it."""

    JSON_UNREADABLE = "json_unreadable"  # not UTF-8, not JSON, a list, a duplicate key
    JSON_TOO_LARGE = "json_too_large"
    CAPTION_UNUSABLE = "caption_unusable"  # the preferred source of captions; the next one was taken
    EMPTY_CAPTION = "empty_caption"  # the preferred source, or an entry of a list, is empty
    LABEL_UNUSABLE = "label_unusable"  # neither a class number nor a name
    LABEL_NAME = "label_name"  # a name in a stream, or after labels that are numbers
    SECOND_IMAGE = "second_image"  # further images of the sample: the first is used
    METADATA_UNUSABLE = "metadata_unusable"  # a value that strict JSON cannot hold
    OTHER_LABEL = "other_label"  # rows of one image have several labels; the first one was taken
    BOX_UNUSABLE = "box_unusable"  # it has no area, no number, or a category that is not listed

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class SampleTexts:
    """The content of a sample's text files.

    Attributes:
        captions: each as `clean_caption` returns it; none of a sample of which only the label is known.
        source: the file that they come from; None without a caption.
        label: class number, class name, or None.
        metadata: the whole JSON object; empty without a readable one.
        losses: what could not be used, each with one line of detail.
    """

    captions: list[str]
    source: TextKind | None
    label: int | str | None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    losses: dict[Loss, str] = field(default_factory=dict[Loss, str])


def read_texts(
    kinds: Collection[TextKind], read: ReadText, *, needs_caption: bool = True, members: Members = USUAL
) -> SampleTexts:
    """Captions and label of a sample.

    Captions come from the first usable source: the JSON's "captions", the .txt, the .caption, the JSON's "caption".
    The label comes from the .cls, else from the JSON's "label". Selectors in `members` take the place of these.

    Args:
        kinds: the text files that the sample has.
        read: gives the bytes of one.
        needs_caption: False accepts a sample with a label that says nothing of a caption.
        members: where captions and label are, if not where they usually are.

    Raises:
        BadSample: no usable caption; the reason is that of the first source that is not empty.

    Example:
        .txt "a dog" and .json `{"captions": null, "label": "x", "label": 1}` give ["a dog"], no label, and the loss
        json_unreadable, for the duplicate key.
    """
    files = _TextFiles(kinds, read)
    metadata = files.metadata()
    found = files.captions(members.caption or USUAL_CAPTIONS)
    label = files.label(_label_sources(members))
    if found is None and files.faults:
        raise files.faults[0]
    if found is None and (label is None or needs_caption):
        raise missing_caption(members)
    captions, source = found or ([], None)
    return SampleTexts(captions, source, label, metadata, files.losses)


def read_label(kinds: Collection[TextKind], read: ReadText, members: Members = USUAL) -> int | str | None:
    """The label that `read_texts` gives, without the captions; None if it cannot be used."""
    return _TextFiles(kinds, read).label(_label_sources(members))


def missing_caption(members: Members = USUAL) -> BadSample:
    """The error for a sample without any caption."""
    if members.caption:
        listed = " or ".join(selector.words for selector in members.caption)
        return BadSample(Reason.MISSING_CAPTION, f"no text in {listed}")
    return BadSample(Reason.MISSING_CAPTION, 'no .txt and no JSON "captions" or "caption" with text in it')


USUAL_CAPTIONS = (
    Selector("json", "captions"),
    Selector("txt"),
    Selector("caption"),
    Selector("json", "caption"),
)
USUAL_LABELS = (Selector("cls"), Selector("json", "label"))


def _label_sources(members: Members) -> tuple[Selector, ...]:
    return () if members.label is None else members.label or USUAL_LABELS


class _TextFiles:
    """The text files of one sample while they are read."""

    def __init__(self, kinds: Collection[TextKind], read: ReadText) -> None:
        self._kinds, self._read = kinds, read
        self._json: dict[str, dict[str, Any]] = {}  # by extension
        self.losses: dict[Loss, str] = {}
        self.faults: list[BadSample] = []

    def metadata(self) -> dict[str, Any]:
        """The whole .json; empty if there is none, or none that can be read."""
        try:
            return self._content("json")
        except BadSample as bad:
            too_large = bad.reason is Reason.CAPTION_TOO_LONG
            self.faults.append(bad)
            self.losses[Loss.JSON_TOO_LARGE if too_large else Loss.JSON_UNREADABLE] = bad.detail
            return {}

    def captions(self, sources: Sequence[Selector]) -> tuple[list[str], TextKind] | None:
        """Captions and their source; None if no source is usable."""
        for source in sources:
            try:
                value = self._value(source)
                if value in (None, []):  # as if the key were missing
                    continue
                captions, left_out = clean_captions(value)
            except BadSample as bad:
                self.faults.append(bad)
                empty = bad.reason is Reason.EMPTY_CAPTION
                self._lose(Loss.EMPTY_CAPTION if empty else Loss.CAPTION_UNUSABLE, f"{source.words}: {bad.detail}")
            else:
                if left_out:
                    self._lose(Loss.EMPTY_CAPTION, f"{left_out} empty or null in {source.words}")
                return captions, source.extension
        return None

    def label(self, sources: Sequence[Selector]) -> int | str | None:
        """The label of the first source that exists and is usable; a .cls of "-1" says that there is none."""
        for source in sources:
            try:
                value = self._value(source)
                if isinstance(value, bool):
                    raise BadSample(Reason.BROKEN_ROW, f"label {value} is neither a class number from 0 nor a name")
                label = parse_label(value)
            except BadSample as bad:
                self._lose(Loss.LABEL_UNUSABLE, f"{source.words}: {bad.detail}")
            else:
                if label is not None or (value is not None and not source.key):
                    return label
        return None

    def _value(self, source: Selector) -> object:
        """The text of a file, or a value in JSON; None without the file or the key."""
        if source.key:
            return self._content(source.extension).get(source.key)
        return decode_text(self._read(source.extension)) if source.extension in self._kinds else None

    def _content(self, extension: str) -> dict[str, Any]:
        """The JSON of a file, parsed once; empty without the file, and after an error."""
        if extension not in self._json:
            self._json[extension] = {}
            if extension in self._kinds:
                self._json[extension] = parse_json(decode_text(self._read(extension)), strict=True)
        return self._json[extension]

    def _lose(self, loss: Loss, detail: str) -> None:
        self.losses.setdefault(loss, detail)


def parse_label(value: object) -> int | str | None:
    """A class number from 0, a class name, or None; an empty string, NaN and -1 give None.

    Raises:
        BadSample: broken_row, for anything else.

    Example:
        " 007\\n" and "7.0" give 7, "cat" gives "cat", "-1" gives None.
    """
    if isinstance(value, str):
        value = re.sub(r"^(-?[0-9]+)\.0+$", r"\1", value.strip())  # as pandas writes 7 where another row has none
        if re.fullmatch(r"-?[0-9]+", value):
            digits = value.lstrip("-0") or "0"  # Python refuses to parse thousands of digits
            value = (-int(digits) if value.startswith("-") else int(digits)) if len(digits) <= 19 else value
    if isinstance(value, float):
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    if value is None or value == "" or value == -1:
        return None
    if isinstance(value, int) and 0 <= value < 2**63:
        return int(value)
    is_name = isinstance(value, str) and value.isprintable() and len(value) <= MAX_LABEL_NAME
    if isinstance(value, str) and is_name and not re.fullmatch(r"-?[0-9]+", value):
        return value
    raise BadSample(Reason.BROKEN_ROW, f"label {excerpt(value)} is neither a class number from 0 nor a name")


class Losses:
    """Counts the losses of a corpus.

    Attributes:
        counts: number of samples for each kind of loss.
        first: place and detail of the first loss of each kind.
    """

    def __init__(self) -> None:
        self.counts: Counter[Loss] = Counter()
        self.first: dict[Loss, str] = {}

    def add(self, place: str, losses: Mapping[Loss, str]) -> list[Loss]:
        """Count the losses of a sample; returns the kinds that are new."""
        new = [loss for loss in losses if loss not in self.first]
        for loss in losses:
            self.counts[loss] += 1
        for loss in new:
            self.first[loss] = f"{place}: {losses[loss]}"
        return new

    def as_dict(self) -> dict[str, int]:
        """The counts as JSON, sorted by name."""
        return {str(loss): self.counts[loss] for loss in sorted(self.counts)}
