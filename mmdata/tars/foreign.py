"""Finds the tars of a folder that others have written, and guesses where their captions are."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmdata.errors import BadSample, DataError, Reason
from mmdata.recognize import Kind, recognize, refuse_unfinished
from mmdata.safe_read import check_regular
from mmdata.tars.captions import MAX_CAPTION_BYTES, decode_text, parse_json
from mmdata.tars.members import USUAL, Members, guess_captions
from mmdata.tars.samples import ReadMember, SampleReader, texts_of
from mmdata.tars.tar import Member, read_members

GUESSED_SAMPLES = 20
"""First samples that are looked at to find out where captions are."""


def find_shards(source: Path) -> list[Path]:
    """The tars of a folder, sorted by name; or the tar that `source` is.

    Raises:
        DataError: no tar, a compressed one, or one that is not a regular file.
    """
    if not source.exists():
        some = "; give the folder: `select` takes some of its shards, shard in ['…']" if "{" in str(source) else ""
        raise DataError(f"'{source}': no such file or folder{some}")
    if not source.is_dir():
        check_regular(source, "shard")
        _check_may_be_tar(source)
        return [source]
    refuse_unfinished(source)
    names = sorted(path.name for path in source.iterdir() if not path.name.startswith("."))
    if packed := [name for name in names if name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"))]:
        raise DataError(f"folder '{source}': '{packed[0]}' is compressed, which has no random access; unpack it first")
    shards = [source / name for name in names if name.endswith(".tar")]
    if not shards:
        raise DataError(
            f"folder '{source}': no .tar in it, {_holdings(source)}; `mmdata convert {source} OUT` makes shards of "
            "images and captions"
        )
    for path in shards:
        check_regular(path, "shard")
    return shards


def _check_may_be_tar(path: Path) -> None:
    """Raise a DataError for a file that is plainly something else; a damaged tar is told where it is damaged."""
    kind = recognize(path)
    if path.suffix == ".tar" or kind in (Kind.TAR, Kind.BINARY, Kind.EMPTY, Kind.ABSENT):
        return
    remedy = f"; `mmdata convert {path} OUT` makes shards of it" if kind in (Kind.TABLE, Kind.ZIP) else ""
    raise DataError(f"'{path}': {kind.value}, and a tar or a folder of tars is expected{remedy}")


def _holdings(folder: Path) -> str:
    """What a folder without tars holds, in words."""
    names = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if not names:
        return "it is empty"
    folders = sorted(path.name for path in names if path.is_dir() and any(path.glob("*.tar")))
    if folders:
        return f"but in its folder '{folders[0]}'" + (f" and {len(folders) - 1} others" if len(folders) > 1 else "")
    kinds = Counter(path.suffix or "without an extension" if not path.is_dir() else "folders" for path in names)
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(3))
    return f"it holds {listed}" + (" and others" if len(kinds) > 3 else "")


def guess_members(shards: Iterable[Path]) -> Members:
    """The members by the first samples, where these have no usual caption and no label.

    They are those of the first tar in which a sample can be read: tars before it may be damaged or empty.
    """
    return next((members for path in shards if (members := _guess(path)) is not None), USUAL)


def _guess(path: Path) -> Members | None:
    """The members by the first samples of a tar; None if no sample of it can be read."""
    with path.open("rb") as file:

        def read(member: Member) -> bytes:
            file.seek(member.offset)
            return file.read(min(member.size, MAX_CAPTION_BYTES + 1))

        return _guess_by_samples(SampleReader(read_members(file, name=path.name), name=path.name), read)


def _guess_by_samples(reader: SampleReader, read: ReadMember) -> Members | None:
    samples: list[tuple[list[str], dict[str, Any]]] = []
    for count in range(1, GUESSED_SAMPLES + 1):
        if len(groups := reader.peek(count)) < count:
            break
        group = groups[-1]
        try:
            texts_of(group, read, needs_caption=False)
            return USUAL
        except BadSample as bad:
            if bad.reason is not Reason.MISSING_CAPTION:
                return USUAL
        found = group.members.get("json")
        samples.append((list(group.members), parse_json(decode_text(read(found))) if found else {}))
    return guess_captions(samples) or USUAL if samples else None


def refuse_not_utf8(name: str) -> None:
    """Raise DataError for a name that is not UTF-8: a manifest is JSON and cannot hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        escaped = os.fsencode(name).decode("utf-8", "backslashreplace")
        raise DataError(
            f"'{escaped}': the name is not UTF-8, and a manifest cannot hold it; rename the file or folder first"
        ) from None
