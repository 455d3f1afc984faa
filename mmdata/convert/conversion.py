"""One conversion, from rows to published folders: examine, number the labels, write, account for every row."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, BinaryIO

from mmdata.atomic import naming, sync_folder
from mmdata.convert.accounts import Accounts, Balance
from mmdata.convert.engines import Engine
from mmdata.convert.examine import Digester, Examined, Examiner, hash_of
from mmdata.convert.fetch import FetchStage, refuse_urls
from mmdata.convert.group import GroupedSource, Said, find_repeated, image_key, row_key
from mmdata.convert.output import TOKENIZER_NAME, Output, Run, publish_all
from mmdata.convert.recipe import ConvertConfig
from mmdata.convert.rows import Row, Source
from mmdata.convert.seen import SeenImages
from mmdata.errors import BadSample, DataError, Reason
from mmdata.hashing import in_share, least_share
from mmdata.shards import Sample, ShardWriter
from mmdata.shards.columns.labels import Labels
from mmdata.shards.folder import INNER, QUARANTINE_NAME
from mmdata.shards.texts import Loss
from mmdata.transform.text import Tokenizer, train_tokenizer

logger = logging.getLogger("mmdata")

Track = Callable[[Iterable[Row], str, int], Iterable[Row]]
"""Passes rows through and shows progress: (rows, name of the pass, upper bound of their number)."""


class Conversion:
    """One conversion.

    Args:
        source: the rows.
        config: settings.
        outputs: the folder for all samples, or two: for training and for validation.
        engine: examines rows.
        track: shows progress.
    """

    def __init__(
        self, source: Source, config: ConvertConfig, outputs: Sequence[Output], engine: Engine, track: Track
    ) -> None:
        self._source = source
        self._config = config
        self._outputs = outputs
        self._engine = engine
        self._track = track
        self._examiner = Examiner.from_config(source, config)
        self._labels = Labels(source.classes)
        self._seen = SeenImages()
        self._lowest_hash = 2**63 - 1  # of the images written
        self._merging: dict[int, _Outcome] = {}  # of rows that may take captions: not written, or written to part 1

    def run(self, tokenizer: Tokenizer | None, run: Run) -> None:
        """Convert all rows and publish the folders.

        Args:
            tokenizer: counts captions; None with `train_tokenizer`, or to count none.
            run: what decides the bytes, for the manifests.

        Raises:
            DataError: too many rows cannot be used, or a folder would be empty.
        """
        for output in self._outputs:
            (output.private / INNER).mkdir(parents=True)
        if self._config.train_tokenizer:
            tokenizer = self._train([output.private for output in self._outputs], self._config.train_tokenizer)
        with ExitStack() as stack:
            parts = [stack.enter_context(_Part(output.private, self._config, tokenizer)) for output in self._outputs]
            balance = Balance([part.accounts for part in parts], self._source)
            with tempfile.TemporaryFile(dir=self._outputs[0].private) as file:
                fetch = stack.enter_context(FetchStage.from_config(self._config))
                self._write_all(self._grouped(file), fetch, parts, balance)
            balance.check(self._config.max_bad_share)
            balance.settle()
            self._refuse_empty(parts)
            classes = {"classes": self._labels.names} if self._labels.names else {}
            for part in parts:
                part.close({**classes, "run": run})
        publish_all(self._outputs)

    def _train(self, folders: Sequence[Path], vocab_size: int) -> Tokenizer:
        """Train a tokenizer on the captions of the training samples; each folder gets a copy."""
        first = folders[0] / INNER / TOKENIZER_NAME
        train_tokenizer(self._training_captions(), first, vocab_size=vocab_size, max_length=self._config.max_length)
        for folder in folders:
            inner = folder / INNER / TOKENIZER_NAME
            if inner != first:
                shutil.copytree(first, inner)
            for path in inner.iterdir():
                _sync(path)
            sync_folder(inner)
            (folder / TOKENIZER_NAME).symlink_to(INNER + TOKENIZER_NAME)
        return Tokenizer.load(first, max_length=self._config.max_length)

    def _training_captions(self) -> Iterator[str]:
        """Captions of all rows with usable captions. Images are read only to know which rows are for validation."""
        for row, digest in self._digests("train tokenizer") if self._config.val_share else self._without_digests():
            if row.fault or self._part_of(digest):
                continue
            try:
                yield from self._examiner.fields(row).captions
            except BadSample:
                continue  # the examination of the row counts it

    def _without_digests(self) -> Iterator[tuple[Row, bytes]]:
        for row in self._track(self._source.rows(), "train tokenizer", self._source.rows_at_most):
            yield row, b""

    def _digests(self, what: str) -> Iterator[tuple[Row, bytes]]:
        """Each row with the digest of its image, empty if that cannot be read."""
        waiting: deque[Row] = deque()

        def rows() -> Iterator[Row]:
            for row in self._track(refuse_urls(self._source.rows(), what), what, self._source.rows_at_most):
                waiting.append(row)
                yield row

        for examined in self._engine(Digester(self._examiner), rows()):
            yield waiting.popleft(), examined.digest

    def _part_of(self, digest: bytes) -> int:
        """0 for training, 1 for validation. Equal images are in one part; an image that was not read is in part 0."""
        share = self._config.val_share
        return int(bool(share and digest and in_share(hash_of(digest), share)))

    def _refuse_empty(self, parts: Sequence[_Part]) -> None:
        for part, name in zip(parts, ("training", "validation"), strict=False):
            if len(parts) > 1 and not part.accounts.written:
                works = f", such as {least_share(self._lowest_hash):g}" if part is parts[1] else ""
                raise DataError(
                    f"val_share {self._config.val_share} of {sum(part.accounts.written for part in parts)} samples "
                    f"leaves none for {name}; nothing is published: choose another --val-share{works}"
                )

    def _grouped(self, file: IO[bytes]) -> Source:
        """The source with the rows of one image merged, if the settings ask for it and an image repeats.

        Args:
            file: temporary and empty, for their captions.
        """
        how = self._config.group_by or ("none" if self._config.keep_duplicates else "image")
        if how == "none" or (how == "image" and not self._source.may_repeat):
            return self._source
        keys = bytearray()
        if how == "content":
            for row, digest in self._digests("compare images"):
                keys += digest or row_key(row.number)
        else:
            for row in self._track(self._source.rows(), "compare images", self._source.rows_at_most):
                keys += image_key(row)
        repeated = find_repeated(keys)
        if not len(repeated):
            return self._source

        def track(rows: Iterable[Row]) -> Iterable[Row]:
            return self._track(rows, "group captions", self._source.rows_at_most)

        return GroupedSource(self._source, repeated, say=self._say, track=track, file=file)

    def _say(self, row: Row) -> Said:
        """Captions and label of a row, for merging.

        Raises:
            BadSample: they cannot be used.
        """
        if row.fault:
            raise BadSample(*row.fault)
        fields = self._examiner.fields(row)
        return fields.captions, fields.label

    def _write_all(self, source: Source, fetch: FetchStage, parts: Sequence[_Part], balance: Balance) -> None:
        is_grouped = source is not self._source
        rows = balance.count(self._track(fetch(source.rows()), "convert", source.rows_at_most))
        for number, examined in enumerate(self._engine(self._examiner, rows)):
            assert examined.row == number, f"engine gave row {examined.row} in place of {number}"
            outcome = self._write(examined, parts)
            if outcome.bad:
                balance.check(self._config.max_bad_share, rows_at_most=source.rows_at_most)
            if is_grouped and examined.merged_into is None and (outcome.bad or outcome.part):
                self._merging[number] = outcome

    def _write(self, examined: Examined, parts: Sequence[_Part]) -> _Outcome:
        """Write one row's sample, or count why there is none."""
        first = examined.merged_into
        taken = _Outcome() if first is None else self._merging.get(first, _Outcome())
        number = taken.part if first is not None else self._part_of(examined.digest)
        accounts = parts[number].accounts
        try:
            if fault := taken.bad or examined.fault:  # without a sample, the rows merged into it have its fault
                raise BadSample(*fault)
            if first is not None:
                accounts.merged += 1
                return _Outcome(number)
            sample, losses = self._accept(examined)
            parts[number].writer.write(sample)
        except BadSample as bad:
            accounts.leave_out(
                row=examined.row, place=examined.place, path=examined.path, reason=bad.reason, detail=bad.detail
            )
            # A row that would have been merged into a differing duplicate has captions of its own, lost as well.
            differs = isinstance(bad, _DifferingDuplicate) or (taken.differs and not examined.fault)
            accounts.differing += differs
            return _Outcome(number, (bad.reason, bad.detail), differs)
        self._seen.add(examined.digest, examined.row, sample.captions, examined.label)
        accounts.written += 1
        self._lowest_hash = min(self._lowest_hash, hash_of(examined.digest))
        for loss in accounts.losses.add(examined.place, losses):
            logger.warning("%s (%s); written without it, as all like it", accounts.losses.first[loss], loss)
        return _Outcome(number)

    def _accept(self, examined: Examined) -> tuple[Sample, dict[Loss, str]]:
        """The sample of an examined row, with its class number, and its losses.

        Raises:
            BadSample: the row is a duplicate, or its label cannot be numbered.
        """
        assert examined.sample is not None
        label, losses = None, examined.losses
        try:
            label = self._labels.number(examined.label)
        except BadSample as bad:
            if examined.is_table or not examined.sample.captions:
                raise
            losses = {**losses, Loss.LABEL_NAME: bad.detail}
        if not self._config.keep_duplicates:
            self._refuse_duplicate(examined)
        return replace(examined.sample, label=label), losses

    def _refuse_duplicate(self, examined: Examined) -> None:
        """Raise BadSample if the image was written before."""
        assert examined.sample is not None
        found = self._seen.find(examined.digest, examined.sample.captions, examined.label)
        if found is None:
            return
        detail = f"the image of row {found.row} again, byte for byte"
        if found.says_the_same:
            raise BadSample(Reason.DUPLICATE_IMAGE, detail)
        raise _DifferingDuplicate(Reason.DUPLICATE_IMAGE, f"{detail}, with other captions or another label")


