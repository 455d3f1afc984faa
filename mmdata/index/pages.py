"""Pages of the manifest: entries of up to 1,024 shards in one Arrow IPC file; their columns are in another one.

Pages are read whole, never mapped: a file that is cut short while it is mapped ends the process with SIGBUS.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from pydantic import ConfigDict, NonNegativeInt

from mmdata.errors import DataError
from mmdata.index.columns import view
from mmdata.index.ragged import offsets_of
from mmdata.safe_read import read_regular
from mmdata.storage.folder import ListedShard
from mmdata.storage.urls import check_plain_name

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

PAGE_SHARDS = 1024
INDEX_FILE = re.compile(r"(manifest|index)-\d{5,}\.arrow")
"""Names of pages and of index files."""
REMAKE = "remove manifest.json and run `mmdata index`, or fetch the folder again"

_COUNTS = ("bytes", "rows", "images", "captions", "labels", "index_offset", "index_bytes")
_NUMBERS = (*_COUNTS, "index_xxh3")
_TEXTS = ("name", "sha256", "index_sha256")
_CELLS = ("cells", "counts")


_ITEM = pa.field("item", pa.int32(), nullable=False)
_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=False) for name in _TEXTS),
        *(pa.field(name, pa.int64(), nullable=False) for name in _NUMBERS),
        *(pa.field(name, pa.list_(_ITEM), nullable=False) for name in _CELLS),
    ]
)


@dataclass(frozen=True)
class ShardEntry(ListedShard):
    """The manifest's entry of one shard.

    Comparison leaves out the histogram, which `index_sha256` decides.

    Attributes:
        cells: int32 (n,), the cells (`mmdata.index.histogram`) in which this shard has captions, ascending.
        counts: int32 (n,), captions in each cell; they add up to `captions`. Of a corpus of labels only, rows in each
            cell; they add up to `rows`.
    """

    cells: npt.NDArray[np.int32] = field(compare=False, repr=False)
    counts: npt.NDArray[np.int32] = field(compare=False, repr=False)


@dataclass(frozen=True)
class ManifestPage:
    """What manifest.json says of a page and of the index file of its shards.

    Attributes:
        file, sha256: name and hash of the page.
        shards, rows: how many the page lists.
        index_bytes, index_sha256: size and hash of the index file: an Arrow IPC file with a record batch a shard.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    file: str
    sha256: str
    shards: NonNegativeInt
    rows: NonNegativeInt
    index_bytes: NonNegativeInt
    index_sha256: str

    @property
    def index(self) -> str:
        """Name of the index file."""
        return self.file.replace("manifest", "index")


def page_name(number: int) -> str:
    """File name of a page: 3 -> "manifest-00003.arrow"; that of its index file is "index-00003.arrow"."""
    return f"manifest-{number:05d}.arrow"


def encode_page(entries: Sequence[ShardEntry]) -> bytes:
    """The bytes of a page."""
    assert len(entries) <= PAGE_SHARDS, len(entries)
    arrays: list[Any] = [pa.array([getattr(entry, name) for entry in entries], pa.string()) for name in _TEXTS]
    arrays += [pa.array([getattr(entry, name) for entry in entries], pa.int64()) for name in _NUMBERS]
    offsets = offsets_of(np.array([len(entry.cells) for entry in entries], np.int64)).astype(np.int32)
    for name in _CELLS:
        values = np.concatenate([np.empty(0, np.int32), *(getattr(entry, name) for entry in entries)])
        arrays.append(pa.ListArray.from_arrays(offsets, values, type=_SCHEMA.field(name).type))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
    return sink.getvalue().to_pybytes()


class Histograms(NamedTuple):
    """The histograms of n shards.

    Attributes:
        offsets: int32 (n + 1,); shard i has cells[offsets[i]:offsets[i + 1]], and counts likewise.
        cells, counts: int32.
    """

    offsets: Int32s
    cells: Int32s
    counts: Int32s


