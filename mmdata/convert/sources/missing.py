"""Says where the images of a table were looked for, when none is found, and what would find them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import PurePath

from mmdata.convert.sources.rows import Source
from mmdata.errors import excerpt

SHOWN_CHARACTERS = 200
FILES_SEEN = 20_000
"""Files below the folder of the table among which one of the image's name is looked for."""

_OF = {"table": "table's", "annotations": "annotations'"}
"""Whose the paths are, for each kind of source that has some."""


def where_looked(source: Source, path: str) -> str:
    """For a message about a table of which no image is found: where the first was looked for, and the remedy.

    Args:
        source: any; the text is empty for one without paths in a table, or in annotations.
        path: of the image, as the table gives it; "" if the table holds none.
    """
    kind = source.describe()["kind"]
    if kind not in _OF or not path or "://" in path or "\0" in path:
        return ""
    looked = path if os.path.isabs(path) else os.path.join(source.root, path)
    relative = "" if os.path.isabs(path) else f"the {_OF[kind]} paths are relative to '{source.root}', and "
    said = f"; {relative}{excerpt(looked, SHOWN_CHARACTERS)} does not exist"
    return f"{said}: {_remedy(source.root, path, kind)}"


def _remedy(root: str, path: str, kind: str) -> str:
    found = _of_that_name(root, path)
    if found is None and os.path.isabs(path):
        return f"give the {kind} paths that exist on this machine, absolute ones or relative to --images FOLDER"
    if found is None:
        return "name the folder that they are relative to with --images FOLDER"
    wrong, right = _without_common_end(path, found)
    if not wrong:
        return f"{os.path.join(root, found)!r} does, so name the folder with --images {os.path.join(root, right)}"
    return f"{os.path.join(root, found)!r} does, so write {right!r} in place of {wrong!r} in the {kind}"


def _of_that_name(root: str, path: str) -> str | None:
    """The file below `root`, relative to it, whose path has the longest end in common with `path`."""
    name, best, seen = PurePath(path).name, None, 0
    for folder, folders, files in _walk(root):
        folders.sort()  # the order of the system differs from one to the next
        seen += len(files)
        if name in files:
            found = os.path.relpath(os.path.join(folder, name), root)
            if best is None or len(_without_common_end(path, found)[0]) < len(_without_common_end(path, best)[0]):
                best = found
        if seen > FILES_SEEN:
            break
    return best


def _walk(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """As os.walk, which ends here where a folder lies deeper than Python's stack: what is found is a hint."""
    with suppress(RecursionError):
        yield from os.walk(root)


def _without_common_end(path: str, found: str) -> tuple[str, str]:
    """Both without the parts of their end that are equal: ("old/", "pics/") of old/a/1.jpg and pics/a/1.jpg."""
    ours, theirs = PurePath(path).parts, PurePath(found).parts
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(ours), reversed(theirs), strict=False))))
    wrong, right = (PurePath(*parts[: len(parts) - same]) for parts in (ours, theirs))
    return _folder(wrong), _folder(right)


def _folder(path: PurePath) -> str:
    return "" if path == PurePath() else f"{path.as_posix().rstrip('/')}/"
