"""Converts a raw corpus to shards. Every row is accounted for; equal input and settings give equal bytes."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mmdata.config.convert import ConvertConfig
from mmdata.convert.conversion import Conversion
from mmdata.convert.opening import Folders, Settings, checked, open_conversion
from mmdata.convert.settle.accounts import CannotPublish, add_up
from mmdata.convert.settle.output import are_complete
from mmdata.convert.sources.chosen import Choice
from mmdata.convert.sources.given_rows import Rows
from mmdata.convert.units.engines import Engine, local, only_made
from mmdata.convert.units.staging import MissingUnits
from mmdata.errors import ConfigError, DataError
from mmdata.index import Manifest
from mmdata.progress import SILENT, Track

logger = logging.getLogger("mmdata")


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
    config: Settings = None,
    *,
    rows: Choice | None = None,
    not_in: Folders = (),
    engine: Engine | None = None,
    overwrite: bool = False,
    finish: bool = False,
    track: Track = SILENT,
) -> Report:
    """Convert a raw corpus into shards with an index, a ledger of the rows left out, and a manifest.

    Args:
        source: a folder of images, a table, a JSON document, a folder with the table that `config` names or with
            Parquet tables, or shards: a tar or a folder of tars. docs/convert.md lists them. Or the rows themselves:
            dicts such as {"image": "a.jpg", "caption": "a dog"}, from a generator, a list, or a function that returns
            them; see docs/convert.md#rows-of-a-program. A table or a folder of tables may be behind a URL.
        out: the output folder, which may be s3://BUCKET/PREFIX, and may hold nothing else. Its
            `__mmdata__/quarantine.jsonl` lists each row left out. With `val_share`, the conversion is two such
            folders, `out/train` and `out/val`.
        config: settings, or a dict of them such as {"val_share": 0.1}; None takes the defaults.
        rows: the rows of the source to take, and no others: their numbers from 0; a file with a number on each line,
            or the quarantine.jsonl of another conversion, whose duplicates and filtered rows are not taken, or a list
            of such files; or those that a condition selects of tars with an index. None takes all.
        not_in: a folder of another conversion, or several, whose images are left out as duplicates.
        engine: reads the rows and makes tars of them; None takes a process for each core.
        overwrite: replace another conversion in `out`.
        finish: only put together what `convert_part` has made.
        track: shows progress.

    Raises:
        DataError: an empty or unreadable corpus, too many unusable rows, an output folder with foreign files.
        ConfigError: no such column, or a tokenizer that does not load.
        OSError: the disk is full or broken. The same call continues where this one ended.
    """
    config = checked(config)
    with ExitStack() as stack:
        opened = open_conversion(stack, source, out, config, rows=rows, not_in=not_in, overwrite=overwrite)
        config, outputs, run = opened.config, opened.outputs, opened.run
        was_complete = are_complete(outputs, run, overwrite=overwrite)
        if not was_complete:
            staging = outputs[0].staging(run, overwrite=overwrite)
            conversion = Conversion(opened, staging, only_made if finish else engine or local(), track)
            try:
                staging.retry(config.largest_shares)
                if overwrite:
                    staging.remove_bad()
                conversion.begin()
                conversion.finish(conversion.make_units())
            except CannotPublish:
                staging.refuse(config.largest_shares)  # the units stay, in case more is allowed
                raise
            except MissingUnits:
                # On S3, another process may have published this conversion meanwhile, and removed the units.
                if not (was_complete := are_complete(outputs, run, overwrite=overwrite)):
                    raise
        if was_complete:
            for output in outputs:
                if output.holds_unfinished():
                    logger.warning(
                        "output '%s': holds this conversion; the units of one that did not end are removed",
                        output.place,
                    )
                output.remove_private()  # of a run that was killed after it had published
        manifests = [output.read_manifest() for output in outputs]
        val = manifests[1] if len(manifests) > 1 else None
        report = Report(manifests[0], was_complete, opened.corpus.describe(), val)
        if was_complete:
            _check_published(report.accounts, outputs[0].place, config)
        return report


def _check_published(accounts: dict[str, Any], place: str, config: ConvertConfig) -> None:
    """Raise DataError if a conversion that was there has more unusable rows than this call allows."""
    unfetched = accounts.get("unfetched", 0)
    counts = (accounts["quarantined"] - unfetched, unfetched)
    names = ("max_bad_share", "max_unfetched_share")
    for count, name, share in zip(counts, names, config.largest_shares, strict=True):
        if count > share * accounts["rows"]:
            raise DataError(
                f"output '{place}': holds this conversion, published by a call that allowed more: {count} of "
                f"{accounts['rows']} rows are unusable, over {name}={share}; allow more, or remove the folder"
            )


@dataclass(frozen=True)
class PartReport:
    """A part of a conversion, not yet published.

    Attributes:
        units: number of units that the part has.
        rows: in them.
        quarantined: rows that cannot be used.
    """

    units: int
    rows: int
    quarantined: int


def convert_part(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: Settings = None,
    *,
    part: tuple[int, int],
    rows: Choice | None = None,
    not_in: Folders = (),
    engine: Engine | None = None,
    track: Track = SILENT,
) -> PartReport:
    """Do a part of a conversion; several processes, on machines that reach `out`, may each do one at the same time.

    `convert(…, finish=True)` with the same arguments publishes the whole once all parts are done. A part that is
    repeated makes only what is missing.

    Args:
        source, out, config, rows, not_in, engine, track: as for `convert`, the same for all parts.
        part: (k, n): the k-th of n parts, from 1.

    Raises:
        DataError, OSError: as `convert`.
        ConfigError: no such part, or `train_tokenizer`, for which each part would read all captions.
    """
    config = checked(config)
    if not 1 <= part[0] <= part[1]:
        raise ConfigError(f"part {part[0]} of {part[1]}: parts are numbered from 1 to their number")
    if config.train_tokenizer:
        raise ConfigError(
            "train_tokenizer: each part would read all captions; train it before, and give its folder as tokenizer"
        )
    with ExitStack() as stack:
        opened = open_conversion(stack, source, out, config, rows=rows, not_in=not_in, shared=True)
        if are_complete(opened.outputs, opened.run, overwrite=False):
            return PartReport(0, 0, 0)
        staging = opened.outputs[0].staging(opened.run, overwrite=False, shared=True)
        receipts = Conversion(opened, staging, engine or local(), track).make_units(part=part)
    made, quarantined = (sum(getattr(receipt, name) for receipt in receipts) for name in ("rows", "quarantined"))
    return PartReport(len(receipts), made, quarantined)
