"""Reads the text of a row: captions, label and kept columns, from a table, files beside the image, or a tar."""

from __future__ import annotations

import json
import math
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from mmdata.config.convert import RESERVED
from mmdata.convert.sources.columns import as_list
from mmdata.convert.sources.files import Seen
from mmdata.convert.sources.rows import InputRow, fill_templates
from mmdata.convert.sources.tars import PackedFiles
from mmdata.errors import BadSample, Reason, excerpt
from mmdata.tars.captions import MAX_CAPTION_BYTES, clean_caption, clean_captions
from mmdata.tars.texts import Loss, SampleTexts, parse_label

JSON_BYTES_ASIDE = 256
"""Bytes of a sample's JSON member reserved for its label, the sizes of a shrunk image, names and brackets."""


@dataclass(frozen=True)
class FieldReader:
    """Reads the text of rows.

    Args:
        has_captions: whether the corpus has captions; if not, each row needs a label.
        templates: make the captions of a row that has a label and no caption.
        classes: names of the class numbers, if the corpus declares them.
        keeps_all: whether all metadata is kept; then a value that cannot be stored is lost, and does not cost the row.
        guesses_label: whether nobody has named a label; then one that is none is lost, and does not cost the row.
    """

    has_captions: bool = True
    templates: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    keeps_all: bool = False
    guesses_label: bool = False

    def __call__(self, row: InputRow, seen: Seen | None = None) -> SampleTexts:
        """Captions, label and kept columns of a row, from the row itself or from the files of its sample.

        The metadata of the result are the kept columns, as JSON can hold them. A sample of a tar keeps all, unless the
        settings choose. `seen` notes the files that are read.

        Raises:
            BadSample: no caption, or one that cannot be cleaned; in a table, a label or a kept column that cannot be
                stored. A sample of files loses those parts, and files that cannot be read (see `read_texts`).
        """
        if row.files is None:
            label, captions, lost = self._of_table(row)
            extra = _storable(row.extra, lost, room=_room(captions)) if self.keeps_all else _extra(row.extra)
            return SampleTexts(captions, None, label, extra, lost)
        needs_caption, seen = self.has_captions and not self.templates, seen or Seen()
        texts = row.files.texts(seen, needs_caption=needs_caption)
        captions = texts.captions or self._made(texts.label)
        losses = dict(texts.losses)
        extra = {name: value if value is not None else texts.metadata.get(name) for name, value in row.extra.items()}
        if self.keeps_all or (isinstance(row.files, PackedFiles) and not extra):
            extra = {**{name: value for name, value in texts.metadata.items() if name not in RESERVED}, **extra}
        extra = _storable(extra, losses, room=_room(captions))
        return SampleTexts(captions, texts.source, texts.label, extra, losses)

    def label(self, row: InputRow) -> int | str | None:
        """The label of a row; None if it cannot be used. Captions and image are not looked at."""
        with suppress(BadSample):
            if row.fault is None:
                return row.files.label() if row.files else _label_in_table(row)
        return None

    def _of_table(self, row: InputRow) -> tuple[int | str | None, list[str], dict[Loss, str]]:
        """Label, captions and losses of a table's row."""
        try:
            label = _label_in_table(row)
        except BadSample as bad:
            if self.guesses_label:
                with suppress(BadSample):  # without the label the row may have nothing
                    return None, self._captions(row, None), {Loss.LABEL_UNUSABLE: bad.detail}
            raise
        return label, self._captions(row, label), {}

    def _captions(self, row: InputRow, label: int | str | None) -> list[str]:
        """All captions of a table's row, cleaned; empty ones are left out if another has text."""
        if not row.captions and self.has_captions and not self.templates:
            raise BadSample(Reason.MISSING_CAPTION, "no .txt, .caption or .json of the same name")
        present: list[Any] = []
        for value in row.captions:
            present.extend(_said(value))
        if all(value is None for value in present):
            return self._made(label)
        for value in present:
            _check_unicode(value)
        return clean_captions(present)[0]

    def _made(self, label: int | str | None) -> list[str]:
        """The captions of a row without one: none in a corpus of labels only, else those that the templates make.

        Raises:
            BadSample: the row needs a caption, a label, or a name for its label.
        """
        if self.has_captions and not self.templates:
            raise BadSample(Reason.MISSING_CAPTION, "the row has no caption")
        if label is None:
            raise BadSample(Reason.MISSING_CAPTION, "the row has neither a caption nor a label")
        if not self.templates:
            return []
        if isinstance(label, int) and label >= len(self.classes):
            detail = f"class {label} has no name to put into a caption template; give names as labels"
            raise BadSample(Reason.MISSING_CAPTION, detail)
        name = self.classes[label] if isinstance(label, int) else label
        return [clean_caption(caption) for caption in fill_templates(self.templates, name)]


