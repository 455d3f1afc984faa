"""mmdata join: match tables with an index by key, once; no shard and no table is changed.

    mmdata join shards/laion scores.parquet
    mmdata join shards/laion "metadata/*.parquet" --key uid
    mmdata join shards/laion recaps.parquet --captions recaption --tokenizer clip
    mmdata join laion.yaml                         # what the config names of the tables and tars of data.join

A run reads no table: its columns are written here, in the order of the rows, beside the index in __mmdata__/joins, or
in the loader's cache if that folder cannot be written. Of shards all columns are written, of a config those it names,
and how many boxes each row has for data.targets.
A table that changed since, and a column that is not there, are refused until this command has run again.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mmdata.cli.paths import find_config, load_settings
from mmdata.errors import ConfigError, printable

if TYPE_CHECKING:
    from mmdata.config import DataConfig

_SETTING = re.compile(r"(data|model|train)\.[\w.]+=")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="CONFIG_OR_SHARDS", help="YAML file, run, or folder (URL) of shards")
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
    data = settings_of(
        options.place, options.words, key=options.key, captions=options.captions, tokenizer=options.tokenizer
    )
    for line in join_tables(data, all_columns=find_config(options.place) is None):
        print(printable(line), flush=True)
    return 0


def settings_of(
    place: str,
    words: Sequence[str],
    *,
    key: str | None = None,
    captions: str | None = None,
    tokenizer: str | None = None,
) -> DataConfig:
    """The settings that name the tables.

    Args:
        place: as for `load_settings`.
        words: settings, "section.key=value"; of shards also the files of the table.
        key, captions: of the table of shards: column of the keys, column of captions.
        tokenizer: counts them.

    Raises:
        ConfigError: no table is named, or a table beside a config.
    """
    overrides = [word for word in words if _SETTING.match(word)]
    tables = [word for word in words if not _SETTING.match(word)]
    is_config = find_config(place) is not None
    if is_config:
        data = load_settings(place, overrides + ([f"data.tokenizer={tokenizer}"] if tokenizer else [])).data
        if tables or key or captions:
            raise ConfigError(
                f"'{tables[0] if tables else '--key' if key else '--captions'}': the tables of a config are those of "
                "its data.join; leave it out, or give a folder of shards in place of the config"
            )
    else:
        from mmdata.tables.joined import JOINED

        given: dict[str, Any] = {"global_batch_size": 1}
        given |= {"tokenizer": tokenizer} if tokenizer else {}
        if tables:
            given["join"] = [{"table": tables} | ({"key": key} if key else {})]
        if captions:
            given["captions"] = {JOINED + captions: 1}
        data = load_settings(place, overrides, given).data
    if not data.join and data.targets is None:
        named = f"the config '{place}' has no data.join" if is_config else "none is given"
        raise ConfigError(f"no table to join: {named}; `mmdata join SHARDS TABLE` joins one")
    if captions and data.tokenizer is None:
        raise ConfigError("--captions: captions are counted by a tokenizer: give it, too (--tokenizer NAME_OR_FOLDER)")
    return data


def join_tables(data: DataConfig, *, all_columns: bool = False) -> Iterator[str]:
    """Write what a start with these settings reads of tables and joined tars; says what was done.

    Args:
        data: settings.
        all_columns: write every column of the tables, not those alone that the settings name.

    Raises:
        ConfigError: a table or a column is wrong, or no folder can be written.
        DataError: a file is damaged.
    """
    from mmdata.config.data import evaluation_data
    from mmdata.index.caption_lengths import counts_of
    from mmdata.loader.corpus import open_index
    from mmdata.loader.entries.fields import Fields
    from mmdata.plan import IndexRows
    from mmdata.plan.boxes import SETTING, box_counts
    from mmdata.plan.captions import caption_sources
    from mmdata.plan.from_config import equal_rows
    from mmdata.plan.weights import row_weights
    from mmdata.tables.captions import TableCaptions
    from mmdata.tables.joined import Joined
    from mmdata.tables.select import select_rows
    from mmdata.tables.selection import row_chunks
    from mmdata.text.tokenizer import load_tokenizer

    index = open_index(data)
    joined = Joined.from_config(data, index, writes=True)
    for part in joined.parts:
        yield f"{part}: {part.num_found:,} of {len(index):,} rows have a row in it; kept in {part.path}"
    for name in joined.types if all_columns else ():
        joined.column(name)
    sources = caption_sources(data, index, joined)
    tokenizer = load_tokenizer(data)
    counts = counts_of(tokenizer, data.caption_template) if tokenizer is not None else None
    for name, source in zip(sources.names, sources.sources, strict=True) if sources is not None else ():
        if isinstance(source, TableCaptions):
            if counts is not None:
                source.count(counts)
            yield f"{name}: {len(source):,} captions{', counted' if counts is not None else ''}"
    selection = select_rows(data, index, joined)
    row_weights(data, index, IndexRows(index, selection=selection), joined)
    equal_rows(data, index, joined)
    if (boxes := box_counts(data, index, joined)) is not None:
        yield f"{SETTING}: {int(boxes.sum(dtype=int)):,} boxes, up to {boxes.max(initial=0)} in a row"
    if data.fields:
        fields = Fields(data, index, joined)
        fields.check(partial(row_chunks, selection, len(index)))
        yield fields.name
    if data.val and (val := evaluation_data(data)).join:
        select_rows(val, index, joined)
