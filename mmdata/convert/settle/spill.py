"""Divides records over temporary files: what does not fit into memory is sorted and grouped a part at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from mmdata.convert.units.staging import SPILL
from mmdata.files import naming

BUFFERED_BYTES = 2**25
"""Bytes that wait in memory before they are written."""


class Spill:
    """Bytes in buckets, in the order in which they were added. A context manager; the files end with it.

    Args:
        folder: in which the files are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=SPILL, dir=folder))
        self._waiting: defaultdict[int, list[bytes]] = defaultdict(list)
        self._waiting_bytes = 0

    def add(self, bucket: int, data: bytes) -> None:
        """Add bytes to a bucket."""
        self._waiting[bucket].append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > BUFFERED_BYTES:
            self._write()

    def read(self, bucket: int) -> bytes:
        """All bytes of a bucket; none if nothing was added to it."""
        path = self._path(bucket)
        written = path.read_bytes() if path.exists() else b""
        return b"".join([written, *self._waiting.get(bucket, ())])

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Spill:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> None:
        for bucket, data in self._waiting.items():
            with naming(path := self._path(bucket)), path.open("ab") as file:
                file.write(b"".join(data))
        self._waiting.clear()
        self._waiting_bytes = 0

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:06d}"


def add_rows(spill: Spill, buckets: NDArray[np.int64], rows: NDArray[np.void]) -> None:
    """Add each row of an array to its bucket; `rows[i]` goes into `buckets[i]`."""
    if not len(rows):
        return
    order = np.argsort(buckets, kind="stable")
    numbers, begins = np.unique(buckets[order], return_index=True)
    for number, part in zip(numbers.tolist(), np.split(rows[order], begins[1:]), strict=True):
        spill.add(number, part.tobytes())
