"""COCO's instances and person keypoints, alone or with its captions: a row for each image, all boxes in its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmdata.config.convert import ALL, RESERVED, ConvertConfig, Grouping
from mmdata.convert.sources.boxes import KEY, Boxes, missing_caption
from mmdata.convert.sources.coco_files import (
    BOX_VALUES,
    IMAGES_SEEN,
    NO_GROUP,
    SEGMENTATION,
    CocoFiles,
    path_of,
)
from mmdata.convert.sources.files import digest_of_zip
from mmdata.convert.sources.images_folder import find_images
from mmdata.convert.sources.json_tables import hashable
from mmdata.convert.sources.open_table import fingerprint
from mmdata.convert.sources.rows import InputRow, fill_templates
from mmdata.convert.sources.tables import shown
from mmdata.errors import ConfigError, Reason, counted, excerpt

KEYS_SEEN = 100
"""Images whose keys can be kept."""
PATH = "path"
"""Name under which the path of an image is kept."""


class CocoSource:
    """Images with boxes.

    Captions are those of a file of captions of the same images, if it is given too; an image without one has those
    that the caption templates make of the names of its categories, each name once, in the order of the boxes.

    Args:
        paths: of files of the same images: instances_*.json, person_keypoints_*.json, captions_*.json. An annotation
            of one id in two files is one box with what both say.
        config: images, keep and caption templates are used.

    Raises:
        DataError: see `CocoFiles`.
        ConfigError: no captions and no templates, or a name in `keep` that no image has.
    """

    group_by: Grouping = "none"
    rows_are_exact = True
    classes: tuple[str, ...] = ()
    has_captions = True

    def __init__(self, paths: Sequence[Path], config: ConvertConfig) -> None:
        self._files = [fingerprint(path) for path in paths]
        self._templates = tuple(config.caption_templates or ())
        self._content = CocoFiles(paths, needs_segmentation=SEGMENTATION in config.keep)
        if not self._content.has_captions and not self._templates:
            raise _no_captions(paths[0])
        seen = [image for row in range(min(KEYS_SEEN, len(self._content.groups))) for image in self._image(row)]
        known = dict.fromkeys(key for image in seen for key in image if key not in ("file_name", PATH, KEY, *RESERVED))
        self._kept = _names_to_keep(paths[0], config.keep, [*known])
        self.rows_at_most = len(self._content.groups) + len(self._content.orphans)
        names = [name for image in seen[:IMAGES_SEEN] if isinstance(name := path_of(image), str) and name]
        self.root, self._found_in = find_images(paths[0].parent, config.images, names)

    def rows(self) -> Iterator[InputRow]:
        """All images, then the annotations of images that are not listed. See `Source.rows`."""
        for number, group in enumerate(self._content.groups):
            yield self._row(number, group)
        for place, (image_id, group) in enumerate(self._content.orphans):
            found = counted(len(self._content.annotations.of(group)), "annotation")
            detail = f"{found} of image {excerpt(image_id)}, which is not among the file's images"
            number = len(self._content.groups) + place
            yield InputRow(number, self._place(image_id), fault=(Reason.MISSING_IMAGE, detail))

    def rows_with_labels(self) -> Iterator[InputRow]:
        """None. See `Source.rows_with_labels`."""
        return iter(())

    def describe(self) -> dict[str, Any]:
        """Names and hashes of the files. See `Source.describe`."""
        return {
            "kind": "annotations",
            "form": "COCO",
            "files": [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self._files],
            **({"images": self._found_in} if self._found_in else {}),
            **digest_of_zip(self.root),
        }

    def _image(self, row: int) -> list[dict[str, Any]]:
        return self._content.images.of(row)

    def _place(self, image_id: Any) -> str:
        return f"{self._files[0].name}, image {excerpt(image_id)}"

    def _row(self, number: int, group: int) -> InputRow:
        (image,) = self._image(number)
        path, place = path_of(image), self._place(image.get("id"))
        if group == NO_GROUP:
            return InputRow(number, place, image=path, fault=self._content.faults[number])
        annotations = self._joined(self._content.annotations.of(group))
        captions = tuple(one["caption"] for one in annotations if "caption" in one)
        boxes = self._boxes(one for one in annotations if "caption" not in one)
        names = boxes.names()
        if not captions and self._templates and names:
            captions = tuple(fill_templates(self._templates, ", ".join(names)))
        fault = None if captions else missing_caption(self._templates)
        kept = {name: path if name == PATH else image.get(name) for name in self._kept}
        extra = {KEY: boxes.entries, **kept}
        return InputRow(number, place, image=path, captions=captions, extra=extra, losses=boxes.losses, fault=fault)

    def _boxes(self, annotations: Iterator[dict[str, Any]]) -> Boxes:
        boxes = Boxes()
        for one in annotations:
            name = f"annotation {one['id']}" if "id" in one else "an annotation"
            category = self._content.categories.get(hashable(one["category_id"]))
            if category is None:
                boxes.leave_out(f"{name}: category {excerpt(one['category_id'])} is not among the file's categories")
                continue
            more = {key: one[key] for key in (*BOX_VALUES, SEGMENTATION) if key in one}
            boxes.add(name, one["bbox"], {"category": category}, more)
        return boxes

    def _joined(self, annotations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The annotations of an image, those of one id in two files as one: keypoints join the box of their person."""
        joined: list[dict[str, Any]] = []
        first: dict[Any, int] = {}  # of an id and a category: its place in `joined`
        for one in annotations:
            if "id" not in one:
                joined.append(one)
                continue
            place = first.setdefault((hashable(one["id"]), hashable(one["category_id"])), len(joined))
            if place < len(joined) and joined[place]["file"] != one["file"]:
                joined[place] = {**one, **joined[place]}
            else:
                joined.append(one)
        return joined


def _names_to_keep(path: Path, keep: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Names of the values of an image that are kept: "*" takes all that are known; segmentations are kept in boxes.

    Raises:
        ConfigError: a name that no image has.
    """
    asked = [PATH if name == "file_name" else name for name in keep]  # stored as "path", as of a table
    if strangers := [name for name in asked if name not in (ALL, PATH, SEGMENTATION, *known)]:
        raise ConfigError(
            f"annotations '{path}': nothing of the name '{strangers[0]}' (keep); there are: "
            f"{shown([PATH, *known, SEGMENTATION])}"
        )
    named = [name for word in asked for name in (known if word == ALL else (word,))]
    return tuple(dict.fromkeys(name for name in named if name != SEGMENTATION))


def _no_captions(path: Path) -> ConfigError:
    """The error for boxes without captions and without templates."""
    advice = ""
    kind, _, part = path.stem.partition("_") if not path.stem.startswith("person_") else ("", "", path.stem[17:])
    if kind != "captions" and part and (path.parent / f"captions_{part}.json").is_file():
        folder = path.parent.parent if path.parent.name == "annotations" else path.parent
        advice = f", or convert '{folder}' with --split {part}, which takes captions_{part}.json as well"
    return ConfigError(
        f"annotations '{path}': boxes and no captions; make a caption of the names in the boxes with "
        f'--caption-template "a photo of {{}}."{advice}'
    )
