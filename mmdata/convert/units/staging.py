"""The units of a conversion in progress, on disk. A unit is there whole or not at all, however often it is made.

A unit is made in a folder of its own, and committed by renaming that: of several processes that make the same unit, the
first that commits wins, and all of them would have written the same samples. So a run that was killed leaves units that
the next one does not make again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from mmdata.convert.units.compose import Composed, Fragment, compose
from mmdata.errors import DataError
from mmdata.files import lock, naming, sync_folder, write_whole
from mmdata.storage.folder import INNER

UNITS_NAME = ".units"
RECORDS_NAME = "records.arrow"
RECEIPT_NAME = "receipt.json"
RUN_NAME = "run.json"
REFUSED_NAME = "refused.json"
_ATTEMPT = ".attempt-"
SPILL = ".spill-"
"""How the names of folders with temporary files begin."""


class Tar(NamedTuple):
    """What is known of a tar of a unit: its SHA-256, its size and number of samples."""

    sha256: str
    bytes: int
    samples: int


@dataclass(frozen=True)
class Receipt:
    """What a unit gives back, which is small whatever its tars hold.

    Attributes:
        unit: its number.
        start: number of its first row.
        rows: how many it has.
        quarantined: how many of them cannot be used.
        unfetched: how many of these have a URL that gave no image.
        made_of: what decided the unit besides its files; see `Job.made_of`.
        tars: of each folder of the output.
    """

    unit: int
    start: int
    rows: int
    quarantined: int
    unfetched: int = 0
    made_of: str = ""
    tars: list[list[Tar]] = field(default_factory=list[list[Tar]])

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Receipt:
        """The receipt that `asdict` has given as JSON."""
        tars = [[Tar(*tar) for tar in tars] for tars in content.pop("tars")]
        return cls(**content, tars=tars)


class MissingUnits(DataError):
    """Units that are to be put together were not made, or another process has removed them."""


class Staging:
    """The folder of the units.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, run: dict[str, Any]) -> None:
        """Make the folder for a run, unless it is there; `run` is what decides the units' content, as JSON."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(self.folder.parent, wait=True):  # of several parts that begin, one makes it
            if self.run() is not None:
                return
            _remove_at_once(self.folder)  # its removal was killed
            self.folder.mkdir()
            write_whole(self.folder / RUN_NAME, json.dumps(run, sort_keys=True).encode())
            sync_folder(self.folder.parent)

    def run(self) -> dict[str, Any] | None:
        """The run that the units belong to; None if there is none."""
        try:
            return json.loads((self.folder / RUN_NAME).read_bytes())
        except FileNotFoundError:
            return None

    def new_attempt(self, unit: int) -> Path:
        """A new folder in which to make a unit."""
        folder = Path(tempfile.mkdtemp(prefix=f"{_ATTEMPT}{unit:06d}-", dir=self.folder))
        (folder / INNER).mkdir()
        return folder

    def commit(self, attempt: Path, receipt: Receipt) -> Receipt:
        """Make a finished unit one of the run's, unless another attempt was first; the receipt of the first.

        The files in it must be on disk; their names need not be.
        """
        write_whole(attempt / RECEIPT_NAME, json.dumps(asdict(receipt)).encode())
        sync_folder(attempt / INNER)
        is_first = _rename_or_remove(attempt, self.unit(receipt.unit))
        sync_folder(self.folder)
        return receipt if is_first else self.receipt(receipt.unit) or receipt

    def unit(self, number: int) -> Path:
        """The folder of a unit."""
        return self.folder / f"{number:06d}"

    def fetch(self, units: Iterable[int]) -> None:
        """Bring the files of units to this disk, if they are elsewhere; those of their tars stay there."""

    def compose(self, fragments: Sequence[Fragment], tar: Path) -> Composed:
        """Make a shard of tars of units; see `mmdata.convert.units.compose.compose`."""
        return compose(fragments, tar)

    def receipt(self, number: int) -> Receipt | None:
        """The receipt of a unit; None if the unit is not there."""
        try:
            return Receipt.from_json(json.loads((self.unit(number) / RECEIPT_NAME).read_bytes()))
        except FileNotFoundError:
            return None

    def remove_unit(self, number: int) -> None:
        """Remove a unit, which is to be made again."""
        _remove_at_once(self.unit(number))

    def numbers(self) -> list[int]:
        """The numbers of the units that are there."""
        return [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]

    def remove_bad(self) -> None:
        """Remove the units with rows that cannot be used, which are made again."""
        for number in self.numbers():
            if (receipt := self.receipt(number)) and receipt.quarantined:
                self.remove_unit(number)

    def has_any(self) -> bool:
        """Whether there is a unit."""
        return bool(self.numbers())

    def refuse(self, shares: Sequence[float]) -> None:
        """Note that the units were not good enough to publish with these shares of rows that cannot be used."""
        write_whole(self.folder / REFUSED_NAME, json.dumps(shares).encode())

    @property
    def was_refused(self) -> bool:
        """Whether the units were not good enough to publish."""
        return (self.folder / REFUSED_NAME).exists()

    def retry(self, shares: Sequence[float]) -> None:
        """Begin again after `refuse`. If no more is allowed, what could not be used must have been repaired.

        Units with rows that cannot be used are then made again.
        """
        if not self.was_refused:
            return
        before: list[float] = json.loads((self.folder / REFUSED_NAME).read_bytes())
        allows_more = any(now > then for now, then in zip(shares, before, strict=True))
        if not allows_more:
            self.remove_bad()
        (self.folder / REFUSED_NAME).unlink()

    def remove_attempts(self) -> None:
        """Remove what killed processes have left. One that nobody waits for may be making a unit yet."""
        for path in self.folder.iterdir():
            if path.name.startswith((_ATTEMPT, SPILL)):
                _remove_at_once(path)

    def remove(self) -> None:
        """Remove all units. A kill leaves them without their run, and so for nobody."""
        if not self.folder.exists():
            return
        (self.folder / RUN_NAME).unlink(missing_ok=True)
        sync_folder(self.folder)
        _remove_at_once(self.folder)


def _remove_at_once(folder: Path) -> None:
    """Remove a folder, of which others see all files or none: who is about to rename it finds nothing.

    If it is gone, as an attempt that was committed just now, nothing is done.
    """
    gone = folder.with_name(f"{_ATTEMPT}gone-{uuid4().hex}")
    with suppress(FileNotFoundError):
        folder.rename(gone)
        sync_folder(gone.parent)  # else a power cut might keep the removals and not the new name
        shutil.rmtree(gone, ignore_errors=True)  # what stays is in nobody's way, and goes with the next removal


def _rename_or_remove(new: Path, place: Path) -> bool:
    """Put a folder in its place in one step, or remove it if another one is there; whether it is in its place."""
    try:
        with naming(new):
            os.rename(new, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(new)
        return False
    return True
