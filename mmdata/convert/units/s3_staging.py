"""The units of a conversion whose output is on S3, for machines that share no disk. A unit is there with its receipt.

A unit is made on the disk, its files go up into a folder that only this attempt writes, and it is committed by its
receipt, which is put under the condition that there is none. Whoever reads a unit goes by its receipt, which names the
attempt, so attempts that come too late, or never end, are not seen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from uuid import uuid4

from mmdata.convert.units.compose import Composed, Fragment, compose, take_whole
from mmdata.convert.units.staging import RECEIPT_NAME, RUN_NAME, MissingUnits, Receipt, Staging
from mmdata.files import whole_folder
from mmdata.hashing import file_sha256
from mmdata.processes import map_concurrently
from mmdata.storage.attempts import Absent
from mmdata.storage.folder import INNER
from mmdata.storage.s3 import S3Folder
from mmdata.storage.urls import S3_CONNECTIONS

THREADS = 8
"""Files that one process sends or fetches at once."""
MADE = "made/"
"""Folder, beside the units, of shards that were made of parts of tars."""


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
        shards: names in the bucket of the shards that `compose` has made, by the path that each was to have.
    """

    def __init__(self, folder: Path, bucket: S3Folder, digest: str) -> None:
        super().__init__(folder)
        self.bucket = bucket
        self.digest = digest
        self.units = f"units-{digest}"
        self.shards: dict[Path, str] = {}
        self._stored: dict[int, StoredUnit] | None = None  # that were there at first, and those that were fetched

    def begin(self, run: dict[str, Any]) -> None:
        """See `Staging.begin`. The file of the run is put under a condition by `S3Output`."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> dict[str, Any] | None:
        """See `Staging.run`."""
        found = self.bucket.get(RUN_NAME)
        return None if found is None else json.loads(found.data)

    def new_attempt(self, unit: int) -> Path:
        """See `Staging.new_attempt`."""
        self.folder.mkdir(parents=True, exist_ok=True)  # it may be another machine's name
        return super().new_attempt(unit)

    def commit(self, attempt: Path, receipt: Receipt) -> Receipt:
        """See `Staging.commit`; nothing of an attempt that was not the first stays there."""
        name = uuid4().hex
        paths = {path.relative_to(attempt).as_posix(): path for path in sorted(attempt.rglob("*")) if path.is_file()}
        files = {file: File(path.stat().st_size, file_sha256(path)) for file, path in paths.items()}
        for file, path in paths.items():
            self.bucket.put(self._name(receipt.unit, name, file), path, files[file].sha256)
        stored = StoredUnit(receipt, name, files)
        place = self._name(receipt.unit, RECEIPT_NAME)
        if not self.bucket.put_new(place, _to_json(stored)):
            first = self._read(place)
            if first is None or first.attempt != name:  # else the answer to an earlier request was lost
                self.bucket.remove(self._name(receipt.unit, name, file) for file in files)
            stored = first or stored
        shutil.rmtree(attempt)
        return stored.receipt

    def unit(self, number: int) -> Path:
        """See `Staging.unit`. The files are copies; tars are not among them."""
        self._fetch(number)
        return super().unit(number)

    def fetch(self, units: Iterable[int]) -> None:
        """See `Staging.fetch`."""
        for _ in map_concurrently(self._fetch, units, threads=THREADS, end=lambda: None):
            pass

    def compose(self, fragments: Sequence[Fragment], tar: Path) -> Composed:
        """See `Staging.compose`. Nothing of the shard is on this disk afterwards; `shards` says where it is."""
        if len(fragments) == 1 and fragments[0].is_whole:
            stored = self._known()[int(fragments[0].tar.parent.name)]
            self.shards[tar] = self._name(stored.receipt.unit, stored.attempt, fragments[0].tar.name)
            return take_whole(fragments[0], tar.name)
        tars = [fragment.tar for fragment in fragments]
        for path in tars:
            self._download(self._known()[int(path.parent.name)], path.name, path)
        made = compose(fragments, tar)
        self.shards[tar] = f"{self.units}/{MADE}{tar.parents[1].name}/{tar.name}"
        self.bucket.put(self.shards[tar], tar, made.entry.sha256)
        for path in (tar, *tars):
            path.unlink()
        return made

    def receipt(self, number: int) -> Receipt | None:
        """See `Staging.receipt`."""
        stored = self._known().get(number)
        return None if stored is None else stored.receipt

    def remove_unit(self, number: int) -> None:
        """See `Staging.remove_unit`."""
        self._remove(self._known().pop(number))
        shutil.rmtree(super().unit(number), ignore_errors=True)

    def numbers(self) -> list[int]:
        """See `Staging.numbers`."""
        return list(self._known())

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

    def remove_attempts(self) -> None:
        """See `Staging.remove_attempts`. Others may be making units, and what was left is removed with all units."""

    def remove(self) -> None:
        """See `Staging.remove`. The run goes last: until then nobody takes the folder for another."""
        remove_units(self.bucket, f"{self.units}/")
        self.bucket.remove([RUN_NAME])

    def _known(self) -> dict[int, StoredUnit]:
        if self._stored is None:
            self._stored = self._find_stored()
        return self._stored

    def _find_stored(self) -> dict[int, StoredUnit]:
        """The units that are there. Those of which files are missing, as a zombie may have left them, are removed."""
        receipts = [name for name in self.bucket.listing(f"{self.units}/") if name.endswith(f"/{RECEIPT_NAME}")]
        read = list(map_concurrently(self._read, receipts, threads=S3_CONNECTIONS, end=lambda: None))
        there = self.bucket.listing(f"{self.units}/")  # after the receipts, before which all files were there
        found: dict[int, StoredUnit] = {}
        for stored in filter(None, read):
            files = {self._name(stored.receipt.unit, stored.attempt, name): one for name, one in stored.files.items()}
            if all(name in there and there[name].bytes == file.bytes for name, file in files.items()):
                found[stored.receipt.unit] = stored
            else:
                self._remove(stored)
        return found

    def _remove(self, stored: StoredUnit) -> None:
        unit = stored.receipt.unit
        self.bucket.remove([self._name(unit, RECEIPT_NAME)])
        self.bucket.remove(self._name(unit, stored.attempt, name) for name in stored.files)

    def _read(self, name: str) -> StoredUnit | None:
        found = self.bucket.get(name)
        return None if found is None else _from_json(found.data)

    def _fetch(self, number: int) -> None:
        """Fetch the small files of a unit, which another process may have made just now."""
        if (folder := super().unit(number)).exists():
            return
        name = self._name(number, RECEIPT_NAME)
        stored = self._known().get(number) or self._read(name)
        if stored is None:
            raise units_are_gone(self.bucket.url_of(name))
        self._known()[number] = stored
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


def units_are_gone(url: str) -> MissingUnits:
    """The error of a unit that is removed while it is read."""
    return MissingUnits(
        f"'{url}': is gone: another process has published this conversion meanwhile, or started another; "
        "run this again, which says"
    )


def _to_json(stored: StoredUnit) -> bytes:
    return json.dumps({**stored._asdict(), "receipt": asdict(stored.receipt)}).encode()


def _from_json(data: bytes) -> StoredUnit:
    content: dict[str, Any] = json.loads(data)
    files = {name: File(*file) for name, file in content["files"].items()}
    return StoredUnit(Receipt.from_json(content["receipt"]), content["attempt"], files)
