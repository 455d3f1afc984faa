"""mmdata verify: hash every shard, read it strictly, and compare it with its index and the manifest.

    mmdata verify shards/photos/train            # a folder with an index: every byte is hashed
    mmdata verify /data/cc12m                    # tars without one: headers, texts, heads of images
    mmdata verify "/data/{0000..0331}.tar"

Each problem is a line with shard, offset and remedy, and the next tar is read. `mmdata repair` saves what can be saved.
"""

from __future__ import annotations

import shlex

from mmdata.cli import Parser, progress_in_bytes, run
from mmdata.errors import counted, printable
from mmdata.shards import Manifest, verify
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
    if has_no_index(options.folder):
        return verify_without_index(options.folder)
    (folder,) = options.folder

    with progress_in_bytes("verify") as progress:
        problems = verify(folder, progress)
    for problem in problems:
        print(problem)
    if problems:
        shards = len({problem.shard for problem in problems})
        print(printable(f"{counted(len(problems), 'problem')} in {counted(shards, 'shard')} of {folder}"))
        return 1
    manifest = Manifest.read(folder)
    sums = (manifest.num_shards, "shard"), (manifest.rows, "row"), (manifest.bytes, "byte")
    print(f"ok: {', '.join(counted(*each) for each in sums)}")
    return 0


def verify_without_index(given: list[str]) -> int:
    """Read tars strictly; 1 if one has a problem."""
    with progress_in_bytes("verify") as progress:
        report = verify_tars(given, progress)
    for problem in report.problems:
        print(problem)
    if report.problems:
        shards = len({problem.shard for problem in report.problems})
        what = f"{counted(len(report.problems), 'problem')} in {shards:,} of {counted(report.tars, 'shard')}"
        print(printable(f"{what}; next: mmdata repair {shlex.join(given)} --out FOLDER    # saves what can be saved"))
        return 1
    sums = (report.tars, "shard"), (report.samples, "sample"), (report.bytes, "byte")
    print(f"ok: {', '.join(counted(*each) for each in sums)}; no index, so payloads were not compared with hashes")
    return 0


if __name__ == "__main__":
    run(main)
