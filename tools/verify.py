"""mmdata verify: hash every shard, read it strictly, and compare it with its index and the manifest.

    mmdata verify shards/photos/train            # a folder with an index: every byte is hashed
    mmdata verify dr                             # tars for data.join, with the index of `mmdata index --members-only`
    mmdata verify /data/cc12m                    # tars without an index: headers, texts, heads of images
    mmdata verify "/data/{0000..0331}.tar"       # tars, and folders: what has an index is compared with it

Each problem is a line with shard, offset and remedy, and the next tar is read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mmdata.cli import Parser, progress_in_bytes, run
from mmdata.errors import counted, printable
from mmdata.index import Manifest, Problem, verify
from mmdata.index.verify_given import sort_given
from mmdata.index.verify_members import has_members_index, verify_members
from mmdata.index.verify_tars import verify_tars
from mmdata.storage.folder import has_manifest, local_folder


def main() -> int:
    """Print a line for each problem and return 1, or a line that all is well and return 0."""
    parser = Parser("verify", __doc__)
    parser.add_argument(
        "folder",
        nargs="+",
        help="folder with a manifest, as `mmdata convert` and `mmdata index` make it; or tars, folders, patterns",
    )
    parser.add_argument("--workers", type=int, help="processes; default: one for each core")
    options = parser.parse_args()
    given = sort_given(options.folder)
    codes = [check_folder(folder, shards, options.workers) for folder, shards in given.folders.items()]
    if given.tars:
        codes.append(check_tars(given.tars, options.workers))
    return max(codes)


def check_folder(folder: str, shards: Collection[str] | None, workers: int | None) -> int:
    """Check a folder with an index of rows, of members, or of both; only some of its shards, unless None."""
    if shards is not None or not has_members_index(folder):
        return check_rows(folder, shards, workers)
    code = check_members(folder)
    return code if not has_manifest(local_folder(folder)) else max(code, check_rows(folder, None, workers))


def check_rows(folder: str, shards: Collection[str] | None, workers: int | None) -> int:
    """Check a folder of shards, or some of its shards."""
    with progress_in_bytes("verify") as progress:
        problems = verify(folder, progress, shards=shards, num_workers=workers)
    if problems:
        return say(problems, f"{counted(shards_of(problems), 'shard')} of {folder}")
    checked = [entry for entry in Manifest.read(folder) if shards is None or entry.name in shards]
    sums = (sum(entry.rows for entry in checked), "row"), (sum(entry.bytes for entry in checked), "byte")
    return well((len(checked), "shard"), *sums, more="" if shards is None else f", compared with the index of {folder}")


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


def check_tars(given: list[str], workers: int | None) -> int:
    """Read tars without an index strictly."""
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


if __name__ == "__main__":
    run(main)
