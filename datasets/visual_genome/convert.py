"""Converts Visual Genome's regions: python datasets/visual_genome/convert.py visual-genome OUT [val_share=0.02 …]

An image is a row. The phrases of its regions are its captions, and its JSON keeps their boxes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmdata.convert import convert, load_recipe
from mmdata.convert.sources.coco import Boxes
from mmdata.convert.sources.json_tables import stream_entries
from mmdata.errors import BadSample, ConfigError, DataError, excerpt
from mmdata.tars.captions import clean_caption

FOLDERS = ("VG_100K", "VG_100K_2")
"""Folders of the images, as the archives unpack."""


def main() -> None:
    """Convert all images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, metavar="FOLDER", help="with region_descriptions.json and image_data.json")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="settings of mmdata convert")
    options = parser.parse_args()
    try:
        config = load_recipe(None, {"images": str(options.corpus.resolve())}, overrides=options.settings)
        report = convert(rows(options.corpus), options.out, config)
    except (ConfigError, DataError) as error:
        raise SystemExit(f"error: {error}") from error
    print({name: report.accounts[name] for name in ("rows", "written", "quarantined", "reasons")})


def rows(corpus: Path) -> Iterator[dict[str, Any]]:
    """The images with regions, in the order of the file; then those that only image_data.json has.

    The file of regions, 700 MB in reality, is streamed; what image_data.json says of each image stays in memory.
    """
    images = {one["image_id"]: one for one in _dicts(corpus / "image_data.json") if _is_id(one.get("image_id"))}
    seen: set[int] = set()
    for number, entry in enumerate(_dicts(corpus / "region_descriptions.json"), 1):
        image_id, regions = entry.get("id"), entry.get("regions")
        if not _is_id(image_id) or not isinstance(regions, list):
            yield {"left_out": f'entry {number} of region_descriptions.json has no "id", or no list of "regions"'}
        elif image_id in seen:
            yield {"left_out": f"duplicate_image: the regions of image {image_id} come twice"}
        else:
            seen.add(image_id)
            yield {**row_of(corpus, image_id, images.get(image_id, {})), **captions_and_boxes(regions)}
    for image_id, image in images.items():
        if image_id not in seen:
            why = "missing_caption: the image is in image_data.json, and has no regions"
            yield {**row_of(corpus, image_id, image), "left_out": why}


def row_of(corpus: Path, image_id: int, image: dict[str, Any]) -> dict[str, Any]:
    """The path of an image, and its numbers in both corpora.

    The URL in image_data.json ends in the path ("VG_100K_2/1.jpg"); without it ID.jpg is looked for in both folders.
    """
    paths = [f"{folder}/{image_id}.jpg" for folder in FOLDERS]
    if isinstance(url := image.get("url"), str) and url.count("/") > 1:
        paths.insert(0, "/".join(url.split("/")[-2:]))
    path = next((one for one in paths if os.path.isfile(corpus / one)), paths[0])
    return {"image": path, "image_id": image_id, "coco_id": image.get("coco_id")}


def captions_and_boxes(regions: list[Any]) -> dict[str, Any]:
    """The phrases of the regions, each once, and their boxes."""
    boxes, phrases = Boxes(), dict[str, None]()
    for order, found in enumerate(regions, 1):
        region: dict[str, Any] = found if isinstance(found, dict) else {}
        region_id = region.get("region_id")
        name = f"region {order if region_id is None else excerpt(region_id)}"
        try:
            phrase = clean_caption(region.get("phrase"))
        except BadSample as bad:
            boxes.leave_out(f"{name}: its phrase cannot be used ({bad.detail})")
            continue
        phrases[phrase] = None  # of a region whose box is unusable, too: it is about the image all the same
        box = [region.get(key) for key in ("x", "y", "width", "height")]
        boxes.add(name, box, {"phrase": phrase}, {} if region_id is None else {"id": region_id})
    left_out = {"boxes_left_out": ", ".join(boxes.losses.values())} if boxes.losses else {}
    return {"captions": list(phrases), "boxes": boxes.entries, **left_out}


def _dicts(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a JSON array; one that is no object is empty."""
    return (entry.value if isinstance(entry.value, dict) else {} for entry in stream_entries(path))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


if __name__ == "__main__":
    main()
