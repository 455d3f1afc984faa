"""What `mmdata join` does: tables are matched with an index, and captions counted, before a run asks for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmdata.commands.parts import find_part
from mmdata.config import Config, DataConfig, load_config
from mmdata.config.strict_yaml import parse, with_overrides
from mmdata.errors import ConfigError
from mmdata.index.caption_lengths import counts_of
from mmdata.loader.corpus import open_index
from mmdata.loader.fields import Fields
from mmdata.plan.captions import caption_sources
from mmdata.plan.rows import starts_of
from mmdata.recognize import Kind, recognize
from mmdata.tables.captions import TableCaptions
from mmdata.tables.joined import JOINED, Joined
from mmdata.tables.select import select_rows
from mmdata.tables.selection import row_chunks
from mmdata.text.tokenizer import load_tokenizer

_SETTING = re.compile(r"(data|model|train)\.[\w.]+=")


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
        place: a config, the folder of a run, or a folder or URL of shards.
        words: settings, "section.key=value"; of shards also the files of the table.
        key, captions: of the table of shards: column of the keys, column of captions.
        tokenizer: counts them.

    Raises:
        ConfigError: no table is named, or a table beside a config.
    """
    overrides = [word for word in words if _SETTING.match(word)]
    tables = [word for word in words if not _SETTING.match(word)]
    is_shards = "://" in place or (Path(place).is_dir() and recognize(Path(place)) is not Kind.RUN)
    if not is_shards:
        path = Path(place) / "config.yaml" if Path(place).is_dir() else place
        data = load_config(path, overrides + ([f"data.tokenizer={tokenizer}"] if tokenizer else [])).data
        if tables or key or captions:
            raise ConfigError(
                f"'{tables[0] if tables else '--key' if key else '--captions'}': the tables of a config are those of "
                "its data.join; leave it out, or give a folder of shards in place of the config"
            )
    else:
        given: dict[str, Any] = {"shards": find_part(place) or place, "global_batch_size": 1}
        given |= {"tokenizer": tokenizer} if tokenizer else {}
        if tables:
            given["join"] = [{"table": tables} | ({"key": key} if key else {})]
        if captions:
            given["captions"] = {JOINED + captions: 1}
        content = with_overrides({"data": given}, overrides)
        data = parse(Config, content, origin=f"settings for shards '{place}'", overrides=overrides).data
    if not data.join:
        named = f"the config '{place}' has no data.join" if not is_shards else "none is given"
        raise ConfigError(f"no table to join: {named}; `mmdata join SHARDS TABLE` joins one")
    if captions and data.tokenizer is None:
        raise ConfigError("--captions: captions are counted by a tokenizer: give it, too (--tokenizer NAME_OR_FOLDER)")
    return data


def join_tables(data: DataConfig) -> Iterator[str]:
    """Join the tables of a section `data` again if they changed, and count the captions; says what was done.

    Raises:
        ConfigError: a table or a column is wrong, or no folder can be written.
        DataError: a file is damaged.
    """
    index = open_index(data)
    joined = Joined.from_config(data, index, replaces=True)
    for table in joined.tables:
        if table.path is None:
            raise ConfigError(
                f"{table.of}: neither the folder of the index nor the loader's cache can be written: set "
                "data.loading.cache_dir to a folder that can be"
            )
        found = int(np.count_nonzero(table.table_rows >= 0))
        yield f"{table}: {found:,} of {len(index):,} rows have a row in it; kept in {table.path}"
    sources = caption_sources(data, index, joined)
    tokenizer = load_tokenizer(data)
    counts = counts_of(tokenizer, data.caption_template) if tokenizer is not None else None
    for name, source in zip(sources.names, sources.sources, strict=True) if sources is not None else ():
        if isinstance(source, TableCaptions):
            if counts is not None:
                source.count(counts)
            yield f"{name}: {len(source):,} captions{', counted' if counts is not None else ''}"
    if data.fields:
        starts = starts_of(index, data.max_rows)
        selection = select_rows(data, index, starts, joined)
        yield Fields(data.fields, joined, partial(row_chunks, selection, int(starts[-1]))).name
