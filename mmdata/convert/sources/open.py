"""Opens a source of rows: a table of paths and captions, a folder of images and caption files, or tars."""

from __future__ import annotations

from pathlib import Path

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.belonging import SourceKind, refuse_strangers
from mmdata.convert.sources.files import check_file, corpus_folder, exists, is_file, is_folder
from mmdata.convert.sources.find import open_annotated
from mmdata.convert.sources.folder import FolderSource, NeedsTable
from mmdata.convert.sources.layouts import METADATA, find_tables_of_folder
from mmdata.convert.sources.open_table import find_tables
from mmdata.convert.sources.rows import Source
from mmdata.convert.sources.table_source import TableSource
from mmdata.convert.sources.tars import PackedSource, is_packed
from mmdata.errors import ConfigError, DataError
from mmdata.recognize import refuse_unfinished


def open_source(path: Path, config: ConvertConfig) -> Source:
    """Open a corpus: a table, a folder or a .zip of images, a folder of Parquet files, a tar, or a folder of tars.

    Args:
        path: the folder, or the file.
        config: the settings about tables, columns and parts are used.

    Raises:
        DataError: no such path, an unreadable table, a damaged tar, an empty corpus, several parts and no `split`.
        ConfigError: no such column, or a setting that does not belong to this kind of source.
    """
    if not exists(path):
        raise DataError(f"source '{path}': no such file or folder")
    path = corpus_folder(path)
    if not is_folder(path):
        check_file(path, "source")
    refuse_unfinished(path)
    if config.table is not None and is_file(path) and not path.match(config.table):
        raise ConfigError(f"table '{config.table}': '{path}' is a file itself; give its folder, or leave --table out")
    if config.table is None and is_packed(path):
        refuse_strangers(path, config, SourceKind.TARS)
        if config.split is not None:
            raise ConfigError(f"split '{config.split}': '{path}' holds tars, all of one part; give those of the part")
        return PackedSource(path, config)
    if (annotated := open_annotated(path, config)) is not None:
        return annotated
    if is_folder(path) and config.table is None:
        if tables := find_tables_of_folder(path, config.split):
            folder = tables[0].parent if tables[0].name in METADATA else path
            return TableSource.open(folder, tables, config.model_copy(update={"split": None}))
        try:
            source = FolderSource(path, config)
        except NeedsTable as error:
            return _only_table(path, error, config)
        except (ConfigError, DataError):
            if (table := _table_with_parts(path, config)) is None:
                raise
            return table
        refuse_strangers(path, config, SourceKind.FOLDER)
        return source
    if is_folder(path):
        return TableSource.open(path, find_tables(path, config.table or ""), config)
    return TableSource.open(path.parent, [path], config)


def _only_table(path: Path, error: NeedsTable, config: ConvertConfig) -> TableSource:
    """The table in a folder whose images have no captions; raises `error` if the folder has several tables."""
    if len(error.tables) > 1:
        raise error
    (table,) = error.tables
    try:
        return TableSource.open(table.parent, [table], config.model_copy(update={"split": None}))
    except (ConfigError, DataError) as unusable:
        raise type(unusable)(f"source '{path}' was read by its only table: {unusable}") from unusable


def _table_with_parts(path: Path, config: ConvertConfig) -> TableSource | None:
    """The only table in a folder whose images have no captions, if `split` names none of the folder's own parts."""
    if config.split is None:
        return None
    try:
        FolderSource(path, config.model_copy(update={"split": None}))
    except NeedsTable as error:
        return TableSource.open(error.tables[0].parent, error.tables, config) if len(error.tables) == 1 else None
    except (ConfigError, DataError):
        return None
    return None
