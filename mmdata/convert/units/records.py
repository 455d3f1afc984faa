"""What a unit of a conversion found of each of its rows: a table that is written once, and read when the units are put
together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.convert.row.examine import DIGEST_BYTES, Examined
from mmdata.errors import Reason
from mmdata.hashing import hash64
from mmdata.tars.texts import Loss


class Status(IntEnum):
    """What became of a row in its unit."""

    KEPT = 0  # its sample is in a fragment
    LEFT_OUT = 1  # for a reason that the row itself gives
    MERGED = 2  # its captions are another row's


_SCHEMA = pa.schema(
    [
        ("status", pa.int8()),
        ("part", pa.int8()),
        ("place", pa.binary()),
        ("path", pa.binary()),
        ("key", pa.binary()),
        ("reason", pa.string()),
        ("detail", pa.binary()),
        ("digest", pa.binary(DIGEST_BYTES)),
        ("said", pa.int64()),
        ("into", pa.int64()),
        ("losses", pa.binary()),
        ("seen", pa.binary()),
    ]
)
"""Text is stored as bytes: names of files, and what messages quote of them, may be no Unicode."""


class RecordWriter:
    """Collects the records of a unit."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}

    def __len__(self) -> int:
        return len(self._columns["status"])

    def add(
        self,
        examined: Examined,
        status: Status,
        *,
        part: int = 0,
        fault: tuple[Reason, str] | None = None,
        losses: dict[Loss, str] | None = None,
    ) -> None:
        """Add the next row.

        Args:
            examined: the row.
            status: what became of it.
            part: folder to which it belongs.
            fault: why it is left out.
            losses: of its sample.
        """
        sample = examined.sample
        values = {
            "status": int(status),
            "part": part,
            "place": _bytes(examined.place),
            "path": _bytes(examined.path),
            "key": _bytes(sample.key) if sample and status is Status.KEPT else None,
            "reason": str(fault[0]) if fault else None,
            "detail": _bytes(fault[1]) if fault else None,
            "digest": examined.digest or None,
            "said": said_hash(sample.captions, examined.label) if sample else 0,
            "into": examined.merged_into,
            "losses": _bytes(json.dumps(losses)) if losses else None,
            "seen": _bytes(examined.seen),
        }
        for name, column in self._columns.items():
            column.append(values[name])

    def to_arrow(self) -> memoryview:
        """The records as an Arrow file."""
        batch = pa.record_batch([pa.array(self._columns[field.name], field.type) for field in _SCHEMA], schema=_SCHEMA)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, _SCHEMA) as writer:
            writer.write_batch(batch)
        return memoryview(sink.getvalue())


class Records:
    """The records of a unit, read from its file.

    Args:
        path: of the file.
        start: number of the unit's first row.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.start = start
        with pa.memory_map(str(path)) as file:
            self._batch = pa.ipc.open_file(file).get_batch(0)

    def __len__(self) -> int:
        return self._batch.num_rows

    @cached_property
    def status(self) -> NDArray[np.int8]:
        """int8 (rows,)."""
        return self._numbers("status")

    @cached_property
    def part(self) -> NDArray[np.int8]:
        """int8 (rows,): the folder of each row."""
        return self._numbers("part")

    @cached_property
    def said(self) -> NDArray[np.int64]:
        """int64 (rows,): hashes of captions and label."""
        return self._numbers("said")

    @property
    def kept(self) -> NDArray[np.int64]:
        """Places, from 0, of the rows whose sample is in a fragment."""
        return np.flatnonzero(self.status == Status.KEPT)

    @property
    def merged(self) -> NDArray[np.int64]:
        """Places of the rows whose image is an earlier row's, whether or not they add captions to it."""
        return np.flatnonzero(~np.asarray(self._batch.column("into").is_null()))

    def digests(self, places: NDArray[np.int64]) -> bytes:
        """Digests of the images of rows that have one, one after the other."""
        return b"".join(self._batch.column("digest").take(pa.array(places)).to_pylist())

    def digest_of_each(self) -> list[bytes | None]:
        """Digests of the images of all rows; None where the image was not read."""
        return self._batch.column("digest").to_pylist()

    def text(self, name: str, place: int) -> str:
        """One cell of a column of text; "" for an empty one."""
        value = self._batch.column(name)[place].as_py()
        return value.decode("utf-8", "surrogatepass") if value else ""

    def texts(self, name: str) -> list[str | None]:
        """A column of text."""
        cells: list[bytes | None] = self._batch.column(name).to_pylist()
        return [None if cell is None else cell.decode("utf-8", "surrogatepass") for cell in cells]

    def fault(self, place: int) -> tuple[Reason, str] | None:
        """Why a row is left out; None if it is not."""
        reason = self._batch.column("reason")[place].as_py()
        return (Reason(reason), self.text("detail", place)) if reason else None

    def into(self, place: int) -> Any:
        """Number of the row that takes the captions of a merged row; None for another row."""
        return self._batch.column("into")[place].as_py()

    def losses(self) -> dict[int, dict[Loss, str]]:
        """What samples have lost, by place."""
        column = self._batch.column("losses")
        places = np.flatnonzero(~np.asarray(column.is_null())).tolist()
        return {
            place: {Loss(name): detail for name, detail in json.loads(self.text("losses", place)).items()}
            for place in places
        }

    def left_out(self) -> list[int]:
        """Places of the rows that have a reason of their own."""
        return np.flatnonzero(~np.asarray(self._batch.column("reason").is_null())).tolist()

    def _numbers(self, name: str) -> NDArray[Any]:
        return self._batch.column(name).to_numpy(zero_copy_only=False)


def said_hash(captions: Sequence[str], label: int | str | None) -> int:
    """A hash of captions and label: equal for rows that say the same."""
    return hash64("\0".join([*captions, str(label)]).encode())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
