"""The output of `mmdata convert --val-share`: a folder that holds two folders of shards, `train` and `val`."""

from __future__ import annotations

from pathlib import Path

from mmdata.convert.opening import PARTS
from mmdata.index import Index
from mmdata.recognize import Kind, recognize

TRAIN, VAL = PARTS


def find_part(place: str, split: str | None = None) -> str | None:
    """The folder of shards to take where `place` holds one for each of PARTS; None for any other place.

    Args:
        place: a path or a URL.
        split: one of PARTS; None takes "train".

    Example:
        find_part("shards/coco") == "shards/coco/train", if `mmdata convert coco.json shards/coco --val-share 0.01`
        has made shards/coco.
    """
    folder, part = Path(place), split or TRAIN
    if "://" in place or part not in PARTS or recognize(folder) is Kind.SHARDS:
        return None
    return str(folder / part) if all(recognize(folder / name) is Kind.SHARDS for name in PARTS) else None


def find_val(place: str) -> Path | None:
    """The folder to evaluate on beside `place`, if that is the folder to train on; None if there is none with rows."""
    folder = Path(place)
    val = folder.parent / VAL
    if folder.name != TRAIN or recognize(val) is not Kind.SHARDS:
        return None
    return val if len(Index.open(val)) else None
