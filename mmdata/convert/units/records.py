"""What a unit of a conversion found of each of its rows: an Arrow table that is written once, with the unit.

Its columns are those of the published list of rows, as far as a unit knows them, and those that settling needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmdata.convert.row.examine import DIGEST_BYTES, Outcome
from mmdata.errors import Reason
from mmdata.hashing import hash64
from mmdata.tars.texts import Loss

_SCHEMA = pa.schema(
    [
        ("place", pa.binary()),
        ("path", pa.binary()),
        ("key", pa.binary()),  # null unless the row's sample is in a tar of the unit
        ("reason", pa.string()),  # null unless the row itself gives one
        ("detail", pa.binary()),
        ("digest", pa.binary(DIGEST_BYTES)),
        ("part", pa.int8()),  # folder of the row
        ("said", pa.int64()),  # hash of captions and label
        ("into", pa.int64()),  # number of the row that takes this row's captions
        ("losses", pa.binary()),  # of the sample, as JSON
        ("seen", pa.binary()),  # `Seen.to_json`
    ]
)
"""Text is stored as bytes: names of files, and what messages quote of them, may be no Unicode."""


class RecordWriter:
    """Collects the records of a unit."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}

    def __len__(self) -> int:
        return len(self._columns["place"])

    def add(
        self, outcome: Outcome, *, part: int, fault: tuple[Reason, str] | None, losses: dict[Loss, str] | None = None
    ) -> None:
        """Add the next row.

        Args:
            outcome: of the row.
            part: folder to which it belongs.
            fault: why it is left out.
            losses: of its sample.
        """
        sample = outcome.sample
        values = {
            "place": _bytes(outcome.place),
            "path": _bytes(outcome.path),
            "key": _bytes(sample.key) if sample and fault is None else None,
            "reason": str(fault[0]) if fault else None,
            "detail": _bytes(fault[1]) if fault else None,
            "digest": outcome.digest or None,
            "part": part,
            "said": _said_hash(sample.captions, outcome.label) if sample else 0,
            "into": outcome.merged_into,
            "losses": _bytes(json.dumps(losses)) if losses else None,
            "seen": _bytes(outcome.seen),
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


def read_records(path: Path) -> Any:
    """The records of a unit, as a record batch of Arrow."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0)


def texts_of(column: Any) -> list[str]:
    """The cells of a column of text; "" for null."""
    return [cell.decode("utf-8", "surrogatepass") if cell else "" for cell in column.to_pylist()]


def _said_hash(captions: Sequence[str], label: int | str | None) -> int:
    """A hash of captions and label: equal for rows that say the same."""
    return hash64("\0".join([*captions, str(label)]).encode())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
