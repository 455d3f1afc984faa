"""mmdata verify: hash every shard, read it strictly, and compare it with its index and the manifest.

    mmdata verify shards/photos/train            # a folder with an index: every byte is hashed
    mmdata verify dr                             # tars for data.join, with the index of `mmdata index --members-only`
    mmdata verify /data/cc12m                    # tars without an index: headers, texts, heads of images
    mmdata verify "/data/{0000..0331}.tar"

Each problem is a line with shard, offset and remedy, and the next tar is read. `mmdata repair` saves what can be saved.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mmdata.cli import Parser, progress_in_bytes, run
from mmdata.errors import counted, printable
from mmdata.shards import Manifest, Problem, verify
from mmdata.shards.folder import local_folder, manifest_prefix
from mmdata.shards.verify_members import has_members_index, verify_members
from mmdata.shards.verify_tars import has_no_index, verify_tars


def main() -> int:
    """Print a line for each problem and return 1, or a line that all is well and return 0."""
    parser = Parser("verify", __doc__)
    parser.add_argument(
        "folder",
        nargs="+",
        help="folder with a manifest, as `mmdata convert` and `mmdata index` make it; or tars, folders, patterns",
    )
    options = parser.parse_args()
    given: list[str] = options.folder
    codes: list[int] = []
    if len(given) == 1 and has_members_index(given[0]):
        codes.append(check_members(given[0]))
        if manifest_prefix(local_folder(given[0])) is None:
            return codes[0]
    if has_no_index(given):
        return check_tars(given)
    (folder,) = given
    return max([*codes, check_rows(folder)])


def check_rows(folder: str) -> int:
    """Check a folder of shards."""
    with progress_in_bytes("verify") as progress:
        problems = verify(folder, progress)
    if problems:
        return say(problems, f"{counted(shards_of(problems), 'shard')} of {folder}")
    manifest = Manifest.read(folder)
    return well((manifest.num_shards, "shard"), (manifest.rows, "row"), (manifest.bytes, "byte"))


def check_members(folder: str) -> int:
    """Check tars that are joined to the rows of others."""
    with progress_in_bytes("verify") as progress:
        index, problems = verify_members(folder, progress)
    if problems:
        return say(problems, f"{counted(shards_of(problems), 'shard')} of {folder}")
    sums = (len(index.tars), "shard"), (len(index), "sample"), (sum(tar.bytes for tar in index.tars), "byte")
    well(*sums, more=", of tars without images (data.join)")
    if index.hashes is None:
        print(printable(f"members were not compared: their index has no hashes; `{index.command()}` makes them"))
    return 0


def check_tars(given: list[str]) -> int:
    """Read tars without an index strictly."""
    with progress_in_bytes("verify") as progress:
        report = verify_tars(given, progress)
    if report.problems:
        where = f"{shards_of(report.problems):,} of {counted(report.tars, 'shard')}"
        return say(
            report.problems,
            f"{where}; next: mmdata repair {shlex.join(given)} --out FOLDER    # saves what can be saved",
        )
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
    print(f"ok: {', '.join(counted(*each) for each in sums)}{more}")
    return 0


if __name__ == "__main__":
    run(main)
