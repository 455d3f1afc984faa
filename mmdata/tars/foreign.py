"""Finds the tars that a user names, also by brace patterns, and guesses where their captions are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from mmdata.errors import BadSample, ConfigError, DamagedShard, DataError, Reason
from mmdata.recognize import Kind, near, recognize, refuse_unfinished
from mmdata.safe_read import check_regular, path_of_url
from mmdata.system import read_at
from mmdata.tars.captions import MAX_CAPTION_BYTES, decode_text, parse_json
from mmdata.tars.members import USUAL, Members, guess_captions
from mmdata.tars.samples import SampleReader, texts_of
from mmdata.tars.tar import Member, read_members

GUESSED_SAMPLES = 20
"""First samples that are looked at to find out where captions are."""


MAX_SHARDS = 1_000_000
"""Largest number of shards of a brace pattern. A corpus with ten thousand samples a shard has ten billion then."""
_RANGE = re.compile(r"\{(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.-?(\d+))?\}")


TAR_ENDS = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
"""Ends of the names of tars in a folder. The compressed ones are told of: they have no random access."""


def expand_braces(name: str) -> list[str]:
    """The names that a pattern such as "x-{0000..0331}.tar" stands for, in its order; without braces the name itself.

    Raises:
        ConfigError: braces that do not close, or a pattern of more than `MAX_SHARDS` shards.
    """
    if "{" not in name:
        return [name]
    if name.count("{") != name.count("}"):
        raise ConfigError(f"shards '{name}': braces that do not close")
    from braceexpand import braceexpand  # not needed for local folders

    try:
        # Counted before, because braceexpand keeps all names of each pair of braces in memory.
        is_small = most_names(name) <= MAX_SHARDS
        names = list(islice(braceexpand(name, escape=False), MAX_SHARDS + 1)) if is_small else []
    except (RecursionError, ValueError):
        raise ConfigError(f"shards '{name[:100]}…': hundreds of nested braces; write the names out") from None
    if not 0 < len(names) <= MAX_SHARDS:
        raise ConfigError(
            f"shards '{name}': the pattern stands for more than {MAX_SHARDS:,} shards; correct the numbers in "
            "braces, or pack larger shards (`mmdata convert --shard-rows`)"
        )
    return names


def most_names(pattern: str) -> int:
    """At least as many as the names that a pattern stands for: exact without nested braces.

    Example:
        most_names("{a,b{0..9}}-{000..999}.tar") == 20_000
    """
    counts: list[int] = []
    for first, last, one, other, step in _RANGE.findall(pattern):
        length = abs(int(last) - int(first)) if first else abs(ord(other) - ord(one))
        counts.append(length // (int(step or 1) or 1) + 1)
    choices: list[int] = []  # of each pair of braces that is open
    for character in pattern:
        if character == "{":
            choices.append(1)
        elif character == "," and choices:
            choices[-1] += 1
        elif character == "}" and choices:
            counts.append(choices.pop())
    return prod(counts)


def find_shards(source: Path) -> list[Path]:
    """The tars of a folder, sorted by name; or the tar that `source` is.

    Raises:
        DataError: no tar, a compressed one, or one that is not a regular file.
    """
    if not source.exists():
        braces = "; give the folder: `select` takes some of its shards, shard in ['…']"
        raise DataError(f"'{source}': no such file or folder{braces if '{' in str(source) else near(source)}")
    if not source.is_dir():
        check_regular(source, "shard")
        check_may_be_tar(source)
        return [source]
    refuse_unfinished(source)
    shards = _tars_in(source)
    if packed := [path.name for path in shards if path.suffix != ".tar"]:
        raise DataError(f"folder '{source}': '{packed[0]}' is compressed, which has no random access; unpack it first")
    for path in shards:
        check_regular(path, "shard")
    return shards


def given_tars(given: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The paths of the tars, in the order given; those of a folder are sorted by name. None of them is opened.

    Raises:
        DataError: there is no such file, a folder has no tar, or a tar is named twice.
        ConfigError: a URL or a command, or what `expand_braces` raises.
    """
    paths = [path for one in given for name in expand_braces(os.fspath(one)) for path in _tars_at(name)]
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise DataError(f"'{path}': named twice; name each tar once")
        seen.add(real)
    return paths


def _tars_at(name: str) -> list[Path]:
    name = path_of_url(name) or name
    if "://" in name or name.startswith("pipe:"):
        raise ConfigError(f"'{name}': only tars on this machine are read; fetch them first")
    path = Path(name)
    if not os.path.lexists(path):
        raise DataError(f"'{path}': no such file or folder{near(path)}")
    if not path.is_dir():
        return [path]
    return _tars_in(path)


def _tars_in(folder: Path) -> list[Path]:
    """The tars of a folder, also compressed ones, sorted by name."""
    found = sorted(path for path in folder.iterdir() if path.name.endswith(TAR_ENDS) and not path.name.startswith("."))
    if not found:
        inner = next((path for path in sorted(folder.iterdir()) if path.is_dir() and any(path.glob("*.tar"))), None)
        raise DataError(
            f"folder '{folder}': no .tar in it"
            + (f", but in its folder '{inner.name}'" if inner else "")
            + f"; `mmdata convert {folder} OUT` makes shards of images and captions"
        )
    return found


def check_may_be_tar(path: Path) -> None:
    """Raise a DataError for a file that is plainly something else; a damaged tar is told where it is damaged."""
    kind = recognize(path)
    if path.suffix == ".tar" or kind in (Kind.TAR, Kind.BINARY, Kind.EMPTY, Kind.ABSENT):
        return
    remedy = f"; `mmdata convert {path} OUT` makes shards of it" if kind in (Kind.TABLE, Kind.ZIP) else ""
    raise DataError(f"'{path}': {kind.value}, and a tar or a folder of tars is expected{remedy}")


def guess_members(shards: Iterable[Path]) -> Members:
    """The members by the first samples, where these have no usual caption and no label.

    They are those of the first tar in which a sample can be read: tars before it may be damaged or empty.
    """
    return next((members for path in shards if (members := _guess(path)) is not None), USUAL)


def _guess(path: Path) -> Members | None:
    """The members by the first samples of a tar; None if no sample of it can be read."""
    samples: list[tuple[list[str], dict[str, Any]]] = []
    with path.open("rb") as file:

        def read(member: Member) -> bytes:
            return read_at(file.fileno(), min(member.size, MAX_CAPTION_BYTES + 1), member.offset)

        with suppress(DamagedShard):
            for group in islice(SampleReader(read_members(file, name=path.name), name=path.name), GUESSED_SAMPLES):
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