@dataclass(frozen=True)
class _Outcome:
    """What became of a row.

    Attributes:
        part: number of the folder whose accounts have it.
        bad: why it was not written; None if it was.
        differs: whether it is a duplicate with other captions or another label than the written row.
    """

    part: int = 0
    bad: tuple[Reason, str] | None = None
    differs: bool = False


class _DifferingDuplicate(BadSample):
    """The image was written before, with other captions or another label."""


class _Part:
    """A folder of shards in the making, with its accounts. A context manager: an error leaves nothing to publish."""

    def __init__(self, private: Path, config: ConvertConfig, tokenizer: Tokenizer | None) -> None:
        self._ledger = private / INNER / QUARANTINE_NAME
        self._stack = ExitStack()
        self.writer = ShardWriter(
            private,
            shard_rows=config.shard_rows,
            shard_bytes=config.shard_bytes,
            count_tokens=tokenizer.count if tokenizer else None,
            tokenizer=tokenizer.fingerprint if tokenizer else None,
        )

    def __enter__(self) -> _Part:
        self._stack.enter_context(self.writer)
        self._stack.enter_context(naming(self._ledger))  # closing may fail too: it writes the buffer
        self._file: BinaryIO = self._stack.enter_context(self._ledger.open("wb"))
        self.accounts = Accounts(self._file)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]  # the three that `with` gives

    def close(self, more: dict[str, object]) -> None:
        """Finish the shards and the manifest, which gets the accounts and `more`."""
        with naming(self._ledger):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self.writer.close({**self.accounts.as_dict(), **more})


def _sync(path: Path) -> None:
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())