@dataclass(frozen=True)
class PageColumns:
    """The entries of n shards, without their histograms (3 MB a page): a plan reads these once, page by page.

    Attributes:
        numbers: name -> int64 (n,): what `ListedShard` says in numbers.
        path: of the page, for messages.
        checksum: XXH3 of the file.
    """

    numbers: dict[str, Ints]
    path: Path
    checksum: int
    _texts: dict[str, pa.StringArray]

    def __len__(self) -> int:
        return len(self.numbers["rows"])

    @classmethod
    def open(cls, path: Path, page: ManifestPage) -> PageColumns:
        """Read a page and check it against manifest.json, hash included.

        Raises:
            FileNotFoundError: there is none.
            DataError: not the file that manifest.json names.
        """
        data = read_regular(path, "manifest page")
        if hashlib.sha256(data).hexdigest() != page.sha256:
            raise DataError(f"manifest page '{path}': SHA-256 differs from manifest.json's; {REMAKE}")
        batch = _parse(data, path)
        of = f"manifest page '{path}'"
        offsets, cells, counts = _histograms(batch, of=of)
        # Views would keep the whole file in memory, so all that remains is copied.
        numbers = {name: view(batch.column(name), np.int64, of=of).copy() for name in _NUMBERS}
        texts = {name: pa.concat_arrays([batch.column(name)]) for name in _TEXTS}
        counted = np.where(numbers["captions"] > 0, numbers["captions"], numbers["rows"])
        without_captions = (numbers["captions"] == 0) & (numbers["rows"] > 0)
        whole = (
            (batch.num_rows, int(numbers["rows"].sum())) == (page.shards, page.rows)
            and all((numbers[name] >= 0).all() for name in _COUNTS)
            and (numbers["index_offset"] + numbers["index_bytes"] <= page.index_bytes).all()
            and (cells >= 0).all()
            and (counts > 0).all()
            and np.array_equal(offsets, view(batch.column("counts").offsets, np.int32, of=of))
            and np.array_equal(_sums(counts, offsets), counted)
            and (not without_captions.any() or not numbers["captions"].any())
        )
        if not whole:
            raise DataError(f"manifest page '{path}': its numbers contradict each other or manifest.json; {REMAKE}")
        return cls(numbers, path, xxhash.xxh3_64_intdigest(data), texts)

    def read_histograms(self, path: Path) -> Histograms:
        """The histograms, read from the page's file again.

        Raises:
            FileNotFoundError: there is none.
            DataError: the file changed since it was opened.
        """
        data = read_regular(path, "manifest page")
        if xxhash.xxh3_64_intdigest(data) != self.checksum:
            raise DataError(f"manifest page '{path}': changed since it was opened; {REMAKE}")
        return _histograms(_parse(data, path), of=f"manifest page '{path}'")

    @property
    def tar_hashes(self) -> Any:
        """SHA-256 of each tar, Arrow strings (n,)."""
        return self._texts["sha256"]

    def listed(self, i: int) -> ListedShard:
        """Shard i of this page.

        Raises:
            DataError: a name in it is not a plain file name.
        """
        values: dict[str, Any] = {name: texts[i].as_py() for name, texts in self._texts.items()}
        values |= {name: int(numbers[i]) for name, numbers in self.numbers.items()}
        check_plain_name(values["name"], f"manifest page '{self.path}'")
        return ListedShard(**values)

    def entry(self, i: int, histograms: Histograms) -> ShardEntry:
        """The entry of shard i of this page, with its histogram."""
        span = slice(int(histograms.offsets[i]), int(histograms.offsets[i + 1]))
        return ShardEntry(**vars(self.listed(i)), cells=histograms.cells[span], counts=histograms.counts[span])


def _parse(data: bytes, path: Path) -> Any:
    """The Arrow record batch of a page."""
    try:
        batch = pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"manifest page '{path}': not a page: {error}; {REMAKE}") from error
    if batch.schema != _SCHEMA:
        raise DataError(
            f"manifest page '{path}': expected {_SCHEMA.names}, got {batch.schema.names}, or of other types; {REMAKE}"
        )
    return batch


def _histograms(batch: Any, *, of: str) -> Histograms:
    cells, counts = (batch.column(name) for name in _CELLS)
    return Histograms(*(view(numbers, np.int32, of=of) for numbers in (cells.offsets, cells.values, counts.values)))


def _sums(values: Int32s, offsets: Int32s) -> Ints:
    """Sum of each list in a flat array of lists: ([2, 1, 5], [0, 2, 2, 3]) -> [3, 0, 5]."""
    # reduceat gives an empty list its next value, not 0: only the others are asked for.
    sums = np.zeros(len(offsets) - 1, np.int64)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        sums[filled] = np.add.reduceat(values, offsets[filled], dtype=np.int64)
    return sums
