"""A published conversion, as a retry reads it: its manifests, and its list of all rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mmdata.convert.settle.accounts import add_up
from mmdata.convert.settle.differences import Run
from mmdata.convert.settle.row_list import ROWS_FOLDER
from mmdata.errors import DataError
from mmdata.index.manifest import Manifest
from mmdata.storage.folder import INNER, has_manifest


@dataclass(frozen=True)
class Earlier:
    """A conversion that was published into one folder, or into `train` and `val`.

    Attributes:
        folder: as it was given.
        parts: the folders with a manifest.
        accounts: of both parts, as one.
        tokenizer: fingerprint of the tokenizer that counted the captions.
        has_labels: whether a sample has a label.
        digest: equal for equal folders, wherever they lie.
    """

    folder: Path
    parts: tuple[Path, ...]
    accounts: dict[str, Any]
    tokenizer: str | None
    has_labels: bool
    digest: str

    @classmethod
    def read(cls, folder: Path) -> Earlier:
        """Read the manifests of a conversion.

        Raises:
            DataError: there is none, it is one part of a conversion, or no conversion has made it.
        """
        parts = [folder / name for name in ("train", "val")]
        if has_manifest(folder) or not all(has_manifest(part) for part in parts):
            parts = [folder]
        manifests = [Manifest.read(part) for part in parts]
        if any("run" not in (manifest.accounts or {}) for manifest in manifests):
            raise DataError(
                f"retry '{folder}': its manifest has no accounts of a conversion (`mmdata index` makes none); "
                "only what `mmdata convert` has made can be retried"
            )
        content = json.dumps([manifest.content() for manifest in manifests], sort_keys=True)
        found = cls(
            folder,
            tuple(parts),
            add_up([manifest.accounts or {} for manifest in manifests]),
            manifests[0].tokenizer,
            any(manifest.has_labels for manifest in manifests),
            hashlib.sha256(content.encode()).hexdigest()[:16],
        )
        if found.settings.get("val_share") and len(parts) == 1:
            raise DataError(f"retry '{folder}': is one of two parts of a conversion; give '{folder.parent}'")
        return found

    @property
    def run(self) -> Run:
        """Source and settings."""
        return self.accounts["run"]

    @property
    def source(self) -> dict[str, Any]:
        """The source, as it describes itself."""
        return self.run["source"]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the bytes."""
        return self.run["settings"]

    @property
    def inner(self) -> Path:
        """The `__mmdata__` of the first folder."""
        return self.parts[0] / INNER

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by number."""
        return self.accounts.get("classes", [])

    def rows(self, columns: Sequence[str]) -> Iterator[Any]:
        """Columns of the list of all rows, as Arrow record batches.

        Raises:
            DataError: the list is missing or damaged.
        """
        count = 0
        for part in self.parts:
            for path in sorted((part / INNER / ROWS_FOLDER).glob("*.parquet")):
                for batch in _read(path, columns):
                    count += batch.num_rows
                    yield batch
        if count != self.accounts["rows"]:
            raise DataError(
                f"retry '{self.folder}': {INNER}{ROWS_FOLDER}/ lists {count:,} of {self.accounts['rows']:,} rows; "
                "was it left out of a copy? Copy it too, or convert anew"
            )


def _read(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(columns=list(columns)):
                yield batch.select(list(columns))
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(f"'{path}': not a list of rows that is whole ({error}); convert anew") from error
