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
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from mmdata.files import lock, naming, sync_folder, write_whole
from mmdata.storage.folder import INNER

UNITS_NAME = ".units"
RECORDS_NAME = "records.arrow"
FRAGMENTS_NAME = "fragments.json"
RECEIPT_NAME = "receipt.json"
RUN_NAME = "run.json"
NUM_ROWS_NAME = "num_rows.json"
CLASSES_NAME = "classes.json"
REFUSED_NAME = "refused.json"
OVERWRITES_NAME = "overwrites"
_ATTEMPT = ".attempt-"
SPILL = ".spill-"
"""How the names of folders with temporary files begin."""
_PARTS = "parts-"


@dataclass(frozen=True)
class Receipt:
    """What a unit gives back: less than 1 KB, whatever its shards hold.

    Attributes:
        unit: its number.
        start: number of its first row.
        rows: how many it has.
        quarantined: how many of them cannot be used.
        unfetched: how many of these have a URL that gave no image.
        made_of: what decided the unit besides its files; see `Job.made_of`.
    """

    unit: int
    start: int
    rows: int
    quarantined: int
    unfetched: int = 0
    made_of: str = ""


class Staging:
    """The folder of the units.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, run: dict[str, Any], *, overwrites: bool = False) -> None:
        """Make the folder for a run, unless it is there.

        Args:
            run: what decides the units' content, as JSON.
            overwrites: whether the run is one that begins anew: the units that a killed one has left are its own.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if overwrites and not (self.folder / OVERWRITES_NAME).exists():
                self.remove()
            if self.run() is not None:
                return
            _remove_at_once(self.folder)  # its removal was killed
            self.folder.mkdir()
            if overwrites:
                (self.folder / OVERWRITES_NAME).touch()
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

    def commit(self, attempt: Path, receipt: Receipt) -> None:
        """Make a finished unit one of the run's; nothing is done if another attempt was first.

        The files in it must be on disk; their names need not be.
        """
        write_whole(attempt / RECEIPT_NAME, json.dumps(asdict(receipt)).encode())
        sync_folder(attempt / INNER)
        _rename_or_remove(attempt, self.unit(receipt.unit))
        sync_folder(self.folder)

    def unit(self, number: int) -> Path:
        """The folder of a unit."""
        return self.folder / f"{number:06d}"

    def at_hand(self, tar: Path) -> AbstractContextManager[object]:
        """A context in which a tar in the folder of a unit can be read; the other files of a unit always can."""
        return nullcontext()

    def receipt(self, number: int) -> Receipt | None:
        """The receipt of a unit; None if the unit is not there."""
        try:
            return Receipt(**json.loads((self.unit(number) / RECEIPT_NAME).read_bytes()))
        except FileNotFoundError:
            return None

    def remove_unit(self, number: int) -> None:
        """Remove a unit, which is to be made again."""
        _remove_at_once(self.unit(number))

    def receipts(self, units: int) -> list[Receipt | None]:
        """What is known of each of so many units: None for one that was not made."""
        return [self.receipt(unit) for unit in range(units)]

    def has_any(self) -> bool:
        """Whether there is a unit."""
        return any(path.name.isdigit() for path in self.folder.iterdir())

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
        for path in self.folder.iterdir():
            is_bad = path.name.isdigit() and (receipt := self.receipt(int(path.name))) and receipt.quarantined
            if is_bad and not allows_more:
                _remove_at_once(path)
        (self.folder / REFUSED_NAME).unlink()

    @contextmanager
    def _alone(self) -> Generator[None, None, None]:
        """No other process of this run is in such a block."""
        with lock(self.folder.parent, wait=True):
            yield

    def keep(self, name: str, value: Any) -> None:
        """Keep what was found in reading the whole corpus, as JSON: NUM_ROWS_NAME, the number of its rows, or
        CLASSES_NAME, whether its labels are names, and the names of all classes. All of one run find the same."""
        with self._alone():
            write_whole(self.folder / name, json.dumps(value).encode())

    def kept(self, name: str) -> Any:
        """What `keep` was given; None if nobody has read the whole corpus yet."""
        try:
            return json.loads((self.folder / name).read_bytes())
        except FileNotFoundError:
            return None

    def note_parts(self, parts: int) -> None:
        """Keep the number of parts that the units are made in, for messages."""
        (self.folder / f"{_PARTS}{parts}").touch()

    def parts(self) -> int | None:
        """The largest number that was noted; None if units are not made in parts."""
        return max((int(path.name.removeprefix(_PARTS)) for path in self.folder.glob(f"{_PARTS}*")), default=None)

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


def _rename_or_remove(new: Path, place: Path) -> None:
    """Put a folder in its place in one step; remove it if another one is there."""
    try:
        with naming(new):
            os.rename(new, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(new)
