"""mmdata verify: hash every shard, read it strictly, and compare it with its index and the manifest."""

from __future__ import annotations

from mmdata.cli import Parser, progress_in_bytes, run
from mmdata.errors import counted, printable
from mmdata.shards import Manifest, verify


def main() -> int:
    """Print a line for each problem and return 1, or a line that all is well and return 0."""
    parser = Parser("verify", __doc__)
    parser.add_argument("folder", help="folder with a manifest, as `mmdata convert` and `mmdata index` make it")
    options = parser.parse_args()

    with progress_in_bytes("verify") as progress:
        problems = verify(options.folder, progress)
    for problem in problems:
        print(problem)
    if problems:
        shards = len({problem.shard for problem in problems})
        print(printable(f"{counted(len(problems), 'problem')} in {counted(shards, 'shard')} of {options.folder}"))
        return 1
    manifest = Manifest.read(options.folder)
    sums = (manifest.num_shards, "shard"), (manifest.rows, "row"), (manifest.bytes, "byte")
    print(f"ok: {', '.join(counted(*each) for each in sums)}")
    return 0


if __name__ == "__main__":
    run(main)
