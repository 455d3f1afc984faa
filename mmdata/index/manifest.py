"""The list of a corpus's shards. A folder without a manifest has no index; one with a manifest is whole.

`manifest.json` is small: it holds the totals of the corpus, and names the index files, of up to 1,024 shards each. An
index file is two Arrow streams, one after the other: the columns of its shards, a record batch each, and the list of
the shards, a row each, with the hashes of tars and record batches. manifest.json has the hash of the list.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from mmdata.errors import DataError
from mmdata.files import write_whole
from mmdata.hashing import fast_hash
from mmdata.index.columns import SCHEMA_VERSION, Histograms, ShardColumns, offsets_of, view
from mmdata.index.store import read_part
from mmdata.processes import cached_property, new_lock
from mmdata.storage.cache import ShardCache
from mmdata.storage.folder import (
    INNER,
    MANIFEST_NAME,
    FileRange,
    Folder,
    ListedShard,
    LocalFolder,
    Location,
    find_folder,
    local_folder,
    tars_of,
)
from mmdata.storage.urls import check_plain_name
from mmdata.tars.captions import unique_keys
from mmdata.tars.members import Members

FILE_SHARDS = 1024
"""Shards whose columns lie in one index file."""
INDEX_FILE = re.compile(r"index-\d{5,}\.arrow")
"""Names of index files."""
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Of an Arrow stream."""
OPENERS = 4
"""Threads that read the lists of all shards: hashing, most of the work, releases the interpreter's lock."""
REMAKE = "remove manifest.json and run `mmdata index`, or fetch the folder again"

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
T = TypeVar("T")

