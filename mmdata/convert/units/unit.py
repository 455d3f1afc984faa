"""The unit of work of a conversion: a range of input rows in, tars with an index and a record of every row out.

Its content depends on the rows, the settings and the numbers of all classes alone, so that any process on any machine
may make it. What depends on other units, it leaves: which images are duplicates of earlier ones, and how full a shard
is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from mmdata.config.convert import ConvertConfig
from mmdata.convert.fetch import is_unfetched
from mmdata.convert.row.examine import Examiner, Outcome, hash_of
from mmdata.convert.sources.rows import NOT_QUARANTINED, InputRow, Merge, Source
from mmdata.convert.units.compose import finish_fragment
from mmdata.convert.units.records import RecordWriter
from mmdata.convert.units.staging import RECORDS_NAME, Receipt, Staging, Tar
from mmdata.errors import BadSample, Reason
from mmdata.files import write_whole
from mmdata.hashing import in_share
from mmdata.index.encode import Labels
from mmdata.tars.tar import END
from mmdata.tars.texts import Loss
from mmdata.tars.write import Sample, TarWriter, members_of, size_in_tar
from mmdata.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Unit:
    """A range of input rows, with what must be known of the rows before it.

    Attributes:
        number: place among the units, from 0.
        start, stop: numbers of its first row, and of the row behind its last one.
        rows: the rows themselves; None if they are read from the source where the unit is made.
        merges: of its rows, by number.
    """

    number: int
    start: int
    stop: int
    rows: list[InputRow] | None = None
    merges: dict[int, Merge] = field(default_factory=dict[int, Merge])

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Job:
    """What all units of a conversion have in common. It can be sent to any process.

    Attributes:
        source: of units that come without their rows; None if all come with them.
        labels: numbers the classes of the whole corpus; closed.
        has_captions: whether any row of the corpus may have a caption.
        config: settings.
        examiner: of the rows.
        tokenizer: counts captions; None counts none.
        staging: where the units are made.
    """

    source: Source | None
    labels: Labels
    has_captions: bool
    config: ConvertConfig
    examiner: Examiner
    tokenizer: Tokenizer | None
    staging: Staging

    def made_of(self, unit: Unit) -> str:
        """A hash of what decides a unit besides its own files, and may change while the description of the source does
        not: captions of the rows that are merged into its own, those of other files, and what all captions and all
        labels decide."""
        tokenizer = self.tokenizer.fingerprint if self.tokenizer else None
        merges = [[number, *merge] for number, merge in sorted(unit.merges.items())]
        given = [self.has_captions, tokenizer, merges, self._classes]
        return hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]

    @cached_property
    def _classes(self) -> str:
        """A hash of the names of all classes, in their order."""
        return hashlib.sha256(json.dumps([self.labels.are_names, self.labels.names]).encode()).hexdigest()

    def rows(self, unit: Unit) -> Iterator[InputRow]:
        """The rows of a unit, merged."""
        for row in self._rows(unit):
            merge = unit.merges.get(row.number)
            yield row if merge is None else merge(row)

    def _rows(self, unit: Unit) -> Iterable[InputRow]:
        if unit.rows is not None:
            return unit.rows
        assert self.source is not None
        return islice(self.source.rows(unit.start), len(unit))


class UnitWriter:
    """Makes a unit of the outcomes of its rows.

    Args:
        job: the conversion.
        unit: the unit.

    Attributes:
        unit: the unit.
    """

    def __init__(self, job: Job, unit: Unit) -> None:
        self.unit = unit
        self._job = job
        self._attempt = job.staging.new_attempt(unit.number)
        self._records = RecordWriter()
        self._parts = [_Fragments(self._attempt, part, job) for part in range(2 if job.config.val_share else 1)]
        self._quarantined = self._unfetched = 0

    @property
    def is_full(self) -> bool:
        """Whether all rows were added."""
        return len(self._records) == len(self.unit)

    def add(self, outcome: Outcome) -> None:
        """Add the next row.

        Args:
            outcome: of the row.

        Raises:
            OSError: the disk is full or broken.
        """
        expected = self.unit.start + len(self._records)
        assert outcome.row == expected, f"engine gave row {outcome.row} in place of {expected}"
        part = part_of(outcome.digest, self._job.config.val_share)
        if outcome.merged_into is not None:
            self._records.add(outcome, part=0, fault=outcome.fault)
            return
        fault, losses = outcome.fault, outcome.losses
        if fault is None:
            try:
                losses = {**losses, **self._write(outcome, part)}
            except BadSample as bad:
                fault = (bad.reason, bad.detail)
        if fault is not None and fault[0] not in NOT_QUARANTINED:
            self._quarantined += 1
            self._unfetched += is_unfetched(outcome.path, fault[0])
        self._records.add(outcome, part=part, fault=fault, losses=losses)

    def finish(self) -> Receipt:
        """Commit the unit; the receipt of the attempt that was first.

        Raises:
            DataError: the source has changed since it was opened.
        """
        assert self.is_full
        if self.unit.rows is None and self._job.source is not None:
            self._job.source.check_unchanged()
        for part in self._parts:
            part.finish()
        write_whole(self._attempt / RECORDS_NAME, self._records.to_arrow())
        unit, made_of = self.unit, self._job.made_of(self.unit)
        tars = [part.tars for part in self._parts]
        receipt = Receipt(unit.number, unit.start, len(unit), self._quarantined, self._unfetched, made_of, tars)
        return self._job.staging.commit(self._attempt, receipt)

    def discard(self) -> None:
        """Remove what was made."""
        for part in self._parts:
            part.discard()
        shutil.rmtree(self._attempt, ignore_errors=True)

    def _write(self, outcome: Outcome, part: int) -> dict[Loss, str]:
        """Write a sample; returns what it loses: a label that has no number, where nobody has named the label."""
        assert outcome.sample is not None
        number, losses = None, dict[Loss, str]()
        try:
            number = self._job.labels.number(outcome.label)
        except BadSample as bad:
            if bad.reason is Reason.FILE_CHANGED or outcome.needs_label or not outcome.sample.captions:
                raise
            losses[Loss.LABEL_NAME] = bad.detail
        self._parts[part].write(replace(outcome.sample, label=number))
        return losses


class _Fragments:
    """The tars of one part of a unit."""

    def __init__(self, folder: Path, part: int, job: Job) -> None:
        self._folder = folder
        self._part = part
        self._max_bytes = job.config.shard_bytes
        self._count_tokens = job.tokenizer.count if job.tokenizer else None
        self._open: TarWriter | None = None
        self._bytes = 0  # that the open tar may have
        self.tars: list[Tar] = []  # the finished ones

    def write(self, sample: Sample) -> None:
        """Add a sample."""
        members = members_of(sample)
        size = size_in_tar(members)
        if self._open and self._bytes + size + len(END) > self._max_bytes:
            self.finish()
        if self._open is None:
            self._open = TarWriter(self._folder / fragment_name(self._part, len(self.tars)))
            self._bytes = 0
        self._open.add(sample, members)
        self._bytes += size

    def finish(self) -> None:
        """End the tar that is open."""
        if self._open is not None:
            sha256 = finish_fragment(self._open, self._count_tokens)
            self.tars.append(Tar(sha256, self._open.bytes, len(self._open.rows)))
            self._open = None

    def discard(self) -> None:
        """Close the tar that is open."""
        if self._open is not None:
            self._open.discard()


def fragment_name(part: int, number: int) -> str:
    """File name of a tar of a unit."""
    return f"{part}-{number:06d}.tar"


def part_of(digest: bytes, val_share: float | None) -> int:
    """0 for training, 1 for validation. Equal images are in one part; an image that was not read is in part 0."""
    return int(bool(val_share and digest and in_share(hash_of(digest), val_share)))
