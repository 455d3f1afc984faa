"""Compositional test sets: pairs of images and captions that differ in one thing, and a model's scores on them.

A set is a JSONL file with a pair in each line (the form of Winoground):

    {"type": "colour", "image_0": "a.png", "image_1": "b.png", "caption_0": "a red …", "caption_1": "a blue …"}

The JSON files of SugarCrepe are taken as they are: one image with a true and a false caption, which is a pair that
names its image twice. Images lie in the file's folder, or in `images` or `val2017` there, which may be links. Nothing
outside these folders is read.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, ValidationError

from mmdata.errors import BadSample, DataError
from mmdata.safe_read import locate
from mmdata.tars import clean_caption
from mmdata.train.evaluation.evaluate import compositional
from mmdata.trained.run import TrainedRun

IMAGE_FOLDERS = ("images", "val2017")
"""Folders beside a set where Winoground has its images, and COCO those of SugarCrepe."""
SUFFIXES = (".png", ".jpg")


def _cleaned(caption: str) -> str:
    try:
        return clean_caption(caption)
    except BadSample as error:
        raise ValueError(str(error)) from error


Caption = Annotated[str, AfterValidator(_cleaned)]


class Pair(BaseModel):
    """Two images and their captions. caption_0 describes only image_0, and caption_1 only image_1.

    With one image, image_0 and image_1 are the same, caption_0 is true and caption_1 false.

    Attributes:
        type: what is swapped; Winoground's `collapsed_tag`, SugarCrepe's file.
        image_0: path below a folder of images; Winoground leaves ".png" out.
        image_1: likewise.
        caption_0: a text.
        caption_1: a text.
    """

    type: str = Field(validation_alias=AliasChoices("type", "collapsed_tag"))
    image_0: str
    image_1: str
    caption_0: Caption
    caption_1: Caption

    @property
    def has_one_image(self) -> bool:
        """Whether both captions are of the same image."""
        return self.image_0 == self.image_1


class _SugarCrepe(BaseModel):
    filename: str
    caption: Caption
    negative_caption: Caption

    def pair(self, name: str) -> Pair:
        image, true, false = self.filename, self.caption, self.negative_caption
        return Pair(type=name, image_0=image, image_1=image, caption_0=true, caption_1=false)


def read_pairs(path: str | os.PathLike[str]) -> dict[str, Pair]:
    """The pairs of a set by their places in the file: "line 1", "entry '0'".

    Raises:
        DataError: no such file, an empty one, or a line or entry that is not a pair (its number or key is named).
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"pairs '{file}': no such file; expected JSONL, one pair a line (see mmdata.trained.pairs)")
    content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        whole: Any = json.loads(content)
    except (ValueError, RecursionError):
        whole = None  # several lines
    if isinstance(whole, list):
        raise DataError(
            f"pairs '{file}': one JSON list; expected JSONL, one pair a line (see mmdata.trained.pairs), or a JSON "
            "object of SugarCrepe"
        )
    if isinstance(whole, dict) and not whole.keys() & {"image_0", "caption_0"}:
        kind, entries = _SugarCrepe, {f"entry '{key}'": one for key, one in cast("dict[str, object]", whole).items()}
    else:
        lines = content.removesuffix(b"\n").split(b"\n") if content else []
        kind, entries = Pair, {f"line {number}": line for number, line in enumerate(lines, 1)}
    pairs = {where: _checked(kind, entry, where, file) for where, entry in entries.items()}
    if not pairs:
        raise DataError(f"pairs '{file}': the file is empty")
    if len({pair.has_one_image for pair in pairs.values()}) > 1:
        raise DataError(f"pairs '{file}': some pairs have two images and some have one: make a file of each kind")
    return pairs


def _checked(kind: type[Pair | _SugarCrepe], entry: object, where: str, file: Path) -> Pair:
    try:
        found = kind.model_validate_json(entry if isinstance(entry, bytes) else json.dumps(entry))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or where.partition(" ")[0]
        raise DataError(f"pairs '{file}', {where}: {place}: {first['msg']}") from error
    return found if isinstance(found, Pair) else found.pair(file.stem)


def score_pairs(run: TrainedRun, path: str | os.PathLike[str]) -> dict[str, dict[str, float]]:
    """`compositional` scores of a model on a set.

    Raises:
        DataError: an image or caption cannot be used: no pair is left out of a test set.
    """
    pairs = read_pairs(path)
    one_image = next(iter(pairs.values())).has_one_image
    images = run.embed_images(_images(pairs, Path(path), sides=1 if one_image else 2))
    texts = run.embed_texts([caption for pair in pairs.values() for caption in (pair.caption_0, pair.caption_1)])
    images = images.repeat_interleave(2, dim=0) if one_image else images
    return compositional(images, texts, [pair.type for pair in pairs.values()], one_image=one_image)


def _images(pairs: dict[str, Pair], path: Path, *, sides: int) -> Iterator[str]:
    """The files of the images, in order."""
    roots = [os.path.realpath(path.parent / name) for name in ("", *IMAGE_FOLDERS)]
    for where, pair in pairs.items():
        for side, name in enumerate((pair.image_0, pair.image_1)[:sides]):
            try:
                yield locate(*_place_of(name, roots))
            except (BadSample, OSError) as error:
                raise DataError(f"pairs '{path}', {where}, side {side}: {error}") from error


def _place_of(name: str, roots: list[str]) -> tuple[str, str]:
    """The folder of images that holds a name, and the name with the suffix that it may lack."""
    for root in roots:
        for suffix in ("", *SUFFIXES):
            if os.path.isfile(os.path.join(root, name + suffix)):
                return root, name + suffix
    return roots[0], name  # which says what is wrong with it
