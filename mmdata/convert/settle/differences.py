"""What differs between two conversions, in a person's words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Run = dict[str, Any]
"""What decides a conversion's bytes, {"source": …, "settings": …}. The manifest's accounts keep it as "run"."""

MOST = 5
"""Differences that a message names."""
LONGEST = 80
"""Characters of a value in a message."""
_LISTING = "listing_sha256"
_HASHES = {
    _LISTING: "files of the source were added, removed, renamed or have another size",
    "sha256": "the rows are others",
    "rows": "rows: other rows are selected",
    "not_in": "the folders of not_in are others",
}
"""What it means that a value differs which says nothing to people."""
_NAMES = {
    "image": "image column",
    "captions": "caption columns",
    "label": "label column",
    "images": "folder of images",
    "version": "version of mmdata",
    "pillow": "version of Pillow",
}


def differences(before: Run, now: Run) -> list[str]:
    """What changed between two runs, as "min_side: was 2, is 32" or "the file 'a.csv' has changed"."""
    old, new = before["source"], now["source"]
    if old["kind"] != new["kind"]:
        found = [f"the source was of the kind {old['kind']}, and is of the kind {new['kind']}"]
    else:
        found = [*_of_source(old, new)]
    found += _values(before["settings"], now["settings"])
    found += _values(before.get("mmdata", {}), now.get("mmdata", {}))
    return found if len(found) <= MOST else [*found[:MOST], f"and {len(found) - MOST} more"]


def _of_source(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    files = [{file["name"]: file["sha256"] for file in source.get("files", ())} for source in (old, new)]
    for name in sorted({*files[0], *files[1]}):
        if files[0].get(name) != files[1].get(name):
            how = "is new" if name not in files[0] else "is gone" if name not in files[1] else "has changed"
            yield f"the file '{name}' {how}"
    # Numbers of files differ with the listing.
    numbers = {"ignored_files", "shards", "ignored_members"} if old.get(_LISTING) != new.get(_LISTING) else set[str]()
    apart = {"kind", "files", *numbers}
    yield from _values(*({name: source[name] for name in source if name not in apart} for source in (old, new)))


def _values(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if name in _HASHES:
            yield _HASHES[name]
        elif name == "tokenizer" and before and now:
            yield "the tokenizer is another one"
        elif name == "tokenizer":
            yield f"tokenizer: was {'given' if before else 'not set'}, is {'given' if now else 'not set'}"
        else:
            yield f"{_NAMES.get(name, name)}: was {_said(before)}, is {_said(now)}"


def _said(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
