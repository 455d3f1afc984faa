"""mmdata init: from images and captions to a config that trains.

SOURCE is whatever `mmdata convert` takes (a table, a folder of images, class folders, …), a WebDataset tar or a folder
of tars, or shards with an index. It is looked at and converted or indexed into shards/NAME. SOURCE itself stays as it
is; only captions of shards that `mmdata convert` made, or that lie behind URLs, are counted in SOURCE itself, unless
--shards is given. Then a config is written whose values fit the corpus and this machine; each has a comment that says
why:

    mmdata init photos/captions.csv
    mmdata train photos.yaml
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from mmdata.cli.paths import check_source
from mmdata.errors import printable
from mmdata.progress import progress_in_bytes, progress_in_rows


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("--out", metavar="CONFIG", help="YAML file; default: configs/NAME.yaml or NAME.yaml")
    parser.add_argument("--shards", metavar="OUT", help="folder for the shards or the index; default: shards/NAME")
    parser.add_argument("--tokenizer", help="folder or Hugging Face name; default: one is trained, or CLIP's is taken")
    parser.add_argument("--split", help="part of SOURCE, such as train, where it has several")
    parser.add_argument("--overwrite", action="store_true", help="replace the config, and another conversion in OUT")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done, and print the config")


def run(options: argparse.Namespace) -> int:
    """Look, prepare, write the config, and print the next command."""
    check_source(options.source)
    from mmdata.commands.init import Init, Request
    from mmdata.commands.starter import Machine

    request = Request(
        options.source,
        options.out,
        options.shards,
        options.tokenizer,
        overwrite=options.overwrite,
        dry_run=options.dry_run,
        split=options.split,
    )

    def say(line: str) -> None:
        print(printable(line, keep="\n"), flush=True)

    command = Init(request, Machine.here(), say, progress_in_rows, partial(progress_in_bytes, "index")).run()
    print("\nnext:", printable(command))
    if options.dry_run:
        print("nothing was written (--dry-run)", file=sys.stderr)
    return 0
