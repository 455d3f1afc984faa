"""What a conversion would give: a sample of its rows is converted into a temporary folder, and the counts scaled."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mmdata.config.convert import ConvertConfig
from mmdata.convert.convert import convert
from mmdata.convert.opening import Folders, Settings, check_not_in, check_places, checked
from mmdata.convert.row.examine import Examiner, Outcome
from mmdata.convert.sampling import Estimate, SampledRows
from mmdata.convert.settle.accounts import NothingWritten, none_for
from mmdata.convert.sources.chosen import Choice
from mmdata.convert.sources.given_rows import Rows
from mmdata.convert.sources.rows import InputRow
from mmdata.convert.units.engines import Progress, threads
from mmdata.convert.units.staging import Receipt
from mmdata.convert.units.unit import Job, Unit, part_of
from mmdata.errors import Reason
from mmdata.processes import usable_cores
from mmdata.progress import SILENT, Track
from mmdata.storage.folder import find_ledger, local_folder
from mmdata.storage.urls import is_url

STATUSES = ("written", "merged", "duplicate", "filtered", "quarantined")


@dataclass(frozen=True)
class Preview:
    """What a conversion would give.

    Equal images under different names are seldom in one sample: more rows are duplicates than `statuses` has.

    Attributes:
        sample: the rows that were converted.
        statuses: rows of the corpus that will be "written", "merged", "duplicate", "filtered" and "quarantined".
        reasons: rows that are left out, by reason, those of the sample.
        examples: place and detail of the first row of the sample with each reason.
        shards, bytes: of the tars.
        cpu_s: seconds of CPU that examining a row took; the images of URLs are not fetched in them.
        workers: that can be at work at once on this machine, of those that were asked for.
        seconds: that the conversion takes; None where images are behind URLs, whose servers decide it.
        bad: rows that are quarantined, and not because their URL gives no image.
        unfetched: rows that are quarantined because their URL gives no image.
        config: settings of the conversion.
        nothing: what the conversion says if it can write none of the sample's rows, or, of a sample of all rows, if its
            `val_share` leaves none for training or validation; else "".
    """

    sample: SampledRows
    statuses: dict[str, Estimate]
    reasons: dict[Reason, Estimate]
    examples: dict[Reason, str]
    shards: int
    bytes: int
    cpu_s: float
    workers: int
    seconds: float | None
    bad: Estimate
    unfetched: Estimate
    config: ConvertConfig
    nothing: str = ""


def preview(
    source: str | os.PathLike[str] | Rows,
    config: Settings = None,
    *,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    rows: Choice | None = None,
    not_in: Folders = (),
    track: Track = SILENT,
) -> Preview:
    """Predict what `convert` would give, from about 1 % of the rows: at least 500, at most 2,000.

    The sample is converted into a temporary folder, which is removed. Images behind URLs are fetched, of the sample
    only and by the same rules.

    Args:
        source: as for `convert`. A generator is used up; give a list or a function.
        config: settings, as for `convert`.
        out: the output folder, which must not lie in the source; nothing is made there.
        workers: processes that would convert; None stands for one a core.
        rows, not_in: as for `convert`.
        track: shows progress.

    Raises:
        DataError: as `convert`, but not for rows that cannot be used.
        ConfigError: as `convert`.
    """
    config, cores = checked(config), usable_cores()
    if out is not None and isinstance(source, (str, os.PathLike)) and not is_url(source):
        check_places(local_folder(source), out, config)
    lenient: dict[str, Any] = {"max_bad_share": 1.0, "max_unfetched_share": 1.0}
    whole = config.model_copy(update={**lenient, "val_share": None, "train_tokenizer": None})
    sample, engine = SampledRows(config, rows, track), _Timed(min(workers or cores, cores), config.val_share)
    with tempfile.TemporaryDirectory(prefix="mmdata-preview-") as folder:
        known = check_not_in(not_in, folder if out is None else out, config)
        try:
            report = convert(source, folder, whole, rows=sample, not_in=known, engine=engine, track=track)
        except NothingWritten as error:
            found = _scaled(error.accounts, 0, sample, engine, config, _examples(Path(error.ledgers[0])))
            return replace(found, nothing=str(error))
        examples = _examples(find_ledger(Path(folder)))
        found = _scaled(report.accounts, report.manifest.bytes, sample, engine, config, examples)
        empty = {0, 1} - engine.parts if config.val_share and sample.is_whole else set[int]()
        return replace(found, nothing="".join(none_for(part, report.accounts["written"], config) for part in empty))


class _Timed:
    """An engine of threads, which measures the seconds of CPU that rows take, and notes the parts that get samples."""

    def __init__(self, workers: int, val_share: float | None) -> None:
        self.workers, self._val_share = workers, val_share
        self.parts: set[int] = set()
        self._seconds: list[float] = []

    @property
    def cpu_s(self) -> float:
        """Of all rows."""
        return sum(self._seconds)

    def __call__(self, job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        def examine(row: InputRow) -> Outcome:
            began = time.thread_time()
            outcome = job.examiner(row)
            self._seconds.append(time.thread_time() - began)
            self.parts |= {part_of(outcome.digest, self._val_share)} if outcome.sample else set()
            return outcome

        return threads(self.workers)(replace(job, examiner=cast(Examiner, examine)), units)


def _scaled(
    accounts: dict[str, Any],
    num_bytes: int,
    sample: SampledRows,
    engine: _Timed,
    config: ConvertConfig,
    examples: dict[Reason, str],
) -> Preview:
    """What the accounts and the bytes of the tars of a sample say about those of all rows."""
    times = sample.rows / sample.size
    unfetched = accounts.get("unfetched", 0)
    cpu_s = engine.cpu_s / sample.size
    size = round(num_bytes * times)
    val = config.val_share or 0.0
    return Preview(
        sample,
        {status: sample.count(accounts[status]) for status in STATUSES},
        {Reason(reason): sample.count(count) for reason, count in accounts["reasons"].items()},
        examples,
        sum(_shards(sample.rows, accounts["written"] * times * part, size * part, config) for part in (1 - val, val)),
        size,
        cpu_s,
        engine.workers,
        None if sample.urls else cpu_s * sample.rows / engine.workers,
        sample.count(accounts["quarantined"] - unfetched),
        sample.count(unfetched),
        config,
    )


def _shards(rows: int, samples: float, size: float, config: ConvertConfig) -> int:
    """About how many shards a folder has: tars of units share one while they fit."""
    if not samples:
        return 0
    units = math.ceil(rows / config.shard_rows)
    in_unit, unit_bytes = samples / units, size / units
    if unit_bytes > config.shard_bytes:
        return math.ceil(size / config.shard_bytes)
    together = min(config.shard_rows // in_unit, config.shard_bytes // unit_bytes)
    return math.ceil(units / max(1, together))


def _examples(ledger: Path) -> dict[Reason, str]:
    """Place and detail of the first row that was left out for each reason."""
    found: dict[Reason, str] = {}
    with ledger.open(encoding="utf-8") as file:
        for line in map(json.loads, file):
            found.setdefault(Reason(line["reason"]), f"{line['place']}: {line['detail']}")
    return found