def _label_in_table(row: InputRow) -> int | str | None:
    """The label of a table's row; True and False, of booleans, are the classes 1 and 0."""
    return parse_label(int(row.label) if isinstance(row.label, bool) else row.label)


def _said(value: Any) -> list[Any]:
    """The captions in a cell: of a list, also one as text, its items; of sentences such as {"raw": …}, their text."""
    value = _raw(value)
    listed = as_list(value) if isinstance(value, str) else value
    return [_raw(one) for one in cast("list[Any]", listed)] if isinstance(listed, list) else [value]


def _raw(value: Any) -> Any:
    """Of a sentence of Karpathy's splits its text, or of all sentences of an image in one object their texts."""
    return cast("dict[str, Any]", value)["raw"] if isinstance(value, dict) and "raw" in value else value


def _check_unicode(value: Any) -> None:
    """Raise BadSample with the offset in bytes for text that is not Unicode."""
    if not isinstance(value, str):
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        offset = len(value[: error.start].encode())
        detail = f"a lone surrogate at byte {offset} of the caption"
        if 0xDC80 <= code <= 0xDCFF:
            what = f"invalid UTF-8 (0x{code - 0xDC00:02x}) at byte {offset} of the caption"
            detail = f"{what}; a table in another encoding needs its encoding, such as encoding=latin-1"
        raise BadSample(Reason.BAD_CAPTION, detail) from error


def _extra(values: dict[str, Any]) -> dict[str, Any]:
    """Kept columns as JSON: NaN becomes null, paths are normalised to NFC.

    Raises:
        BadSample: a value cannot be stored.
    """
    losses: dict[Loss, str] = {}
    extra = _storable(values, losses)
    if losses:
        raise BadSample(Reason.BROKEN_ROW, losses[Loss.METADATA_UNUSABLE])
    return extra


def _room(captions: list[str]) -> int:
    """Bytes of JSON that are left for the metadata of a sample with these captions."""
    return MAX_CAPTION_BYTES - JSON_BYTES_ASIDE - len(json.dumps(captions, ensure_ascii=False).encode())


def _storable(values: dict[str, Any], losses: dict[Loss, str], *, room: int | None = None) -> dict[str, Any]:
    """The values that JSON can hold, as `_extra` returns them; the others become a loss.

    Args:
        values: by name.
        losses: gets at most one more entry.
        room: bytes of JSON for all values; None: the writer refuses a sample with too many.
    """
    extra: dict[str, Any] = {}
    size = 0
    for name, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            value = None
        if name == "path" and isinstance(value, str):
            value = unicodedata.normalize("NFC", value)
        try:
            size += len(json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode())
        except (TypeError, ValueError, RecursionError) as error:
            why = f"column {excerpt(name)} cannot be kept as JSON: {excerpt(str(error))}"
            losses.setdefault(Loss.METADATA_UNUSABLE, why)
            continue
        if room is not None and size > room:
            why = f"column {excerpt(name)} and those after it cannot be kept: more than {room} bytes of JSON in all"
            losses.setdefault(Loss.METADATA_UNUSABLE, why)
            break
        extra[name] = value
    return extra
