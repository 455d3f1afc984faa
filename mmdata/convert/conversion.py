"""One conversion, from rows to published folders: make units, decide over all of them, put shards together, account."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from itertools import chain, islice, repeat
from typing import TypeVar

from mmdata.config.convert import TEXT_LENGTH
from mmdata.convert.cut import Units
from mmdata.convert.fetch import refuse_urls
from mmdata.convert.fetch.tables import SOURCE_NAME
from mmdata.convert.opening import Opened
from mmdata.convert.row.examine import Examiner
from mmdata.convert.settle.accounts import CannotPublish, check_accounts
from mmdata.convert.settle.merges import Merges
from mmdata.convert.settle.output import TOKENIZER_NAME, publish_all
from mmdata.convert.settle.settled import Settler
from mmdata.convert.settle.shards import OutputFolder
from mmdata.convert.sources.chosen import ChosenSource, numbering
from mmdata.convert.sources.files import ChangedFile, changed_file, digest_of_zip
from mmdata.convert.sources.rows import InputRow, grouping
from mmdata.convert.units.engines import Engine, Progress, in_order
from mmdata.convert.units.records import read_records, texts_of
from mmdata.convert.units.staging import RECORDS_NAME, UNITS_NAME, Receipt, Staging
from mmdata.convert.units.unit import NOT_QUARANTINED, Job, Unit, part_of
from mmdata.errors import BadSample, DataError, printable
from mmdata.files import link_inside, sync_tree
from mmdata.index.encode import Labels
from mmdata.processes import usable_cores
from mmdata.progress import Track
from mmdata.storage.folder import INNER
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from mmdata.version import VERSION

T = TypeVar("T")
logger = logging.getLogger("mmdata")
EARLY = 1000
"""Rows that cannot be used below which no conversion ends early."""
LABELS_SEEN = 1000
"""First labels of a corpus that decide whether its labels are names or numbers."""


class Conversion:
    """One conversion.

    Args:
        opened: what it works with.
        staging: of the units; those that are there are not made again.
        engine: makes units.
        track: shows progress.
    """

    def __init__(self, opened: Opened, staging: Staging, engine: Engine, track: Track) -> None:
        self._opened = opened
        self._source, self._config, self._outputs = opened.corpus, opened.config, opened.outputs
        self._corpus = self._source.corpus if isinstance(self._source, ChosenSource) else self._source
        self._tokenizer = opened.tokenizer
        self._staging = staging
        self._engine = engine
        self._track = track
        self._examiner = Examiner.from_config(self._source, self._config)
        self._zip = digest_of_zip(self._source.root)

    def begin(self) -> None:
        """Make the hidden folders empty but for units, and train the tokenizer if the settings say so."""
        self._staging.remove_attempts()
        for output in self._outputs:
            output.clear_private(keep=(UNITS_NAME, SOURCE_NAME))
        if self._config.train_tokenizer:
            self._tokenizer = self._train(self._config.train_tokenizer)

    def make_units(self, *, part: tuple[int, int] | None = None) -> list[Receipt]:
        """Make the units that are missing, and again those of which a file has changed.

        Args:
            part: (k, n), the k-th of n parts of the units, from 1: units k - 1, n + k - 1, and so on. None makes all.

        Returns:
            The receipts of the units of the part, in order.

        Raises:
            OSError: the disk is full or broken. The units that were made stay, for the next run.
        """
        place, parts = part or (1, 1)
        receipts: dict[int, Receipt] = {}
        job = self._job()
        self._staging.fetch(number for number in self._staging.numbers() if number % parts == place - 1)

        def is_missing(unit: Unit) -> bool:
            if unit.number % parts != place - 1:
                return False
            receipt = self._staging.receipt(unit.number)
            if receipt is None or self._has_changed(receipt, job.made_of(unit)):
                return True
            receipts[unit.number] = receipt
            self._track.skip(receipt.rows)
            self._track.leave_out(receipt.quarantined, receipt.rows)
            return False

        with Merges(self._staging.folder, numbering(self._source)) as merges:
            self._find_merges(merges)
            units = Units(self._source, self._config.shard_rows, merges, is_missing)
            made = self._rows_made(job, units, receipts)
            for _ in self._passing(made, "convert", self._rows_of_part(place, parts)):
                pass
        self._check_unchanged()
        numbers = range(place - 1, -(-self._source.num_rows // self._config.shard_rows), parts)
        assert receipts.keys() == set(numbers), f"engine made no unit {sorted(set(numbers) - receipts.keys())}"
        return [receipts[unit] for unit in numbers]

    def finish(self, receipts: Sequence[Receipt]) -> None:
        """Put the units together and publish the folders.

        Args:
            receipts: of all units, as `make_units` has given them.

        Raises:
            DataError: too many rows cannot be used, or a folder would be empty.
            OSError: the disk is full or broken. The units stay, for the next run.
        """
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(thread_name_prefix="compose"))
            folders = [
                stack.enter_context(OutputFolder(number, output.private, self._config, self._staging, pool))
                for number, output in enumerate(self._outputs)
            ]
            self._track.say("compare all rows")
            self._staging.fetch(receipt.unit for receipt in receipts)
            number_of, written = numbering(self._source), self._opened.written
            settler = stack.enter_context(Settler(self._staging, receipts, number_of, written, self._config))
            for receipt in self._track(receipts, "put shards together", len(receipts), noun="units"):
                settled = settler.settle(receipt)
                for folder in folders:
                    folder.add(settled)
            for folder in folders:
                folder.close_ledger()
            accounts = [folder.accounts for folder in folders]
            check_accounts(accounts, self._config, self._source, has_not_in=written is not None)
            classes = {"classes": names} if (names := self._labels.names) else {}
            fingerprint = self._tokenizer.fingerprint if self._tokenizer else None
            self._track.say("end shards and manifest")
            for folder in folders:
                folder.close({**classes, "version": VERSION, "run": self._opened.run}, fingerprint)
        publish_all(self._outputs)

    @cached_property
    def _labels(self) -> Labels:
        """Numbers the classes of all rows, in the order in which they first come, whatever becomes of their images."""
        source, labels = self._corpus, Labels(self._corpus.classes)
        rows = source.rows_with_labels()
        if (first := next(rows, None)) is not None:
            passing = self._passing(chain([first], rows), "number classes", source.num_rows)
            found = (label for row in passing if (label := self._examiner.fields.label(row)) is not None)
            labels.decide(seen := list(islice(found, LABELS_SEEN)))
            for label in chain(seen, found):
                with suppress(BadSample):  # the unit of the row names its fault
                    labels.number(label)
        labels.close()
        return labels

    def _job(self) -> Job:
        source = self._source
        about = self._labels, source.has_captions, self._config
        return Job(source if source.holds_images else None, *about, self._examiner, self._tokenizer, self._staging)

    def _check_unchanged(self) -> None:
        """Raise DataError if a table, or the archive that images are in, has changed since it was opened."""
        self._source.check_unchanged()
        if digest_of_zip(self._source.root) != self._zip:
            raise DataError(f"zip '{self._source.root}': has changed since it was opened; run the conversion again")

    def _train(self, vocab_size: int) -> Tokenizer:
        """Train a tokenizer on the captions of the training samples; each folder gets a copy."""
        folders = [output.private for output in self._outputs]
        first = folders[0] / INNER / TOKENIZER_NAME
        train_tokenizer(self._training_captions(), first, vocab_size=vocab_size, max_length=TEXT_LENGTH)
        for folder in folders:
            inner = folder / INNER / TOKENIZER_NAME
            if inner != first:
                shutil.copytree(first, inner)
            sync_tree(inner)
            link_inside(folder / TOKENIZER_NAME, INNER + TOKENIZER_NAME)
        return Tokenizer.load(first, max_length=TEXT_LENGTH)

    def _training_captions(self) -> Iterator[str]:
        """Captions of all rows with usable captions. Images are read only to know which rows are for validation."""
        what, share = "train tokenizer", self._config.val_share
        rows = self._passing(self._source.rows(), what)

        def with_part(row: InputRow) -> tuple[InputRow, int]:
            return row, part_of(self._examiner.digest(row), share) if share else 0

        rows = refuse_urls(rows, "train_tokenizer with val_share") if share else rows
        for row, part in in_order(usable_cores(), with_part, rows):
            if row.fault or part:
                continue
            try:
                yield from self._examiner.fields(row).captions
            except BadSample:
                continue  # the examination of the row counts it

    def _find_merges(self, merges: Merges) -> None:
        """Find which rows of one image are merged."""
        source, how = self._source, grouping(self._source, self._config)
        by_content = how == "content"

        def rows(what: str) -> Iterable[InputRow]:
            passing = self._passing(source.rows(), what)
            return refuse_urls(passing, "group_by=content") if by_content else passing

        if how != "none":
            merges.find(rows, self._examiner, by_content=by_content, num_rows=source.num_rows)

    def _passing(self, rows: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
        """Rows, with their progress shown; `total` None stands for those of the source."""
        most = self._source.num_rows if total is None else total
        return self._track(rows, what, most)

    def _rows_of_part(self, place: int, parts: int) -> int:
        """Number of rows in the units of a part."""
        rows, size = self._source.num_rows, self._config.shard_rows
        return sum(min(size, rows - start) for start in range((place - 1) * size, rows, parts * size))

    def _has_changed(self, receipt: Receipt, made_of: str) -> bool:
        """Whether a unit was made of other files than those that are there now; then it is removed."""
        if (changed := self._changed_file(receipt)) is None and receipt.made_of == made_of:
            return False
        what = str(changed or "captions or labels of other rows have changed")
        rows = f"{receipt.start} to {receipt.start + receipt.rows - 1}"
        logger.warning("rows %s have to be converted again: %s", rows, printable(what))
        self._staging.remove_unit(receipt.unit)
        return True

    def _changed_file(self, receipt: Receipt) -> ChangedFile | None:
        records = read_records(self._staging.unit(receipt.unit) / RECORDS_NAME)
        look = partial(changed_file, self._source.root, now={})
        return next(filter(None, in_order(usable_cores(), look, filter(None, texts_of(records.column("seen"))))), None)

    def _rows_made(self, job: Job, units: Units, receipts: dict[int, Receipt]) -> Iterator[None]:
        """Make units; yields once for each of their rows, and adds the receipts."""
        made = bad = unfetched = 0
        for event in self._engine(job, units):
            if isinstance(event, Progress):
                yield from repeat(None, event.rows)
                continue
            receipts[event.unit] = event
            self._track.leave_out(event.quarantined, event.rows)
            made += event.rows
            bad += event.quarantined - event.unfetched
            unfetched += event.unfetched
            if made < self._source.num_rows:  # else `finish` says more
                self._refuse_early(event, max_bad_share=bad, max_unfetched_share=unfetched)

    def _refuse_early(self, receipt: Receipt, **counts: int) -> None:
        """Raise CannotPublish if, whatever the other rows are, more cannot be used than each setting allows."""
        for name, count in counts.items():
            if count >= EARLY and count > (share := getattr(self._config, name)) * self._source.num_rows:
                records = read_records(self._staging.unit(receipt.unit) / RECORDS_NAME)
                places, details = (texts_of(records.column(column)) for column in ("place", "detail"))
                rows = zip(records.column("reason").to_pylist(), places, details, strict=True)
                reason, place, detail = next(row for row in rows if row[0] and row[0] not in NOT_QUARANTINED)
                raise CannotPublish(
                    f"{count} rows are unusable so far, over {name}={share} of all {self._source.num_rows} rows; "
                    f"nothing is published. One of them: {reason} ({place}: {detail}). Try a part of the rows with "
                    f"--plan, or allow more with a larger {name}; where OUT is a folder, the units stay for that"
                )
