"""The units of a conversion whose output is on S3, for machines that share no disk. A unit is there with its receipt.

A unit is made on the disk, its files go up into a folder that only this attempt writes, and it is committed by its
receipt, which is put under the condition that there is none. Whoever reads a unit goes by its receipt, which names the
attempt, so attempts that come too late, or never end, are not seen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from uuid import uuid4

from mmdata.convert.units.staging import OVERWRITES_NAME, RECEIPT_NAME, RUN_NAME, Receipt, Staging
from mmdata.errors import DataError
from mmdata.files import whole_folder
from mmdata.hashing import file_sha256
from mmdata.processes import map_concurrently
from mmdata.storage.attempts import Absent
from mmdata.storage.folder import INNER
from mmdata.storage.s3 import S3Folder
from mmdata.storage.urls import S3_CONNECTIONS

THREADS = 8
"""Files that one process sends or fetches at once."""
_PARTS = "parts-"
AHEAD = 64
"""Units whose small files are fetched together."""


class File(NamedTuple):
    """A file of a unit, as it went up."""

    bytes: int
    sha256: str


class StoredUnit(NamedTuple):
    """A committed unit: what its receipt says.

    Attributes:
        receipt: what the conversion needs.
        attempt: the folder of its files.
        files: by name.
    """

    receipt: Receipt
    attempt: str
    files: dict[str, File]


class S3Staging(Staging):
    """Units in a folder of a bucket. It can be sent to any process of any machine.

    Args:
        folder: on the disk, for the unit that is being made and for copies of small files; made if missing.
        bucket: the hidden folder of the output.
        digest: names the run.

    Attributes:
        bucket, digest: as given.
        units: folder of the units in it.
    """

    def __init__(self, folder: Path, bucket: S3Folder, digest: str) -> None:
        super().__init__(folder)
        self.bucket = bucket
        self.digest = digest
        self.units = f"units-{digest}"
        self._stored: dict[int, StoredUnit] = {}

    def begin(self, run: dict[str, Any], *, overwrites: bool = False) -> None:
        """See `Staging.begin`. The file of the run is put under a condition by `S3Output`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if overwrites and self.bucket.get(mark := f"{self.units}/{OVERWRITES_NAME}") is None:
            remove_units(self.bucket, f"{self.units}/")
            self.bucket.put_new(mark, b"")

    def run(self) -> dict[str, Any] | None:
        """See `Staging.run`."""
        found = self.bucket.get(RUN_NAME)
        return None if found is None else json.loads(found.data)

    def new_attempt(self, unit: int) -> Path:
        """See `Staging.new_attempt`."""
        self.folder.mkdir(parents=True, exist_ok=True)  # it may be another machine's name
        return super().new_attempt(unit)

    def commit(self, attempt: Path, receipt: Receipt) -> None:
        """See `Staging.commit`; nothing of an attempt that was not the first stays there."""
        name = uuid4().hex
        paths = {str(path.relative_to(attempt)): path for path in sorted(attempt.rglob("*")) if path.is_file()}
        files = {file: File(path.stat().st_size, file_sha256(path)) for file, path in paths.items()}
        for file, path in paths.items():
            self.bucket.put(self._name(receipt.unit, name, file), path, files[file].sha256)
        stored = StoredUnit(receipt, name, files)
        place = self._name(receipt.unit, RECEIPT_NAME)
        if not self.bucket.put_new(place, _to_json(stored)):
            first = self._read(receipt.unit)
            if first is None or first.attempt != name:  # else the answer to an earlier request was lost
                self.bucket.remove(self._name(receipt.unit, name, file) for file in files)
        shutil.rmtree(attempt)

    def unit(self, number: int) -> Path:
        """See `Staging.unit`. The files are copies; tars are there within `at_hand`."""
        folder = super().unit(number)
        if not folder.exists():
            wanted = [unit for unit in range(number, number + AHEAD) if unit in self._stored]
            absent = [unit for unit in wanted if not super(S3Staging, self).unit(unit).exists()]
            for _ in map_concurrently(self._fetch, absent, threads=THREADS, end=lambda: None):
                pass
        return folder

    @contextmanager
    def at_hand(self, tar: Path) -> Generator[None]:
        """See `Staging.at_hand`. A tar that is in no unit's folder is at hand."""
        if self.name_of(tar) is None:
            yield
            return
        stored = self._stored[int(tar.parent.name)]
        try:
            self._download(stored, tar.name, tar)
            yield
        finally:
            tar.unlink(missing_ok=True)

    def name_of(self, tar: Path) -> str | None:
        """Name in the bucket of a tar of a unit; None if it is in no unit's folder."""
        if tar.parent.parent != self.folder or not tar.parent.name.isdigit():
            return None
        stored = self._stored[int(tar.parent.name)]
        return self._name(stored.receipt.unit, stored.attempt, tar.name)

    def receipt(self, number: int) -> Receipt | None:
        """See `Staging.receipt`. A unit of which files are missing, as a zombie may have left it, is not there."""
        if number not in self._stored:
            if (stored := self._read(number)) is None:
                return None
            prefix = self._name(number, stored.attempt, "")
            there = {name.removeprefix(prefix): one.bytes for name, one in self.bucket.listing(prefix).items()}
            if any(there.get(name) != file.bytes for name, file in stored.files.items()):
                self._remove(stored, there)
                return None
            self._stored[number] = stored
        return self._stored[number].receipt

    def remove_unit(self, number: int) -> None:
        """See `Staging.remove_unit`."""
        stored = self._stored.pop(number)
        self._remove(stored, stored.files)
        shutil.rmtree(super().unit(number), ignore_errors=True)

    def receipts(self, units: int) -> list[Receipt | None]:
        """See `Staging.receipts`."""
        return list(map_concurrently(self.receipt, range(units), threads=S3_CONNECTIONS, end=lambda: None))

    def has_any(self) -> bool:
        """See `Staging.has_any`."""
        return any(name.endswith(f"/{RECEIPT_NAME}") for name in self.bucket.listing(f"{self.units}/"))

    def refuse(self, shares: Sequence[float]) -> None:
        """See `Staging.refuse`. Here the units do not stay."""
        self.remove()

    @property
    def was_refused(self) -> bool:
        """See `Staging.was_refused`."""
        return False

    def keep(self, name: str, value: Any) -> None:
        """See `Staging.keep`."""
        self.bucket.put_new(f"{self.units}/{name}", json.dumps(value).encode())

    def kept(self, name: str) -> Any:
        """See `Staging.kept`."""
        found = self.bucket.get(f"{self.units}/{name}")
        return None if found is None else json.loads(found.data)

    def note_parts(self, parts: int) -> None:
        """See `Staging.note_parts`."""
        self.bucket.put_new(f"{self.units}/{_PARTS}{parts}", b"")

    def parts(self) -> int | None:
        """See `Staging.parts`."""
        prefix = f"{self.units}/{_PARTS}"
        return max((int(name.removeprefix(prefix)) for name in self.bucket.listing(prefix)), default=None)

    def remove_attempts(self) -> None:
        """See `Staging.remove_attempts`. Others may be making units, and what was left is removed with all units."""

    def remove(self) -> None:
        """See `Staging.remove`. The run goes last: until then nobody takes the folder for another."""
        remove_units(self.bucket, f"{self.units}/")
        self.bucket.remove([RUN_NAME])

    def _remove(self, stored: StoredUnit, files: Iterable[str]) -> None:
        unit = stored.receipt.unit
        self.bucket.remove([self._name(unit, RECEIPT_NAME)])
        self.bucket.remove(self._name(unit, stored.attempt, name) for name in files)

    def _read(self, number: int) -> StoredUnit | None:
        found = self.bucket.get(self._name(number, RECEIPT_NAME))
        return None if found is None else _from_json(found.data)

    def _fetch(self, number: int) -> None:
        """Fetch the small files of a unit."""
        stored, folder = self._stored[number], super().unit(number)
        with whole_folder(folder) as part:
            (part / INNER).mkdir()
            for name in stored.files:
                if PurePosixPath(name).suffix != ".tar":
                    self._download(stored, name, part / name)

    def _download(self, stored: StoredUnit, file: str, path: Path) -> None:
        name = self._name(stored.receipt.unit, stored.attempt, file)
        try:
            self.bucket.download(name, path, *stored.files[file])
        except Absent as error:
            raise units_are_gone(self.bucket.url_of(name)) from error

    def _name(self, unit: int, *parts: str) -> str:
        return "/".join([self.units, f"{unit:06d}", *parts])


def remove_units(bucket: S3Folder, prefix: str) -> None:
    """Remove all files that begin so, receipts first, so that a kill leaves no unit without its files; the run last."""
    names = bucket.listing(prefix)
    receipts = [name for name in names if name.endswith(f"/{RECEIPT_NAME}")]
    bucket.remove(receipts)
    bucket.remove(names.keys() - {*receipts, RUN_NAME})
    bucket.remove([RUN_NAME] if RUN_NAME in names else [])


def units_are_gone(url: str) -> DataError:
    """The error of a unit that is removed while it is read."""
    return DataError(
        f"'{url}': is gone: another process has published this conversion meanwhile, or started another; "
        "run this again, which says"
    )


def _to_json(stored: StoredUnit) -> bytes:
    return json.dumps({**stored._asdict(), "receipt": asdict(stored.receipt)}).encode()


def _from_json(data: bytes) -> StoredUnit:
    content: dict[str, Any] = json.loads(data)
    files = {name: File(*file) for name, file in content["files"].items()}
    return StoredUnit(Receipt(**content["receipt"]), content["attempt"], files)
