"""mmdata repair: write what can be saved of damaged tars into new ones, with accounts; the damaged ones are only read.

    mmdata repair /data/cc12m/0007.tar --out /data/repaired
    mmdata repair /data/cc12m --out /data/repaired           # all tars of a folder; whole ones are copied
    mmdata repair "/data/{0000..0331}.tar" --out /data/repaired --check header

A sample is kept if an image and a caption or label are left of it, with its key, names and bytes unchanged. A tar
without damage is copied byte for byte. Images are decoded in full, because damage in them shows in no other way; where
a tar has an index, its hashes are compared, too. What is not kept, and why, is in OUT/__mmdata__/repaired.jsonl.
"""

from __future__ import annotations

import argparse
import shlex

from mmdata.cli import Parser, progress_in_bytes, run
from mmdata.commands.repair import CHECKS, image_check
from mmdata.errors import counted, printable
from mmdata.repair import repair_tars
from mmdata.repair.accounts import account_lines


def main() -> int:
    """Repair the tars; 1 if the accounts do not balance."""
    options = parse_arguments()
    with progress_in_bytes("repair") as progress:
        report = repair_tars(
            options.tars,
            options.out,
            check_image=image_check(options.check),
            check=options.check,
            keep_incomplete=options.keep_incomplete,
            progress=progress,
        )
    out = shlex.quote(options.out)
    for line in account_lines(report):
        print(printable(line))
    if report.balance:
        print(printable(f"{counted(len(report.written), 'tar')} in {options.out}; next: mmdata index {out}"))
        return 0
    print(printable(f"the accounts do not balance: do not use {options.out}, and report this"))
    return 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser("repair", __doc__)
    parser.add_argument("tars", nargs="+", metavar="TAR", help="tars, also .tar.gz; folders of tars; {0000..0331}.tar")
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="folder for the repaired tars: a new or empty one"
    )
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="decode",
        help="how images are looked at: decode (default), header, none",
    )
    parser.add_argument(
        "--keep-incomplete",
        action="store_true",
        help="keep samples without an image, or without caption and label, also in damaged tars: for tars of features",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
