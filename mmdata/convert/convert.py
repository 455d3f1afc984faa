"""Converts a raw corpus to shards. Every row is accounted for; equal input and settings give equal bytes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmdata.atomic import naming, sync_folder
from mmdata.convert.accounts import Accounts
from mmdata.convert.engines import Engine, threads
from mmdata.convert.examine import Examined, Examiner, read_fields
from mmdata.convert.output import TOKENIZER_NAME, Output, Run, open_output
from mmdata.convert.recipe import ConvertConfig
from mmdata.convert.rows import Row, Source
from mmdata.convert.sources import open_source
from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.shards import Manifest, Sample, ShardWriter
from mmdata.shards.columns.labels import Labels
from mmdata.shards.folder import INNER, QUARANTINE_NAME, local_folder
from mmdata.shards.texts import Loss
from mmdata.transform.text import Tokenizer, train_tokenizer

logger = logging.getLogger("mmdata")

Track = Callable[[Iterable[Row], str, int], Iterable[Row]]
"""Passes rows through and shows progress: (rows, name of the pass, upper bound of their number)."""


@dataclass(frozen=True)
class Report:
    """A published conversion.

    Attributes:
        manifest: of the output folder; its accounts say what became of each row.
        was_complete: True if the folder held this conversion already and nothing was done.
        source: kind, files and columns of the source.
    """

    manifest: Manifest
    was_complete: bool
    source: dict[str, Any]

    @property
    def accounts(self) -> dict[str, Any]:
        """Rows in, written, duplicate, filtered, quarantined, reasons; and the run they belong to."""
        return self.manifest.accounts or {}


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: ConvertConfig | None = None,
    *,
    engine: Engine | None = None,
    overwrite: bool = False,
    track: Track = lambda rows, what, total: rows,
) -> Report:
    """Convert a raw corpus into shards with an index, a ledger of the rows left out, and a manifest.

    Args:
        source: a folder of images and caption files of the same stem, a table, a folder with the table that `config`
            names, or shards: a tar or a folder of tars.
        out: the output folder, which may hold nothing else. Its `__mmdata__/quarantine.jsonl` lists each row left out.
        config: settings; None takes the defaults.
        engine: examines rows; None takes a thread for each core.
        overwrite: replace another conversion in `out`.
        track: shows progress.

    Raises:
        DataError: an empty or unreadable corpus, too many unusable rows, an output folder with foreign files.
        ConfigError: no such column, or a tokenizer that does not load.
    """
    path, folder, config = local_folder(source), Path(out), config or ConvertConfig()
    if not path.exists():
        raise DataError(f"source '{path}': no such file or folder")
    if path.is_dir() and config.table is None and folder.resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"output '{folder}' lies inside the source '{path}'; choose a folder beside it")
    with open_output(folder) as output:
        corpus = open_source(path, config)
        tokenizer = Tokenizer.load(config.tokenizer, max_length=config.max_length) if config.tokenizer else None
        run = _describe(corpus, config, tokenizer)
        if output.is_complete(run, overwrite=overwrite):
            return Report(Manifest.read(folder), True, corpus.describe())
        _Conversion(corpus, config, output, track).run(engine or threads(), tokenizer, run)
        return Report(Manifest.read(folder), False, corpus.describe())


def _describe(source: Source, config: ConvertConfig, tokenizer: Tokenizer | None) -> Run:
    # Only what decides the bytes: the source describes its table by hash, a fingerprint stands for the tokenizer
    # wherever it lies, and max_bad_share decides whether shards are published, not what is in them.
    settings = config.model_dump(mode="json", exclude={"table", "max_bad_share"})
    if config.resize is None:
        del settings["quality"]  # has no effect without resize
    settings["tokenizer"] = tokenizer.fingerprint if tokenizer else None
    return {"source": source.describe(), "settings": settings}


class _Conversion:
    """One conversion, from rows to a published folder."""

    def __init__(self, source: Source, config: ConvertConfig, output: Output, track: Track) -> None:
        self._source = source
        self._config = config
        self._output = output
        self._track = track
        self._labels = Labels(source.classes)
        self._seen: dict[bytes, int] = {}

    def run(self, engine: Engine, tokenizer: Tokenizer | None, run: Run) -> None:
        private = self._output.private
        inner = private / INNER
        inner.mkdir(parents=True)
        if self._config.train_tokenizer:
            tokenizer = self._train(inner / TOKENIZER_NAME, self._config.train_tokenizer)
            (private / TOKENIZER_NAME).symlink_to(INNER + TOKENIZER_NAME)
        writer = ShardWriter(
            private,
            shard_rows=self._config.shard_rows,
            shard_bytes=self._config.shard_bytes,
            count_tokens=tokenizer.count if tokenizer else None,
            tokenizer=tokenizer.fingerprint if tokenizer else None,
        )
        with writer:
            quarantine = inner / QUARANTINE_NAME
            with naming(quarantine), quarantine.open("wb") as ledger:  # closing may fail too: it writes the buffer
                accounts = Accounts(ledger)
                self._write_all(writer, accounts, engine)
                ledger.flush()
                os.fsync(ledger.fileno())
            accounts.check(self._config.max_bad_share)
            accounts.settle()
            classes = {"classes": self._labels.names} if self._labels.names else {}
            writer.close({**accounts.as_dict(), **classes, "run": run})
        self._output.publish()

    def _train(self, folder: Path, vocab_size: int) -> Tokenizer:
        train_tokenizer(self._all_captions(), folder, vocab_size=vocab_size, max_length=self._config.max_length)
        for path in folder.iterdir():
            _sync(path)
        sync_folder(folder)
        return Tokenizer.load(folder, max_length=self._config.max_length)

    def _all_captions(self) -> Iterator[str]:
        """Captions of all rows with usable captions; images are not read."""
        for row in self._track(self._source.rows(), "train tokenizer", self._source.rows_at_most):
            if row.fault:
                continue
            try:
                yield from read_fields(row, self._source.root).captions
            except BadSample:
                continue  # the examination of the row counts it

    def _write_all(self, writer: ShardWriter, accounts: Accounts, engine: Engine) -> None:
        examiner = Examiner.from_config(self._source.root, self._config)
        rows = accounts.count(self._track(self._source.rows(), "convert", self._source.rows_at_most))
        for number, examined in enumerate(engine(examiner, rows)):
            assert examined.row == number, f"engine gave row {examined.row} in place of {number}"
            try:
                sample, losses = self._accept(examined)
                writer.write(sample)
            except BadSample as bad:
                accounts.leave_out(
                    row=number, place=examined.place, path=examined.path, reason=bad.reason, detail=bad.detail
                )
                accounts.check(self._config.max_bad_share, rows_at_most=self._source.rows_at_most)
            else:
                self._seen.setdefault(examined.digest, number)
                accounts.written += 1
                for loss in accounts.losses.add(examined.place, losses):
                    logger.warning("%s (%s); written without it, as all like it", accounts.losses.first[loss], loss)

    def _accept(self, examined: Examined) -> tuple[Sample, dict[Loss, str]]:
        """The sample of an examined row, with its class number, and its losses.

        Raises:
            BadSample: the row has a fault or is a duplicate.
        """
        if examined.fault:
            raise BadSample(*examined.fault)
        assert examined.sample is not None
        label, losses = None, examined.losses
        try:
            label = self._labels.number(examined.label)
        except BadSample as bad:
            if examined.is_table:
                raise
            losses = {**losses, Loss.LABEL_NAME: bad.detail}
        first = self._seen.get(examined.digest)
        if first is not None and not self._config.keep_duplicates:
            raise BadSample(Reason.DUPLICATE_IMAGE, f"the image of row {first} again, byte for byte")
        return replace(examined.sample, label=label), losses


def _sync(path: Path) -> None:
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())
