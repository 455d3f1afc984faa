"""mmdata init: from images and captions to a config that trains.

SOURCE is whatever `mmdata convert` takes (a table, a folder of images, class folders, …), a WebDataset tar or a folder
of tars, or shards with an index. It is converted or indexed into shards/NAME, and its captions are counted by a
tokenizer. SOURCE itself stays as it is; only of shards with an index the captions are counted in that index, unless
--shards is given. Then a config is written whose values fit the corpus and this machine; each has a comment that says
why:

    mmdata init photos/captions.csv
    mmdata train photos.yaml
"""

from __future__ import annotations

import argparse

from mmdata.cli.paths import check_source
from mmdata.errors import printable


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("--out", metavar="CONFIG", help="YAML file; default: configs/NAME.yaml or NAME.yaml")
    parser.add_argument("--shards", metavar="OUT", help="folder for the shards or the index; default: shards/NAME")
    parser.add_argument("--tokenizer", help="folder or Hugging Face name; default: one is trained, or CLIP's is taken")
    parser.add_argument("--split", help="part of SOURCE, such as train, where it has several")
    parser.add_argument("--overwrite", action="store_true", help="replace the config, and another conversion in OUT")


def run(options: argparse.Namespace) -> int:
    """Prepare the source, write the config, and print the next command."""
    check_source(options.source)
    from mmdata.cli.starting import Start
    from mmdata.inspect.starter import Machine

    def say(line: str) -> None:
        print(printable(line), flush=True)

    print("\nnext:", printable(Start(options, Machine.here(), say).run()))
    return 0
