"""Folders of earlier conversions, whose images another conversion leaves out: `mmdata convert … --not-in FOLDER`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mmdata.errors import DataError
from mmdata.index.manifest import Manifest
from mmdata.storage.folder import INNER, ROWS_NAME, has_manifest


class WrittenImages:
    """The images that conversions have written.

    Args:
        folders: of the conversions; each has a manifest, or parts `train` and `val` with one.

    Attributes:
        names: equal for equal folders, wherever they lie.
        rows: of these conversions.

    Raises:
        DataError: a folder that no conversion has made, or one without its list of rows.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.names: list[str] = []
        self.rows = 0
        self._lists: list[Path] = []
        for folder in folders:
            parts = [part for part in (folder / "train", folder / "val") if has_manifest(part)]
            for part in parts or [folder]:
                self._open(part)

    def digests(self) -> Iterator[bytes]:
        """Digests of the original images: those of some, one after the other, each time."""
        for path in self._lists:
            with _reading(path) as file:
                for batch in file.iter_batches(columns=["digest"]):
                    yield b"".join(digest for digest in batch.column(0).to_pylist() if digest)

    def _open(self, folder: Path) -> None:
        manifest = Manifest.read(folder)
        accounts = manifest.accounts or {}
        if "run" not in accounts:
            raise DataError(
                f"not_in '{folder}': its manifest has no accounts of a conversion (`mmdata index` makes none); only "
                "what `mmdata convert` has made says which images it holds"
            )
        lists = sorted((folder / INNER / ROWS_NAME).glob("*.parquet"))
        listed = 0
        for path in lists:
            with _reading(path) as file:
                listed += file.metadata.num_rows
        if listed != accounts["rows"]:
            raise DataError(
                f"not_in '{folder}': {INNER}{ROWS_NAME}/ lists {listed:,} of {accounts['rows']:,} rows; was it left "
                "out of a copy? Copy it too"
            )
        content = json.dumps(manifest.content(), sort_keys=True)
        self.names.append(hashlib.sha256(content.encode()).hexdigest()[:16])
        self.rows += listed
        self._lists += lists


@contextmanager
def _reading(path: Path) -> Generator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"'{path}': not a list of rows that is whole ({error}); convert anew") from error
