"""mmdata join: match tables with an index by key, once; no shard and no table is changed.

    mmdata join shards/laion scores.parquet
    mmdata join shards/laion "metadata/*.parquet" --key uid
    mmdata join shards/laion recaps.parquet --captions recaption --tokenizer clip
    mmdata join laion.yaml                         # what the config names of the tables and tars of data.join

A run reads no table: its columns are written here, in the order of the rows, beside the index in __mmdata__/joins, or
in the loader's cache if that folder cannot be written. Of shards all columns are written, of a config those it names.
A table that changed since, and a column that is not there, are refused until this command has run again.
"""

from __future__ import annotations

import argparse

from mmdata.cli.paths import check_config_or_shards
from mmdata.errors import printable


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="CONFIG_OR_SHARDS", help="YAML file, or a folder (URL) of shards")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TABLE|section.key=value",
        help="of shards: files or patterns of one table (.parquet, .csv, .tsv); and settings",
    )
    parser.add_argument("--key", metavar="COLUMN", help="column of the keys; default: key, or uid")
    parser.add_argument("--captions", metavar="COLUMN", help="column of captions, to be counted by --tokenizer")
    parser.add_argument("--tokenizer", help="clip, a folder, or a Hugging Face name")


def run(options: argparse.Namespace) -> int:
    """Join the tables, and say what was found."""
    check_config_or_shards(options.place)
    from mmdata.commands.join import is_config, join_tables, settings_of

    data = settings_of(
        options.place, options.words, key=options.key, captions=options.captions, tokenizer=options.tokenizer
    )
    for line in join_tables(data, all_columns=not is_config(options.place)):
        print(printable(line), flush=True)
    return 0
