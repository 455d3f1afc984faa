"""One conversion, from rows to published folders: make units, decide over all of them, put shards together, account."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from importlib.metadata import version
from itertools import chain, islice, repeat
from typing import TypeVar

from mmdata.config.convert import TEXT_LENGTH
from mmdata.convert.cut import Units
from mmdata.convert.fetch import refuse_urls
from mmdata.convert.fetch.tables import SOURCE_NAME
from mmdata.convert.opening import Opened
from mmdata.convert.row.examine import Examiner
from mmdata.convert.settle.accounts import Accounts, Balance, CannotPublish, is_hopeless
from mmdata.convert.settle.equal_images import equal_digests
from mmdata.convert.settle.merges import Merges
from mmdata.convert.settle.output import TOKENIZER_NAME, publish_all
from mmdata.convert.settle.settled import Settler
from mmdata.convert.settle.shards import OutputFolder, count_rows, lowest_hash
from mmdata.convert.sources.chosen import ChosenSource, numbering
from mmdata.convert.sources.files import ChangedFile, changed_file, digest_of_zip
from mmdata.convert.sources.rows import InputRow, grouping, image_key, row_key
from mmdata.convert.sources.table_source import TableSource
from mmdata.convert.units.engines import Engine, Progress, in_order
from mmdata.convert.units.records import read_records, texts_of
from mmdata.convert.units.staging import CLASSES_NAME, NUM_ROWS_NAME, RECORDS_NAME, UNITS_NAME, Receipt, Staging
from mmdata.convert.units.unit import Job, Unit, part_of
from mmdata.errors import BadSample, DataError, printable
from mmdata.files import sync_tree
from mmdata.hashing import least_share
from mmdata.index.encode import Labels
from mmdata.processes import usable_cores
from mmdata.progress import Track
from mmdata.storage.folder import INNER, QUARANTINE_NAME
from mmdata.text.tokenizer import Tokenizer, train_tokenizer

T = TypeVar("T")
logger = logging.getLogger("mmdata")
LABELS_SEEN = 1000
"""First labels of a corpus that decide whether its labels are names or numbers."""
PARTS_NAMED = 20
"""Missing parts that a message names."""


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
            part: (k, n), the k-th of n parts of the units, from 1: units k - 1, n + k - 1, and so on. None makes all,
                and ends early where too many rows cannot be used.

        Returns:
            The receipts of the units of the part, in order.

        Raises:
            DataError: too many rows cannot be used.
            OSError: the disk is full or broken. The units that were made stay, for the next run.
        """
        place, parts = part or (1, 1)
        receipts: dict[int, Receipt] = {}
        job = self._job()
        if self._has_label_column:
            self._check_unchanged()
            self._staging.keep(CLASSES_NAME, [self._labels.are_names, self._labels.names])

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
            made = self._rows_made(job, units, receipts, is_whole=part is None)
            for _ in self._passing(made, "convert", self._rows_of_part(place, parts)):
                pass
        self._check_unchanged()
        self._staging.keep(NUM_ROWS_NAME, units.rows)
        return [receipts[unit] for unit in sorted(receipts)]

    def check_units(self) -> None:
        """Check that all units are there, and are made of the corpus as it is now.

        Raises:
            DataError: units are missing, or a file, or what decides which rows are merged, has changed since.
        """
        rows: int = self._staging.kept(NUM_ROWS_NAME) or 0
        receipts = self._all_receipts(rows)
        again = "run all parts again, which make only what has changed, and then --finish"
        for receipt in self._track(receipts, "look for changed files", len(receipts), noun="units"):
            if (changed := self._changed_file(receipt)) is not None:
                if changed.is_gone:
                    again = "put it back, or run all parts again, which leave its row out, and then --finish"
                    raise DataError(f"{changed}, and its row was converted; {again}")
                raise DataError(f"{changed} since its row was converted; {again}")
        if grouping(self._source, self._config) == "image":
            return  # the table alone decides the merges, and a changed table is another run
        made_of: list[str] = []
        job = self._job()

        def note(unit: Unit) -> bool:
            made_of.append(job.made_of(unit))
            return False

        with Merges(self._staging.folder, numbering(self._source)) as merges:
            self._find_merges(merges)
            units = Units(self._source, self._config.shard_rows, merges, note)
            for _ in units:
                pass
        if (units.rows, made_of) != (rows, [receipt.made_of for receipt in receipts]):
            raise DataError(f"images or captions have changed since rows that depend on them were converted; {again}")

    def finish(self) -> None:
        """Put the units together and publish the folders.

        Raises:
            DataError: units are missing, too many rows cannot be used, or a folder would be empty.
            OSError: the disk is full or broken. The units stay, for the next run.
        """
        self._check_unchanged()
        rows: int | None = self._staging.kept(NUM_ROWS_NAME)
        receipts = self._all_receipts(rows or 0)
        with ExitStack() as stack:
            parts = self._open_parts(stack)
            self._track.say("compare all rows")
            settler = stack.enter_context(self._settler(receipts))
            least = 2**63 - 1
            for receipt in self._track(receipts, "put shards together", len(receipts), noun="units"):
                settled = settler.settle(receipt)
                least = min(least, lowest_hash(settled)) if len(parts) > 1 else least
                for part in parts:
                    part.add(settled)
            accounts = [part.accounts for part in parts]
            has_not_in = self._opened.written is not None
            balance = Balance(accounts, rows or 0, self._source, has_not_in=has_not_in)
            for part in parts:
                part.close_ledger()
            balance.check(self._config)
            balance.settle()
            self._refuse_empty(parts, least)
            classes = {"classes": names} if (names := self._labels.names) else {}
            fingerprint = self._tokenizer.fingerprint if self._tokenizer else None
            self._track.say("end shards and manifest")
            for part in parts:
                part.close({**classes, "version": version("mmdata"), "run": self._opened.run}, fingerprint)
        publish_all(self._outputs)

    @property
    def _has_label_column(self) -> bool:
        """Whether labels are in tables alone, which the run names by hash: then all parts have the same classes.

        Labels in other files may change in a run, so each part reads them.
        """
        return isinstance(self._corpus, TableSource) and self._corpus.columns.label is not None

    @cached_property
    def _labels(self) -> Labels:
        """Numbers the classes of all rows, in the order in which they first come, whatever becomes of their images."""
        source, labels = self._corpus, Labels(self._corpus.classes)
        if self._has_label_column and (known := self._staging.kept(CLASSES_NAME)) is not None:
            return Labels.closed(*known)
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
            (folder / TOKENIZER_NAME).symlink_to(INNER + TOKENIZER_NAME)
        return Tokenizer.load(first, max_length=TEXT_LENGTH)

    def _training_captions(self) -> Iterator[str]:
        """Captions of all rows with usable captions. Images are read only to know which rows are for validation."""
        what, share = "train tokenizer", self._config.val_share
        rows = self._passing(self._source.rows(), what)

        def with_part(row: InputRow) -> tuple[InputRow, int]:
            return row, part_of(self._examiner.digest(row), share) if share else 0

        for row, part in in_order(usable_cores(), with_part, refuse_urls(rows, what) if share else rows):
            if row.fault or part:
                continue
            try:
                yield from self._examiner.fields(row).captions
            except BadSample:
                continue  # the examination of the row counts it

    def _find_merges(self, merges: Merges) -> None:
        """Find which rows of one image are merged."""
        source, how = self._source, grouping(self._source, self._config)
        if how == "none":
            return
        if how == "image":
            keys = (image_key(row) for row in self._passing(source.rows(), "compare images"))
        else:
            what, folder, most = "compare images", self._staging.folder, source.num_rows

            def rows_twice() -> Iterable[InputRow]:
                return self._passing(refuse_urls(source.rows(), what), what)

            digests = equal_digests(rows_twice, self._examiner, folder, rows_at_most=most)
            keys = (digest or row_key(number) for number, digest in enumerate(digests))

        def again() -> Iterable[InputRow]:
            return self._passing(source.rows(), "group captions")

        merges.find(keys, again, self._examiner.say, rows_at_most=source.num_rows)

    def _passing(self, rows: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
        """Rows, with their progress shown; `total` None stands for those of the source."""
        most = self._source.num_rows if total is None else total
        return self._track(rows, what, most)

    def _rows_of_part(self, place: int, parts: int) -> int:
        """Upper bound of the rows in the units of a part."""
        rows, size = self._source.num_rows, self._config.shard_rows
        return sum(min(size, rows - start) for start in range((place - 1) * size, rows, parts * size))

    def _has_changed(self, receipt: Receipt, made_of: str) -> bool:
        """Whether a unit was made of other files than those that are there now; then it is removed."""
        if (changed := self._changed_file(receipt)) is None and receipt.made_of == made_of:
            return False
        what = str(changed or "captions or labels of other rows have changed")
        rows = f"{receipt.start} to {receipt.start + receipt.rows - 1}"
        logger.warning("rows %s are converted again: %s", rows, printable(what))
        self._staging.remove_unit(receipt.unit)
        return True

    def _changed_file(self, receipt: Receipt) -> ChangedFile | None:
        records = read_records(self._staging.unit(receipt.unit) / RECORDS_NAME)
        look = partial(changed_file, self._source.root, now={})
        return next(filter(None, in_order(usable_cores(), look, filter(None, texts_of(records.column("seen"))))), None)

    def _rows_made(self, job: Job, units: Units, receipts: dict[int, Receipt], *, is_whole: bool) -> Iterator[None]:
        """Make units; yields once for each of their rows, and adds the receipts."""
        first: list[Receipt] = []  # of the units up to the first missing one
        left_out = [0, 0]  # in these: rows that are bad, and rows whose URL gave no image
        for event in self._engine(job, units):
            if isinstance(event, Progress):
                yield from repeat(None, event.rows)
                continue
            receipts[event.unit] = event
            self._track.leave_out(event.quarantined, event.rows)
            while is_whole and len(first) in receipts:
                first.append(receipts[len(first)])
                left_out[0] += first[-1].quarantined - first[-1].unfetched
                left_out[1] += first[-1].unfetched
                shares = zip(left_out, self._config.largest_shares, strict=True)
                if any(is_hopeless(count, share, self._source.num_rows) for count, share in shares):
                    self._explain(first)

    def _explain(self, receipts: list[Receipt]) -> None:
        """End a conversion that cannot succeed any more."""
        with ExitStack() as stack:
            ledgers = [output.private / INNER / QUARANTINE_NAME for output in self._outputs]
            accounts = [Accounts(stack.enter_context(ledger.open("wb"))) for ledger in ledgers]
            settler = stack.enter_context(self._settler(receipts))
            for receipt in receipts:
                settled = settler.settle(receipt)
                for number, one in enumerate(accounts):
                    count_rows(one, settled, number)
            balance = Balance(accounts, sum(receipt.rows for receipt in receipts), self._source)
            balance.check(self._config, rows_at_most=self._source.num_rows)

    def _all_receipts(self, rows: int) -> list[Receipt]:
        """The receipts of all units.

        Raises:
            DataError: units are missing.
        """
        size = self._config.shard_rows
        receipts = self._staging.receipts(-(-rows // size))
        found = [receipt for receipt in receipts if receipt is not None]
        missing = [unit for unit, receipt in enumerate(receipts) if receipt is None]
        if missing or not receipts:
            raise MissingUnits(len(receipts), missing, self._staging.parts())
        return found

    def _open_parts(self, stack: ExitStack) -> list[OutputFolder]:
        pool = stack.enter_context(ThreadPoolExecutor(thread_name_prefix="compose"))
        return [
            stack.enter_context(
                OutputFolder(
                    number, output.private, self._config, self._staging, pool, compose=output.composer(self._staging)
                )
            )
            for number, output in enumerate(self._outputs)
        ]

    def _settler(self, receipts: Sequence[Receipt]) -> Settler:
        return Settler(
            self._staging,
            receipts,
            numbering(self._source),
            self._opened.written,
            unit_rows=self._config.shard_rows,
            keep_duplicates=self._config.keep_duplicates,
        )

    def _refuse_empty(self, parts: Sequence[OutputFolder], lowest: int) -> None:
        for part, name in zip(parts, ("training", "validation"), strict=False):
            if len(parts) > 1 and not part.accounts.written:
                works = f", such as {least_share(lowest):g}" if part is parts[1] else ""
                raise CannotPublish(
                    f"val_share {self._config.val_share} of {sum(part.accounts.written for part in parts)} samples "
                    f"leaves none for {name}; nothing is published: choose another --val-share{works}"
                )


class MissingUnits(DataError):
    """Units of a conversion were not made.

    Args:
        units: how many there are; 0 if that is not known yet.
        missing: numbers of those that are missing, from 0.
        parts: in which they are made; None if there are none.
    """

    def __init__(self, units: int, missing: Sequence[int], parts: int | None) -> None:
        number = parts or "N"
        if not units:
            super().__init__(
                f"no part of this conversion has run to its end; run --part 1/{number} to {number}/{number} first, or "
                "all without --finish"
            )
            return
        remedy = "run the same command again, without --finish"
        if parts is not None:
            flags = [f"--part {part}/{parts}" for part in sorted({unit % parts + 1 for unit in missing})]
            remedy = f"run the same command with {_listed(flags)} in place of --finish, and then --finish again"
        super().__init__(f"{len(missing)} of {units} units are missing; {remedy}")


def _listed(flags: Sequence[str]) -> str:
    """All of them, or the first and how many more."""
    more = f" and {len(flags) - PARTS_NAMED} more" if len(flags) > PARTS_NAMED else ""
    return ", ".join(flags[:PARTS_NAMED]) + more
