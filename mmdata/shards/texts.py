"""Reads the text files of a foreign sample: captions, label, metadata, and what could not be used.

`mmdata index`, `mmdata convert` and `mmdata.stream` all use `read_texts`, so equal files give equal captions and
labels, or the same error. A sample with a usable caption may lose other parts; each loss is counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from mmdata.errors import BadSample, Reason, excerpt
from mmdata.shards.captions import TXT, captions_of, clean_captions, decode_text, parse_json

TextKind = Literal["json", "txt", "caption", "cls"]
"""Extension of a text file of a sample; .caption files occur in folders."""

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
    METADATA_UNUSABLE = "metadata_unusable"  # a value that strict JSON cannot hold
    OTHER_LABEL = "other_label"  # rows of one image have several labels; the first one was taken

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Texts:
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


def read_texts(kinds: Collection[TextKind], read: ReadText, *, needs_caption: bool = True) -> Texts:
    """Captions and label of a sample.

    Captions come from the first usable source: the JSON's "captions", the .txt, the .caption, the JSON's "caption".
    The label comes from the .cls, else from the JSON's "label".

    Args:
        kinds: the text files that the sample has.
        read: gives the bytes of one.
        needs_caption: False accepts a sample with a label that says nothing of a caption.

    Raises:
        BadSample: no usable caption; the reason is that of the first source that is not empty.

    Example:
        .txt "a dog" and .json `{"captions": null, "label": "x", "label": 1}` give ["a dog"], no label, and the loss
        json_unreadable, for the duplicate key.
    """
    losses: dict[Loss, str] = {}
    faults: list[BadSample] = []
    metadata: dict[str, Any] = {}
    if "json" in kinds:
        try:
            metadata = parse_json(decode_text(read("json")), strict=True)
        except BadSample as bad:
            faults.append(bad)
            losses[Loss.JSON_TOO_LARGE if _is_too_large(bad) else Loss.JSON_UNREADABLE] = bad.detail
    found = _first_usable(kinds, read, metadata, losses, faults)
    label = _label(kinds, read, metadata, losses)
    if found is not None:
        return Texts(*found, label, metadata, losses)
    if faults:
        raise faults[0]
    if label is None or needs_caption:
        raise missing_caption()
    return Texts([], None, label, metadata, losses)


def missing_caption() -> BadSample:
    """The error for a sample without any caption."""
    return BadSample(Reason.MISSING_CAPTION, 'no .txt and no JSON "captions" or "caption" with text in it')


def _first_usable(
    kinds: Collection[TextKind],
    read: ReadText,
    metadata: dict[str, Any],
    losses: dict[Loss, str],
    faults: list[BadSample],
) -> tuple[list[str], TextKind] | None:
    """Captions and their source; None if no source is usable."""
    sources: tuple[tuple[TextKind, str | None], ...] = (
        ("json", "captions"),
        ("txt", None),
        ("caption", None),
        ("json", "caption"),
    )
    for kind, name in sources:
        try:
            if name is not None:
                if metadata.get(name) in (None, []):  # as if the key were missing
                    continue
                captions, left_out = clean_captions(metadata[name])
                if left_out:
                    losses.setdefault(Loss.EMPTY_CAPTION, f'{left_out} empty or null in the JSON\'s "{name}"')
                return captions, kind
            if kind in kinds:
                return captions_of(read(kind), TXT), kind
        except BadSample as bad:
            faults.append(bad)
            empty = bad.reason is Reason.EMPTY_CAPTION
            where = f'the JSON\'s "{name}"' if name else f".{kind}"
            losses.setdefault(Loss.EMPTY_CAPTION if empty else Loss.CAPTION_UNUSABLE, f"{where}: {bad.detail}")
    return None


def _label(
    kinds: Collection[TextKind], read: ReadText, metadata: dict[str, Any], losses: dict[Loss, str]
) -> int | str | None:
    if "cls" in kinds:
        try:
            return parse_label(decode_text(read("cls")))
        except BadSample as bad:
            losses[Loss.LABEL_UNUSABLE] = f".cls: {bad.detail}"
    try:
        value = metadata.get("label")
        if isinstance(value, bool):
            raise BadSample(Reason.BROKEN_ROW, f"label {value} is neither a class number from 0 nor a name")
        return parse_label(value)
    except BadSample as bad:
        losses.setdefault(Loss.LABEL_UNUSABLE, f'the JSON\'s "label": {bad.detail}')
        return None


def parse_label(value: object) -> int | str | None:
    """A class number from 0, a class name, or None; an empty string, NaN and -1 give None.

    Raises:
        BadSample: broken_row, for anything else.

    Example:
        " 007\\n" gives 7, "cat" gives "cat", "-1" gives None.
    """
    if isinstance(value, str):
        value = value.strip()
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


def _is_too_large(bad: BadSample) -> bool:
    return bad.reason is Reason.CAPTION_TOO_LONG


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
