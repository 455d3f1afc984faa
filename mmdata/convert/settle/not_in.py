"""Folders of earlier conversions, whose images another conversion leaves out: `mmdata convert … --not-in FOLDER`."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mmdata.convert.row.examine import DIGEST_BYTES
from mmdata.errors import DataError
from mmdata.index.manifest import Manifest
from mmdata.recognize import PARTS
from mmdata.storage.folder import INNER, ROWS_NAME, has_manifest


class WrittenImages:
    """The images that conversions have written.

    Args:
        folders: of the conversions; each has a manifest, or parts `train` and `val` with one.

    Attributes:
        names: equal for folders with equal images, wherever they lie.
        images: that these conversions have written.

    Raises:
        DataError: a folder that no conversion has made, or one without its list of rows.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.images = 0
        self._lists: list[Path] = []
        names: set[str] = set()
        for folder in folders:
            parts = [folder / name for name in PARTS if has_manifest(folder / name)]
            names.update([self._open(part, of=folder) for part in parts] or [self._open(folder)])
        self.names = sorted(names)

    def digests(self) -> Iterator[bytes]:
        """Digests of the original images: those of some, one after the other, each time."""
        for path in self._lists:
            yield from _digests_in(path)

    def _open(self, folder: Path, of: Path | None = None) -> str:
        """Take the lists of a folder, which may be a part of another one, and give the folder's name."""
        accounts = Manifest.read(folder).accounts or {}
        if "run" not in accounts:
            raise DataError(
                f"not_in '{folder}': its manifest has no accounts of a conversion (`mmdata index` makes none); only "
                "what `mmdata convert` has made says which images it holds"
            )
        if of is not None and accounts["run"]["settings"].get("val_share"):
            _refuse_half(of, folder)
        lists = sorted((folder / INNER / ROWS_NAME).glob("*.parquet"))
        whole, images = hashlib.sha256(), 0
        for digests in chain.from_iterable(map(_digests_in, lists)):
            whole.update(digests)
            images += len(digests) // DIGEST_BYTES
        if images != accounts["written"]:
            raise DataError(
                f"not_in '{folder}': {INNER}{ROWS_NAME}/ has digests of {images:,} images, and "
                f"{accounts['written']:,} were written; a copy that `mmdata push` has made is without this list: name "
                "the folder that `mmdata convert` has made, or convert anew"
            )
        self.images += images
        self._lists += lists
        return whole.hexdigest()[:16]


def _refuse_half(folder: Path, part: Path) -> None:
    """Raise DataError if a folder of a conversion with `val_share` has one of its parts only."""
    missing = [name for name in PARTS if not has_manifest(folder / name)]
    if missing:
        raise DataError(
            f"not_in '{folder}': its '{missing[0]}' is missing, and '{part.name}' was made with val_share; put it "
            f"back, or name '{part}' to leave out the images of this part alone"
        )


def _digests_in(path: Path) -> Iterator[bytes]:
    """Digests of the original images in a list: those of some, one after the other."""
    with _reading(path) as file:
        for batch in file.iter_batches(columns=["digest"]):
            column: Any = batch.column(0).drop_null()
            if len(column):
                start = column.offset * DIGEST_BYTES
                yield bytes(memoryview(column.buffers()[1])[start : start + len(column) * DIGEST_BYTES])


@contextmanager
def _reading(path: Path) -> Generator[pq.ParquetFile]:
    """A list of rows, whose pages are checked as they are read."""
    try:
        with pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
            schema: Any = file.schema_arrow
            if "digest" not in schema.names or schema.field("digest").type != pa.binary(DIGEST_BYTES):
                raise DataError(f"'{path}': is no list of rows: it has no column of digests; convert anew")
            yield file
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"'{path}': not a list of rows that is whole ({error}); convert anew") from error
