"""Opens what a conversion works with: the output folder, held; the corpus, of whatever kind; the tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from mmdata.config.convert import ALL, TEXT_LENGTH, ConvertConfig, load_recipe
from mmdata.convert.fetch.tables import fetched
from mmdata.convert.row.numbers import refuse_numbers
from mmdata.convert.settle.differences import Run
from mmdata.convert.settle.not_in import WrittenImages
from mmdata.convert.settle.output import Output, open_outputs
from mmdata.convert.settle.s3_output import open_s3_outputs
from mmdata.convert.sources.chosen import Choice, ChosenSource, read_choice
from mmdata.convert.sources.files import exists
from mmdata.convert.sources.given_rows import Rows, open_rows
from mmdata.convert.sources.open import open_source
from mmdata.convert.sources.rows import Source
from mmdata.convert.sources.table_source import TableSource
from mmdata.errors import ConfigError, DamagedShard, DataError, excerpt
from mmdata.recognize import PARTS
from mmdata.storage.folder import INNER, local_folder
from mmdata.storage.urls import display_name, is_url
from mmdata.text.tokenizer import Tokenizer

LIMITS = ("max_bad_share", "max_unfetched_share")
HOW_TO_ASK = ("contact", "connections_per_host")


Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One folder, or several."""
Settings = ConvertConfig | Mapping[str, Any] | None
"""Of a conversion; None takes the defaults."""


def checked(settings: Settings) -> ConvertConfig:
    """The settings.

    Raises:
        ConfigError: an unknown key, a value out of range.
    """
    return settings if isinstance(settings, ConvertConfig) else load_recipe(None, dict(settings or {}))


class Opened(NamedTuple):
    """What a conversion works with; `config` is that of the rows that a program gives.

    Attributes:
        run: what decides the bytes.
        written: images that are left out; None for none.
    """

    corpus: Source
    config: ConvertConfig
    tokenizer: Tokenizer | None
    outputs: list[Output]
    run: Run
    written: WrittenImages | None


def open_conversion(
    stack: ExitStack,
    source: str | os.PathLike[str] | Rows,
    out: str | os.PathLike[str],
    config: ConvertConfig,
    *,
    rows: Choice | None,
    not_in: Folders,
    shared: bool = False,
    overwrite: bool = False,
) -> Opened:
    """Hold the output folder, and open the corpus and the tokenizer that counts its captions.

    `stack` removes what lies on the disk of the output for them: rows of a program, or fetched tables.
    """
    if not isinstance(source, (str, os.PathLike)):
        config = config.model_copy(update={"keep": config.keep or (ALL,)})
    elif not is_url(source):
        check_places(local_folder(source), out, config)
    rows = rows if rows is None else read_choice(rows)
    folders = check_not_in(not_in, out, config)
    written = WrittenImages(folders) if folders else None
    parts = PARTS if config.val_share else ()
    if is_url(out):
        outputs = stack.enter_context(open_s3_outputs(os.fspath(out), config, parts))
    else:
        outputs = stack.enter_context(open_outputs(local_folder(out), parts, shared=shared, overwrite=overwrite))
    corpus = _open_any(source, config, outputs[0], stack)
    corpus = corpus if rows is None else ChosenSource(corpus, rows)
    tokenizer = Tokenizer.load(config.tokenizer, max_length=TEXT_LENGTH) if config.tokenizer else None
    run = _describe(corpus, config, tokenizer, written)
    return Opened(corpus, config, tokenizer, outputs, run, written)


def check_places(path: Path, out: str | os.PathLike[str], config: ConvertConfig) -> None:
    """Raise DataError if there is no such source, and ConfigError if the output lies in it."""
    if not exists(path):
        raise DataError(f"source '{path}': no such file or folder")
    if is_url(out) or not path.is_dir() or config.table is not None:
        return
    if local_folder(out).resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"output '{out}' lies inside the source '{path}'; choose a folder beside it")


def _open_any(
    source: str | os.PathLike[str] | Rows,
    config: ConvertConfig,
    output: Output,
    stack: ExitStack,
) -> Source:
    """Open a source; what is fetched or kept for it lies in the output."""
    if not isinstance(source, (str, os.PathLike)):
        return stack.enter_context(open_rows(source, config, output.folder))
    if not is_url(source):
        return _open_corpus(local_folder(source), config)
    url = os.fspath(source)
    corpus = _open_corpus(stack.enter_context(fetched(url, output.private, config)), config)
    _refuse_paths(url, corpus, config)
    return corpus


def _refuse_paths(url: str, source: Source, config: ConvertConfig) -> None:
    """Raise ConfigError if a table behind a URL names images by paths, which are not fetched with it."""
    named = source.first_paths() if isinstance(source, TableSource) and config.images == "." else []
    if named and not any("://" in path for path in named):
        raise ConfigError(
            f"'{display_name(url)}': its images are paths ({excerpt(named[0])}), and of a source behind a URL only the "
            "tables are fetched; copy the folder to this machine, or say with --images where the images are on it"
        )


def _open_corpus(path: Path, config: ConvertConfig) -> Source:
    try:
        source = open_source(path, config)
        refuse_numbers(source, path, config)
        return source
    except DamagedShard as error:
        instead = f"or leave the tars as they are and index what can be read: `mmdata index {path} --skip-damaged`"
        raise DamagedShard(error.what, f"{error.remedy}; {instead}", error.sample) from error


def check_not_in(not_in: Folders, out: str | os.PathLike[str], config: ConvertConfig) -> list[Path]:
    """The folders of `not_in`, of which none may have to do with the output.

    Raises:
        ConfigError: such a folder is behind a URL, or one of it and the output lies in the other.
    """
    given = [not_in] if isinstance(not_in, (str, os.PathLike)) else list(not_in)
    if given and config.keep_duplicates:
        raise ConfigError("not_in leaves out images that were written before, and keep_duplicates writes them again")
    folders: list[Path] = []
    for one in given:
        if not os.fspath(one):
            raise ConfigError("not_in '': the name of a folder is expected")
        if is_url(one):
            raise ConfigError(
                f"not_in '{one}': must be a folder of this machine; copy its {INNER}, which has no images"
            )
        folders.append(local_folder(one))
        if not is_url(out):
            _refuse_overlap(folders[-1].resolve(), local_folder(out).resolve(), os.fspath(one))
    return folders


def _refuse_overlap(folder: Path, out: Path, name: str) -> None:
    if folder == out:
        raise ConfigError(f"not_in '{name}': is the output as well; convert into a folder beside it")
    if folder.is_relative_to(out) or out.is_relative_to(folder):
        where = "inside the output" if folder.is_relative_to(out) else "around the output"
        raise ConfigError(f"not_in '{name}': lies {where} '{out}'; convert into a folder beside it")


def _describe(source: Source, config: ConvertConfig, tokenizer: Tokenizer | None, written: WrittenImages | None) -> Run:
    # Only what decides the bytes: the source describes its table by hash, a fingerprint stands for the tokenizer
    # wherever it lies, and the limits decide whether shards are published, not what is in them.
    settings = config.model_dump(mode="json", exclude={"table", *LIMITS, *HOW_TO_ASK})
    if config.resize is None and config.blur_boxes is None:
        del settings["quality"]  # has no effect without them
    settings["tokenizer"] = tokenizer.fingerprint if tokenizer else None
    not_in = {"not_in": written.names} if written else {}
    return {"source": {**source.describe(), **not_in}, "settings": settings}