_COUNTS = ("bytes", "rows", "images", "captions", "labels", "index_bytes")
_NUMBERS = (*_COUNTS, "index_xxh3")
_TEXTS = ("name", "sha256", "index_sha256")
_CELLS = ("cells", "counts")
_ITEM = pa.field("item", pa.int32(), nullable=False)
LIST_SCHEMA = pa.schema(
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
        cells: int32 (n,), the cells (`mmdata.index.columns`) in which this shard has captions, ascending.
        counts: int32 (n,), captions in each cell; they add up to `captions`. Of a corpus of labels only, rows in each
            cell; they add up to `rows`.
    """

    cells: Int32s = field(compare=False, repr=False)
    counts: Int32s = field(compare=False, repr=False)

    @classmethod
    def of(cls, columns: ShardColumns, tar: str, *, size: int, sha256: str) -> ShardEntry:
        """The entry of a tar with these columns, name, size in bytes and SHA-256; its place in a file is 0 here."""
        cells, counts = columns.histogram()
        return cls(
            name=tar,
            bytes=size,
            sha256=sha256,
            rows=len(columns),
            index_offset=0,
            index_bytes=len(columns.data),
            index_sha256=hashlib.sha256(columns.data).hexdigest(),
            index_xxh3=fast_hash(columns.data),
            images=columns.num_images,
            captions=columns.num_captions,
            labels=columns.num_labels,
            cells=cells,
            counts=counts,
        )


@dataclass(frozen=True)
class IndexFile:
    """What manifest.json says of an index file.

    Attributes:
        bytes: its size.
        list_offset: where in it the list of its shards begins, which is the rest of the file.
        sha256: of the list.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    bytes: NonNegativeInt
    list_offset: NonNegativeInt
    sha256: str


def index_name(number: int) -> str:
    """Name of an index file: 3 -> "index-00003.arrow"."""
    return f"index-{number:05d}.arrow"


def encode_list(entries: list[ShardEntry]) -> bytes:
    """The bytes of a list of shards."""
    assert len(entries) <= FILE_SHARDS, len(entries)
    arrays: list[Any] = [pa.array([getattr(entry, name) for entry in entries], pa.string()) for name in _TEXTS]
    arrays += [pa.array([getattr(entry, name) for entry in entries], pa.int64()) for name in _NUMBERS]
    offsets = offsets_of(np.array([len(entry.cells) for entry in entries], np.int64)).astype(np.int32)
    for name in _CELLS:
        values = np.concatenate([np.empty(0, np.int32), *(getattr(entry, name) for entry in entries)])
        arrays.append(pa.ListArray.from_arrays(offsets, values, type=LIST_SCHEMA.field(name).type))
    batch: Any = pa.record_batch(arrays, schema=LIST_SCHEMA)
    return b"".join([LIST_SCHEMA.serialize(), batch.serialize(), STREAM_END])


@dataclass(frozen=True)
class ShardList:
    """The entries of the n shards of an index file, without their histograms (3 MB): a plan reads these once.

    Attributes:
        numbers: name -> int64 (n,): what `ListedShard` says in numbers.
        texts: name -> Arrow texts (n,): what it says in texts.
        of: the file, for messages.
        checksum: XXH3 of the list's bytes.
    """

    numbers: dict[str, Ints]
    texts: dict[str, Any]
    of: str
    checksum: int

    def __len__(self) -> int:
        return len(self.numbers["rows"])

    @classmethod
    def open(cls, path: Path, offset: int, *, file: IndexFile, shards: int) -> ShardList:
        """Read a list and check it against manifest.json, hash included.

        Args:
            path: of a file.
            offset: where in it the list begins.
            file: what manifest.json says.
            shards: how many it lists.

        Raises:
            FileNotFoundError: there is none.
            DataError: not the list that manifest.json names.
        """
        of = f"index '{path}', list of shards"
        data = read_part(path, "index", offset, file.bytes - file.list_offset)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise DataError(f"{of}: SHA-256 differs from manifest.json's; {REMAKE}")
        batch = _parse_list(data, of)
        histograms = _histograms(batch, of)
        # Views would keep the whole list in memory, so all that remains is copied.
        numbers = {name: view(batch.column(name), np.int64, of=of).copy() for name in _NUMBERS}
        texts = {name: pa.concat_arrays([batch.column(name)]) for name in _TEXTS}
        numbers["index_offset"] = file.list_offset - len(STREAM_END) - np.cumsum(numbers["index_bytes"][::-1])[::-1]
        counted = np.where(numbers["captions"] > 0, numbers["captions"], numbers["rows"])
        without_captions = (numbers["captions"] == 0) & (numbers["rows"] > 0)
        whole = (
            batch.num_rows == shards
            and all((numbers[name] >= 0).all() for name in (*_COUNTS, "index_offset"))
            and (histograms.cells >= 0).all()
            and (histograms.counts > 0).all()
            and np.array_equal(histograms.offsets, view(batch.column("counts").offsets, np.int32, of=of))
            and np.array_equal(histograms.totals, counted)
            and (not without_captions.any() or not numbers["captions"].any())
        )
        if not whole:
            raise DataError(f"{of}: its numbers contradict each other or manifest.json; {REMAKE}")
        return cls(numbers, texts, of, fast_hash(data))

    def read_histograms(self, path: Path, offset: int, *, file: IndexFile) -> Histograms:
        """The histograms, read from the file again.

        Raises:
            FileNotFoundError: there is none.
            DataError: the list changed since it was opened.
        """
        data = read_part(path, "index", offset, file.bytes - file.list_offset)
        if fast_hash(data) != self.checksum:
            raise DataError(f"{self.of}: changed since it was opened; {REMAKE}")
        return _histograms(_parse_list(data, self.of), self.of)

    def listed(self, i: int) -> ListedShard:
        """Shard i of this list.

        Raises:
            DataError: a name in it is not a plain file name.
        """
        values: dict[str, Any] = {name: texts[i].as_py() for name, texts in self.texts.items()}
        values |= {name: int(numbers[i]) for name, numbers in self.numbers.items()}
        check_plain_name(values["name"], self.of)
        return ListedShard(**values)

    def entry(self, i: int, histograms: Histograms) -> ShardEntry:
        """The entry of shard i of this list, with its histogram."""
        span = slice(int(histograms.offsets[i]), int(histograms.offsets[i + 1]))
        return ShardEntry(**vars(self.listed(i)), cells=histograms.cells[span], counts=histograms.counts[span])


def _parse_list(data: memoryview, of: str) -> Any:
    """The Arrow record batch of a list of shards."""
    try:
        batch = pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
        batch.validate(full=True)
    except (pa.ArrowException, ValueError, StopIteration) as error:
        raise DataError(f"{of}: cannot be read: {error}; {REMAKE}") from error
    if batch.schema != LIST_SCHEMA:
        raise DataError(f"{of}: expected {LIST_SCHEMA.names}, got {batch.schema.names}, or of other types; {REMAKE}")
    return batch


def _histograms(batch: Any, of: str) -> Histograms:
    cells, counts = (batch.column(name) for name in _CELLS)
    return Histograms(*(view(numbers, np.int32, of=of) for numbers in (cells.offsets, cells.values, counts.values)))


@dataclass(frozen=True)
class Top:
    """The fields of manifest.json without its checksum; the attributes are those of `Manifest`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rows: NonNegativeInt
    bytes: NonNegativeInt
    num_shards: NonNegativeInt
    captions: NonNegativeInt
    lengths: list[tuple[NonNegativeInt, NonNegativeInt]]
    has_images: bool
    has_labels: bool
    index_files: list[IndexFile]
    tokenizer: str | None = None
    location: str = "."
    accounts: dict[str, Any] | None = None
    schema: int = SCHEMA_VERSION

    def content(self) -> dict[str, Any]:
        """The fields as values of JSON."""
        content = {item.name: getattr(self, item.name) for item in fields(Top)}
        return {**content, "index_files": [*map(asdict, self.index_files)]}

    @cached_property
    def root(self) -> str:
        """Hash of what decides a plan: all fields but location and accounts. Moving the tars does not change it."""
        content = self.content()
        del content["location"], content["accounts"]
        return _sha256_of(content)


@dataclass(frozen=True)
class Manifest(Top):
    """The list of shards, in row order: `for entry in manifest`. Safe to share between threads.

    Attributes:
        rows, bytes, num_shards, captions: totals.
        lengths: (tokens, captions) for each length that occurs, ascending; all captions have 0 tokens if no tokenizer
            counted them. Of a corpus of labels only: (0, rows).
        has_images: whether the rows have images; False for tars whose members come to the rows of others.
        has_labels: whether any row has a label.
        index_files: with the columns and entries of the shards, in row order; read when first asked for.
        tokenizer: fingerprint of the tokenizer that counted the captions, or None.
        location: folder of the tars, relative to `folder`; "." is `folder` itself. Or its URL, in an index on this
            machine, with the password or signature that it may carry.
        accounts: where the rows come from (rows in, written, quarantined, …), for people and checks.
        schema: version of the format on disk.
        folder: of the index; that of the tars is `tars_folder`.
        cache: for tars behind a URL; None: `ShardCache()`.
    """

    folder: Folder = field(default=LocalFolder(Path()), compare=False)
    cache: ShardCache | None = field(default=None, compare=False, repr=False)
    _opened: dict[int, ShardList] = field(init=False, default_factory=dict, compare=False, repr=False)
    _locks: list[Any] = field(
        init=False, default_factory=lambda: [new_lock() for _ in range(OPENERS)], compare=False, repr=False
    )

    @classmethod
    def read(cls, location: Location, cache: ShardCache | None = None) -> Manifest:
        """The manifest of a folder of shards; reads manifest.json and no index file.

        Args:
            location: a path or a URL.
            cache: for the files behind a URL.

        Raises:
            DataError: there is none, it is damaged, was edited, or is of another schema.
            ConfigError: see `find_folder`.
        """
        folder = find_folder(location, cache)
        top = _checked(folder.read_manifest(), f"{folder}/{INNER}{MANIFEST_NAME}")
        tars_of(folder, top.location, cache)  # raises for a location that is not followed
        return cls(**{item.name: getattr(top, item.name) for item in fields(Top)}, folder=folder, cache=cache)

    @cached_property
    def tars_folder(self) -> Folder:
        """The folder of the tars."""
        return tars_of(self.folder, self.location, self.cache)

    @cached_property
    def members(self) -> Members:
        """Which members of a sample the index was made of."""
        return Members.from_content((self.accounts or {}).get("members"))

    @property
    def has_captions(self) -> bool:
        """Whether the rows have captions; False for a corpus of labels only. True for a corpus without rows."""
        return self.captions > 0 or self.rows == 0

    @property
    def files(self) -> list[str]:
        """Names of the index files, in the folder of manifest.json."""
        return [*map(index_name, range(len(self.index_files)))]

    def shard_path(self, shard: int) -> Path:
        """Path of the tar. A tar behind a URL is fetched into the cache first, which may remove it at any time."""
        return self.tars_folder.shard_path(self.listed(shard))

    def shard_place(self, shard: int) -> str:
        """Path or URL of the tar, for messages."""
        return self.tars_folder.place(self.listed(shard).name)

    def open_shard(self, shard: int, stop: Event | None = None) -> int:
        """A descriptor of the tar, which the caller closes; a tar behind a URL is fetched if it is not in the cache.

        Raises:
            FileNotFoundError: there is none.
            DataError, ConfigError, Interrupted: see `mmdata.storage.cache.ShardCache.open`.
        """
        return self.tars_folder.open_shard(self.listed(shard), stop)

    def columns(self, shard: int) -> ShardColumns:
        """The columns of a shard; see `ShardColumns.open`.

        Raises:
            DataError: the index file is missing or not the one that the manifest names.
        """
        entry = self.listed(shard)
        end = entry.index_offset + entry.index_bytes
        use = partial(ShardColumns.open, entry=entry)
        return self._with_range(shard // FILE_SHARDS, entry.index_offset, end, entry.index_sha256, use)

    def tar_hashes(self) -> Any:
        """SHA-256 of each tar, Arrow strings (num_shards,); reads all lists."""
        return pa.concat_arrays([pa.array([], pa.string()), *(part.texts["sha256"] for part in self._all_lists())])

    @cached_property
    def shard_rows(self) -> Ints:
        """Rows of each shard, int64 (num_shards,); reads all lists.

        Raises:
            DataError: they do not add up to `rows`.
        """
        rows = np.concatenate([np.empty(0, np.int64), *(part.numbers["rows"] for part in self._all_lists())])
        if int(rows.sum()) != self.rows:
            raise DataError(f"'{self.folder}/{INNER}{MANIFEST_NAME}': its shards have not {self.rows} rows; {REMAKE}")
        return rows

    def listed(self, shard: int) -> ListedShard:
        """The entry of one shard, without its histogram; reads the list that it is in the first time.

        Raises:
            DataError: the list is missing or damaged, or a name in the entry is not a plain file name.
            IndexError: `shard` is not one of 0 … num_shards−1.
        """
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} asked of a manifest of {self.num_shards}")
        return self._list(shard // FILE_SHARDS).listed(shard % FILE_SHARDS)

    def __iter__(self) -> Iterator[ShardEntry]:
        for part, histograms in zip(self._all_lists(), self.cells(), strict=True):
            yield from (part.entry(place, histograms) for place in range(len(part)))

    def cells(self) -> Iterator[Histograms]:
        """The histograms of all shards, those of an index file at a time; `unpack_cells` says what a cell is."""
        for number, (part, file) in enumerate(zip(self._all_lists(), self.index_files, strict=True)):
            use = partial(part.read_histograms, file=file)
            yield self._with_range(number, file.list_offset, file.bytes, file.sha256, use)

    def token_histogram(self) -> Ints:
        """Captions by length, from manifest.json alone: entry i counts those of i tokens."""
        lengths = np.array(self.lengths, np.int64).reshape(-1, 2)
        histogram = np.zeros(lengths[-1, 0] + 1 if len(lengths) else 0, np.int64)
        histogram[lengths[:, 0]] = lengths[:, 1]
        return histogram

    def moved(self, location: str) -> Manifest:
        """Write another location of the tars: manifest.json is replaced, whole or not at all."""
        if location == self.location:
            return self
        manifest = replace(self, location=location)
        write_whole(local_folder(str(self.folder)) / INNER / MANIFEST_NAME, manifest.to_json())
        return manifest

    def to_json(self) -> bytes:
        """The content of manifest.json: the same manifest gives the same bytes."""
        content = self.content()
        content["checksum"] = _sha256_of(content)
        lines = [f" {json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in content.items()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    def _list(self, number: int) -> ShardList:
        with self._locks[number % OPENERS]:
            if number not in self._opened:
                file, shards = self.index_files[number], min(FILE_SHARDS, self.num_shards - number * FILE_SHARDS)
                use = partial(ShardList.open, file=file, shards=shards)
                self._opened[number] = self._with_range(number, file.list_offset, file.bytes, file.sha256, use)
            return self._opened[number]

    def _all_lists(self) -> Iterator[ShardList]:
        if len(self._opened) < len(self.index_files):
            with ThreadPoolExecutor(OPENERS) as pool:
                list(pool.map(self._list, range(len(self.index_files))))
        return map(self._list, range(len(self.index_files)))

    def _with_range(self, number: int, start: int, end: int, sha256: str, use: Callable[[Path, int], T]) -> T:
        """Result of `use` on a path, and the offset in that file, of a part of an index file."""
        name, size = INNER + index_name(number), self.index_files[number].bytes
        try:
            return self.folder.with_range(FileRange(name, sha256, start, end, size), use)
        except FileNotFoundError:
            place = self.folder.place(name)
            raise DataError(f"index '{place}': no such file, and the manifest names it; {REMAKE}") from None


def _checked(data: bytes, path: str) -> Top:
    """The fields of a manifest.json, checked; `path` is for messages.

    Raises:
        DataError: it is of another schema, was edited or damaged.
    """
    try:
        content = json.loads(data, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}': not JSON: {error}; {REMAKE}") from error
    if not isinstance(content, dict):
        raise DataError(f"'{path}': expected an object, got {type(content).__name__}; {REMAKE}")
    schema = content.get("schema")
    if isinstance(schema, int) and schema != SCHEMA_VERSION:
        remedy = "upgrade with `pip install -U mmdata`" if schema > SCHEMA_VERSION else REMAKE
        raise DataError(f"'{path}': schema {schema}, and this mmdata reads {SCHEMA_VERSION}; {remedy}")
    if content.pop("checksum", None) != _sha256_of(content):
        raise DataError(f"'{path}': content does not match its checksum: edited or damaged; {REMAKE}")
    try:
        top = _ADAPTER.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"'{path}': '{place}': {first['msg']}; {REMAKE}") from error
    if len(top.index_files) != -(-top.num_shards // FILE_SHARDS):
        raise DataError(
            f"'{path}': {len(top.index_files)} index files for {top.num_shards} shards, {FILE_SHARDS} a file; {REMAKE}"
        )
    for number, file in enumerate(top.index_files):
        if file.list_offset > file.bytes:
            raise DataError(f"'{path}': the list of '{index_name(number)}' begins behind its end; {REMAKE}")
    return top


def _sha256_of(content: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))  # keys that are numbers become strings before they are sorted
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


_ADAPTER = TypeAdapter(Top)
