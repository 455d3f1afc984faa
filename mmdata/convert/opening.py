"""Opens what a conversion works with: the output folder, held; the corpus, of whatever kind; the tokenizer."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from mmdata.config.convert import ALL, TEXT_LENGTH, ConvertConfig
from mmdata.convert.fetch.tables import fetched
from mmdata.convert.row.numbers import refuse_numbers
from mmdata.convert.settle.differences import Run
from mmdata.convert.settle.output import Output, open_outputs
from mmdata.convert.settle.s3_output import open_s3_outputs
from mmdata.convert.sources.chosen import ChosenRows
from mmdata.convert.sources.files import exists
from mmdata.convert.sources.given_rows import Rows, open_rows
from mmdata.convert.sources.open import open_source
from mmdata.convert.sources.rows import Source
from mmdata.convert.sources.table_source import TableSource
from mmdata.errors import ConfigError, DamagedShard, DataError, excerpt
from mmdata.storage.folder import local_folder
from mmdata.storage.urls import display_name, is_url
from mmdata.text.tokenizer import Tokenizer

LIMITS = ("max_bad_share", "max_unfetched_share")
HOW_TO_ASK = ("contact", "connections_per_host")
PARTS = ("train", "val")
"""Folders of a conversion that sets samples aside for validation."""


class Opened(NamedTuple):
    """What a conversion works with; `config` is that of the rows that a program gives.

    Attributes:
        run: what decides the bytes.
    """

    corpus: Source
    config: ConvertConfig
    tokenizer: Tokenizer | None
    outputs: list[Output]
    run: Run


def open_conversion(
    stack: ExitStack,
    source: str | os.PathLike[str] | Rows,
    out: str | os.PathLike[str],
    config: ConvertConfig,
    chosen: ChosenRows | None,
    *,
    shared: bool = False,
    overwrite: bool = False,
) -> Opened:
    """Hold the output folder, and open the corpus and the tokenizer that counts its captions.

    `stack` removes what lies on the disk of the output for them: rows of a program, or fetched tables.
    """
    if not isinstance(source, (str, os.PathLike)):
        config = config.model_copy(update={"keep": config.keep or (ALL,)})
    elif not is_url(source):
        _check_places(local_folder(source), out, config)
    parts = PARTS if config.val_share else ()
    if is_url(out):
        outputs = stack.enter_context(open_s3_outputs(os.fspath(out), config, parts))
    else:
        outputs = stack.enter_context(open_outputs(local_folder(out), parts, shared=shared, overwrite=overwrite))
    corpus = _open_any(source, config, chosen, outputs[0], stack)
    tokenizer = _load_tokenizer(config)
    run = _describe(corpus, config, tokenizer)
    return Opened(corpus, config, tokenizer, outputs, run)


def open_alone(
    stack: ExitStack,
    source: str | os.PathLike[str] | Rows,
    config: ConvertConfig,
    chosen: ChosenRows | None,
    folder: Path,
    *,
    out: str | os.PathLike[str] | None,
) -> tuple[Source, ConvertConfig, Tokenizer | None]:
    """Open the corpus and the tokenizer, and no output: what `open_conversion` opens, for a look at it.

    Args:
        stack: removes what lies in `folder` for the corpus: rows of a program, or fetched tables.
        source, config, chosen: of the conversion.
        folder: for temporary files.
        out: the output that is meant, to be refused where it lies in the source.
    """
    if not isinstance(source, (str, os.PathLike)):
        config = config.model_copy(update={"keep": config.keep or (ALL,)})
    elif not is_url(source) and out is not None:
        _check_places(local_folder(source), Path(out), config)
    corpus = _open_any(source, config, chosen, folder, stack)
    return corpus, config, _load_tokenizer(config)


def _load_tokenizer(config: ConvertConfig) -> Tokenizer | None:
    return Tokenizer.load(config.tokenizer, max_length=TEXT_LENGTH) if config.tokenizer else None


def _check_places(path: Path, out: str | os.PathLike[str], config: ConvertConfig) -> None:
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
    chosen: ChosenRows | None,
    place: Output | Path,
    stack: ExitStack,
) -> Source:
    """Open a source; what is fetched or kept for it lies in the output, or in a folder for temporary files."""
    folder, private = (place, place) if isinstance(place, Path) else (place.folder, place.private)
    if not isinstance(source, (str, os.PathLike)):
        if chosen is not None:
            raise ConfigError("select: rows of shards with an index can be selected, and not those of a program")
        return stack.enter_context(open_rows(source, config, folder))
    if not is_url(source):
        return _open_corpus(local_folder(source), config, chosen)
    url = os.fspath(source)
    corpus = _open_corpus(stack.enter_context(fetched(url, private, config)), config, chosen)
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


def _open_corpus(path: Path, config: ConvertConfig, chosen: ChosenRows | None) -> Source:
    try:
        source = open_source(path, config, chosen)
        refuse_numbers(source, path, config)
        return source
    except DamagedShard as error:
        instead = f"or leave the tars as they are and index what can be read: `mmdata index {path} --skip-damaged`"
        raise DamagedShard(error.what, f"{error.remedy}; {instead}", error.sample) from error


def _describe(source: Source, config: ConvertConfig, tokenizer: Tokenizer | None) -> Run:
    # Only what decides the bytes: the source describes its table by hash, a fingerprint stands for the tokenizer
    # wherever it lies, and the limits decide whether shards are published, not what is in them.
    settings = config.model_dump(mode="json", exclude={"table", *LIMITS, *HOW_TO_ASK})
    if config.resize is None and config.blur_boxes is None:
        del settings["quality"]  # has no effect without them
    settings["tokenizer"] = tokenizer.fingerprint if tokenizer else None
    return {"source": source.describe(), "settings": settings}
