"""One folder of a conversion in the making: its shards, manifest, accounts and lists of rows."""

from __future__ import annotations

import json
import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mmdata.config.convert import ConvertConfig
from mmdata.convert.settle.accounts import Accounts
from mmdata.convert.settle.row_list import RowList
from mmdata.convert.settle.settled import Settled
from mmdata.convert.units.compose import Composed, Fragment
from mmdata.convert.units.records import texts_of
from mmdata.convert.units.staging import Staging
from mmdata.convert.units.unit import fragment_name
from mmdata.errors import Reason
from mmdata.files import end_file, naming, sync_folder
from mmdata.index.writer import ManifestWriter, shard_name
from mmdata.processes import usable_cores
from mmdata.storage.folder import INNER, QUARANTINE_NAME
from mmdata.tars.tar import END
from mmdata.tars.texts import Loss

compute: Any = pyarrow.compute  # pyarrow's functions have no types
logger = logging.getLogger("mmdata")


class OutputFolder:
    """A folder of shards in the making. A context manager; its manifest is written by `close`, last.

    Args:
        number: 0 for all samples or those for training, 1 for those for validation.
        folder: exists, with its `__mmdata__`, and holds no shard.
        config: the largest shard.
        staging: of the units.
        pool: makes shards.

    Attributes:
        accounts: of the rows that belong to the folder.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        config: ConvertConfig,
        staging: Staging,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._number = number
        self._folder = folder
        self._limits = config.shard_rows, config.shard_bytes
        self._staging = staging
        self._pool = pool
        self._ledger = folder / INNER / QUARANTINE_NAME
        self._stack = ExitStack()
        self._shard: list[Fragment] = []  # of the shard that is being filled
        self._rows, self._bytes = 0, len(END)  # of that shard
        self._num_shards = 0  # begun
        self._composing: deque[Future[Composed]] = deque()
        self._most_composing = 4 * usable_cores()

    def __enter__(self) -> OutputFolder:
        self._stack.enter_context(naming(self._ledger))  # closing may fail too: it writes the buffer
        self._file: BinaryIO = self._stack.enter_context(self._ledger.open("wb"))
        self.accounts = Accounts(self._file)
        self._row_list = self._stack.enter_context(RowList(self._folder / INNER))
        self._manifest = ManifestWriter(self._folder)
        return self

    def __exit__(self, *error: object) -> None:
        for future in self._composing:
            future.cancel()
        self._manifest.discard()
        self._stack.__exit__(*error)  # type: ignore[arg-type]  # the three that `with` gives

    def add(self, settled: Settled) -> None:
        """Add the rows of a unit that belong to this folder: count them, and put its samples into shards."""
        shards = np.full(settled.receipt.rows, -1, np.int32)
        is_written, unit = settled.is_written, self._staging.unit(settled.receipt.unit)
        # Places of the samples in the tars, in their order.
        kept = np.flatnonzero(settled.is_kept & (settled.parts == self._number))
        start = 0
        for number, tar in enumerate(settled.receipt.tars[self._number]):
            places = kept[start : start + tar.samples]
            start += tar.samples
            path = unit / fragment_name(self._number, number)
            fragment = Fragment(path, tar.sha256, tar.bytes, tar.samples, np.flatnonzero(is_written[places]))
            if len(fragment.rows):
                shards[places[is_written[places]]] = self._place(fragment)
        count_rows(self.accounts, settled, self._number)
        self._row_list.add(settled, self._number, shards)

    def close_ledger(self) -> None:
        """Put the list of the rows left out on disk."""
        end_file(self._file)

    def close(self, more: dict[str, object], tokenizer: str | None) -> None:
        """Finish the shards and, last, the manifest.

        Args:
            more: is kept in the manifest besides the accounts.
            tokenizer: fingerprint of the tokenizer that counted the captions.
        """
        self._begin_shard()
        self._collect(at_most=0)
        self._row_list.finish()
        sync_folder(self._folder / INNER)
        sync_folder(self._folder)
        self._manifest.close(tokenizer=tokenizer, accounts={**self.accounts.as_dict(), **more})

    def _place(self, fragment: Fragment) -> int:
        """Put a fragment into the shard that is being filled, or a new one if it does not fit; the shard's number."""
        shard_rows, shard_bytes = self._limits
        size = fragment.bytes
        fits = self._rows + len(fragment.rows) <= shard_rows and self._bytes + size <= shard_bytes
        if self._shard and not fits:
            self._begin_shard()
        self._shard.append(fragment)
        self._rows, self._bytes = self._rows + len(fragment.rows), self._bytes + size
        return self._num_shards

    def _begin_shard(self) -> None:
        """Make the shard that is being filled, and begin another one."""
        if not self._shard:
            return
        tar = self._folder / shard_name(self._num_shards)
        self._composing.append(self._pool.submit(self._staging.compose, self._shard, tar))
        self._shard, self._rows, self._bytes = [], 0, len(END)
        self._num_shards += 1
        self._collect(at_most=self._most_composing)

    def _collect(self, *, at_most: int) -> None:
        """Add shards to the manifest until no more than some are being made."""
        while len(self._composing) > at_most:
            self._manifest.add(*self._composing.popleft().result())


def count_rows(accounts: Accounts, settled: Settled, number: int) -> None:
    """Count the rows of a unit that belong to a folder, by its number."""
    ours, is_left_out, is_written = settled.parts == number, settled.is_left_out, settled.is_written
    accounts.written += int((ours & is_written).sum())
    accounts.merged += int((ours & ~is_written & ~is_left_out).sum())
    behind_url = compute.match_substring(settled.records.column("path"), "://").to_numpy(zero_copy_only=False)
    accounts.differing += int((ours & settled.differing & ~behind_url).sum())
    places = np.flatnonzero(ours & is_left_out)
    taken = pa.array(places)
    texts = [texts_of(column.take(taken)) for column in (*_columns(settled, "place", "path"), settled.detail)]
    reasons = settled.reason.take(taken).to_pylist()
    for row, place, path, detail, reason in zip(places.tolist(), *texts, reasons, strict=True):
        row = int(settled.number_of(row + settled.receipt.start))
        accounts.leave_out(row=row, place=place, path=path, reason=Reason(reason), detail=detail)
    has_losses = settled.records.column("losses").is_valid().to_numpy(zero_copy_only=False)
    taken = pa.array(np.flatnonzero(ours & is_written & has_losses))
    for place, losses in zip(*(texts_of(one.take(taken)) for one in _columns(settled, "place", "losses")), strict=True):
        found = {Loss(name): detail for name, detail in json.loads(losses).items()}
        for loss in accounts.losses.add(place, found):
            detail = accounts.losses.first[loss]
            logger.warning("%s (%s); the sample is written without it, and so are further ones", detail, loss)


def _columns(settled: Settled, *names: str) -> list[Any]:
    return [settled.records.column(name) for name in names]
