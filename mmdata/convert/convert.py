"""Converts a raw corpus to shards. Every row is accounted for; equal input and settings give equal bytes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdata.convert.accounts import add_up
from mmdata.convert.chosen import ChosenRows
from mmdata.convert.conversion import Conversion, Track
from mmdata.convert.engines import Engine, threads
from mmdata.convert.given_rows import Rows
from mmdata.convert.given_source import open_rows
from mmdata.convert.output import Output, Run, are_complete, open_outputs
from mmdata.convert.recipe import ALL, ConvertConfig
from mmdata.convert.remote_tables import fetched
from mmdata.convert.rows import Source
from mmdata.convert.sources import open_source
from mmdata.convert.table_source import TableSource
from mmdata.errors import ConfigError, DamagedShard, DataError, excerpt
from mmdata.shards import Manifest
from mmdata.shards.folder import local_folder
from mmdata.shards.remote.fetch import display_name
from mmdata.shards.remote.urls import is_url
from mmdata.transform.text import Tokenizer

PARTS = ("train", "val")
"""Folders of a conversion that sets samples aside for validation."""


@dataclass(frozen=True)
class Report:
    """A published conversion.

    Attributes:
        manifest: of the output folder, or of its "train"; its accounts say what became of each row.
        was_complete: True if the folder held this conversion already and nothing was done.
        source: kind, files and columns of the source.
        val: manifest of "val"; None without `val_share`.
    """

    manifest: Manifest
    was_complete: bool
    source: dict[str, Any]
    val: Manifest | None = None

    @property
    def accounts(self) -> dict[str, Any]:
        """Rows in, written, merged, duplicate, filtered, quarantined, reasons; and the run they belong to."""
        return add_up([manifest.accounts or {} for manifest in (self.manifest, self.val) if manifest is not None])


def convert(
    source: str | os.PathLike[str] | Rows,
    out: str | os.PathLike[str],
    config: ConvertConfig | None = None,
    *,
    chosen: ChosenRows | None = None,
    engine: Engine | None = None,
    overwrite: bool = False,
    track: Track = lambda rows, what, total: rows,
) -> Report:
    """Convert a raw corpus into shards with an index, a ledger of the rows left out, and a manifest.

    Args:
        source: a folder of images, a table, a JSON document, a folder with the table that `config` names or with
            Parquet tables, or shards: a tar or a folder of tars. docs/convert.md lists them. Or the rows themselves:
            dicts such as {"image": "a.jpg", "caption": "a dog"}, from a generator, a list, or a function that returns
            them; see docs/convert.md#rows-of-a-program. A table or a folder of tables may be behind a URL.
        out: the output folder, which may hold nothing else. Its `__mmdata__/quarantine.jsonl` lists each row left out.
            With `val_share`, the conversion is two such folders, `out/train` and `out/val`.
        config: settings; None takes the defaults.
        chosen: of tars with an index, the rows to take; `mmdata.commands.chosen` makes it. None takes all.
        engine: examines rows; None takes a thread for each core.
        overwrite: replace another conversion in `out`.
        track: shows progress.

    Raises:
        DataError: an empty or unreadable corpus, too many unusable rows, an output folder with foreign files.
        ConfigError: no such column, or a tokenizer that does not load.
    """
    folder, config = Path(out), config or ConvertConfig()
    if not isinstance(source, (str, os.PathLike)):
        config = config.model_copy(update={"keep": config.keep or (ALL,)})
    elif not is_url(source):
        _check_places(local_folder(source), folder, config)
    with ExitStack() as stack:
        outputs = stack.enter_context(open_outputs(folder, PARTS if config.val_share else ()))
        corpus = _open_any(source, config, chosen, outputs[0], stack)
        tokenizer = Tokenizer.load(config.tokenizer, max_length=config.max_length) if config.tokenizer else None
        run = _describe(corpus, config, tokenizer)
        was_complete = are_complete(outputs, run, overwrite=overwrite)
        if not was_complete:
            Conversion(corpus, config, outputs, engine or threads(), track).run(tokenizer, run)
        manifests = [Manifest.read(output.folder) for output in outputs]
        return Report(manifests[0], was_complete, corpus.describe(), *manifests[1:])


def _check_places(path: Path, out: Path, config: ConvertConfig) -> None:
    """Raise DataError if there is no such source, and ConfigError if the output lies in it."""
    if not path.exists():
        raise DataError(f"source '{path}': no such file or folder")
    if path.is_dir() and config.table is None and out.resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"output '{out}' lies inside the source '{path}'; choose a folder beside it")


def _open_any(
    source: str | os.PathLike[str] | Rows,
    config: ConvertConfig,
    chosen: ChosenRows | None,
    output: Output,
    stack: ExitStack,
) -> Source:
    """The source; `stack` removes what lies on the disk of `output` for it, rows of a program or fetched tables."""
    if not isinstance(source, (str, os.PathLike)):
        if chosen is not None:
            raise ConfigError("select: rows of shards with an index can be selected, and not those of a program")
        return stack.enter_context(open_rows(source, config, output.folder))
    if not is_url(source):
        return _open(local_folder(source), config, chosen)
    url = os.fspath(source)
    corpus = _open(stack.enter_context(fetched(url, output.private, config)), config, chosen)
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


def _open(path: Path, config: ConvertConfig, chosen: ChosenRows | None) -> Source:
    try:
        return open_source(path, config, chosen)
    except DamagedShard as error:
        instead = f"or leave the tars as they are and index what can be read: `mmdata index {path} --skip-damaged`"
        raise DamagedShard(error.what, f"{error.remedy}; {instead}", error.sample) from error


def _describe(source: Source, config: ConvertConfig, tokenizer: Tokenizer | None) -> Run:
    # Only what decides the bytes: the source describes its table by hash, a fingerprint stands for the tokenizer
    # wherever it lies, and max_bad_share decides whether shards are published, not what is in them.
    settings = config.model_dump(mode="json", exclude={"table", "max_bad_share", "contact", "connections"})
    for name in ("hash_column", "ignore_opt_outs", "allow_private_addresses"):
        if not settings[name]:  # conversions made before there was this setting are the same
            del settings[name]
    if config.resize is None:
        del settings["quality"]  # has no effect without resize
    if config.check == "full":
        del settings["check"]  # earlier versions knew nothing else
    settings["tokenizer"] = tokenizer.fingerprint if tokenizer else None
    return {"source": source.describe(), "settings": settings}
