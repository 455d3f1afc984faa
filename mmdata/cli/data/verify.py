"""mmdata verify: hash every shard, read it strictly, and compare it with its index and the manifest.

    mmdata verify shards/photos/train            # a folder with an index: every byte is hashed
    mmdata verify /data/cc12m                    # tars without an index: headers, texts, heads of images
    mmdata verify "/data/{0000..0331}.tar"       # tars, and folders: what has an index is compared with it

Each problem is a line with shard, offset and remedy, and the next tar is read.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mmdata.errors import counted, printable
from mmdata.progress import progress_in_bytes

if TYPE_CHECKING:
    from mmdata.index import Problem


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="+",
        help="folder with a manifest, as `mmdata convert` and `mmdata index` make it; or tars, folders, patterns",
    )
    parser.add_argument("--workers", type=int, help="processes; default: one for each core")


def run(options: argparse.Namespace) -> int:
    """Print a line for each problem and return 1, or a line that all is well and return 0."""
    given = sort_given(options.folder)
    codes = [check_rows(folder, shards, options.workers) for folder, shards in given.folders.items()]
    if given.tars:
        codes.append(check_tars(given.tars, options.workers))
    return max(codes)


@dataclass
class Given:
    """What `mmdata verify` is given, by the check that is for it.

    Attributes:
        folders: that have an index, with the names of the shards that are given; None: the folder itself is.
        tars: tars and folders of tars without an index.
    """

    folders: dict[str, set[str] | None] = field(default_factory=dict[str, "set[str] | None"])
    tars: list[str] = field(default_factory=list[str])


def sort_given(given: Sequence[str | os.PathLike[str]]) -> Given:
    """Tell folders with an index, and tars of such folders, from the rest: tars, folders, brace patterns.

    Raises:
        DataError: the manifest beside a tar is damaged, or a file is plainly something else than a tar.
        ConfigError: a URL; see also `expand_braces`.
    """
    from mmdata.storage.folder import INNER, local_folder
    from mmdata.tars.foreign import TAR_ENDS, check_may_be_tar, expand_braces

    names = [name for one in given for name in expand_braces(os.fspath(one))]
    sorted_out = Given()
    listed: dict[Path, set[str]] = {}
    for name in names:
        path = local_folder(name)
        if path.is_dir() or (len(names) == 1 and not path.exists()):
            # Also a folder whose manifest is gone: the check says what is missing.
            has_tars = path.is_dir() and any(one.endswith(TAR_ENDS) for one in os.listdir(path))
            if has_tars and not (path / INNER).is_dir():
                sorted_out.tars.append(name)
            else:
                sorted_out.folders[name] = None
            continue
        folder = path.parent
        if folder not in listed:
            listed[folder] = _listed(folder)
        if path.name not in listed[folder]:
            check_may_be_tar(path)
            sorted_out.tars.append(name)
        elif (shards := sorted_out.folders.setdefault(str(folder), set())) is not None:
            shards.add(path.name)
    return sorted_out


def _listed(folder: Path) -> set[str]:
    """Names of the shards in a folder that its index lists; none without an index, or if its tars lie elsewhere."""
    from mmdata.index import Manifest
    from mmdata.storage.folder import has_manifest

    if not has_manifest(folder):
        return set()
    manifest = Manifest.read(folder)
    is_here = os.path.realpath(folder / manifest.location) == os.path.realpath(folder)
    return {entry.name for entry in manifest} if is_here else set()


def check_rows(folder: str, shards: Collection[str] | None, workers: int | None) -> int:
    """Check a folder of shards, or some of its shards."""
    from mmdata.index import Manifest, verify

    with progress_in_bytes("verify") as progress:
        problems = verify(folder, progress, shards=shards, num_workers=workers)
    if problems:
        return say(problems, f"{counted(shards_of(problems), 'shard')} of {folder}")
    checked = [entry for entry in Manifest.read(folder) if shards is None or entry.name in shards]
    sums = (sum(entry.rows for entry in checked), "row"), (sum(entry.bytes for entry in checked), "byte")
    return well((len(checked), "shard"), *sums, more="" if shards is None else f", compared with the index of {folder}")


def check_tars(given: list[str], workers: int | None) -> int:
    """Read tars without an index strictly."""
    from mmdata.index.verify import verify_tars

    with progress_in_bytes("verify") as progress:
        report = verify_tars(given, progress, num_workers=workers)
    if report.problems:
        where = f"{shards_of(report.problems):,} of {counted(report.tars, 'shard')}"
        return say(report.problems, f"{where}: fetch these again, or `mmdata index --skip-damaged`")
    sums = (report.tars, "shard"), (report.samples, "sample"), (report.bytes, "byte")
    return well(*sums, more="; no index, so payloads were not compared with hashes")


def say(problems: Sequence[Problem], where: str) -> int:
    """Print the problems and where they are; the exit code."""
    for problem in problems:
        print(problem)
    print(printable(f"{counted(len(problems), 'problem')} in {where}"))
    return 1


def shards_of(problems: Sequence[Problem]) -> int:
    """In how many shards there are problems."""
    return len({problem.shard for problem in problems})


def well(*sums: tuple[int, str], more: str = "") -> int:
    """Print that all is well; the exit code."""
    print(printable(f"ok: {', '.join(counted(*each) for each in sums)}{more}"))
    return 0
