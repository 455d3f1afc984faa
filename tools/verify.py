"""mmdata verify: hash every shard, read it strictly, and compare it with its index and the manifest.

mmdata verify shards/photos
mmdata verify dr            # tars that data.join brings to rows: the index of `mmdata index --members-only`
"""

from __future__ import annotations

from mmdata.cli import Parser, progress_in_bytes, run
from mmdata.errors import counted, printable
from mmdata.shards import Manifest, Problem, verify
from mmdata.shards.folder import local_folder, manifest_prefix
from mmdata.shards.verify_members import has_members_index, verify_members


def main() -> int:
    """Print a line for each problem and return 1, or a line that all is well and return 0."""
    parser = Parser("verify", __doc__)
    parser.add_argument("folder", help="folder with a manifest, as `mmdata convert` and `mmdata index` make it")
    options = parser.parse_args()

    codes: list[int] = []
    if has_members_index(options.folder):
        codes.append(check_members(options.folder))
    if not codes or manifest_prefix(local_folder(options.folder)) is not None:
        codes.append(check_rows(options.folder))
    return max(codes)


def check_rows(folder: str) -> int:
    """Check a folder of shards."""
    with progress_in_bytes("verify") as progress:
        problems = verify(folder, progress)
    if problems:
        return say(problems, folder)
    manifest = Manifest.read(folder)
    sums = (manifest.num_shards, "shard"), (manifest.rows, "row"), (manifest.bytes, "byte")
    print(f"ok: {', '.join(counted(*each) for each in sums)}")
    return 0


def check_members(folder: str) -> int:
    """Check tars without images that are joined."""
    with progress_in_bytes("verify") as progress:
        index, problems = verify_members(folder, progress)
    if problems:
        return say(problems, folder)
    sums = (len(index.tars), "shard"), (len(index), "sample"), (sum(tar.bytes for tar in index.tars), "byte")
    print(f"ok: {', '.join(counted(*each) for each in sums)}, of tars without images (data.join)")
    if index.hashes is None:
        print(printable(f"members were not compared: their index has no hashes; `{index.command()}` makes them"))
    return 0


def say(problems: list[Problem], folder: str) -> int:
    """Print the problems; the exit code."""
    for problem in problems:
        print(problem)
    shards = len({problem.shard for problem in problems})
    print(printable(f"{counted(len(problems), 'problem')} in {counted(shards, 'shard')} of {folder}"))
    return 1


if __name__ == "__main__":
    run(main)
