"""The manifest: the list of shards, with sizes and hashes. It is written last: a folder with a manifest is whole.

It has two levels. `manifest.json` is small, holds the totals of the corpus and names the pages (`pages`).
A page holds entries of shards and is read when first asked for.
"""

from __future__ import annotations

import hashlib
import json
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
from mmdata.index.columns import SCHEMA_VERSION, ShardColumns
from mmdata.index.pages import PAGE_SHARDS, REMAKE, Histograms, ManifestPage, PageColumns, ShardEntry, page_name
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
    folder_of_index,
    local_folder,
)
from mmdata.tars.captions import unique_keys
from mmdata.tars.members import Members

OPENERS = 4
"""Threads that read all pages: hashing, most of the work, releases the interpreter's lock."""

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True)
class Top:
    """The fields of manifest.json without its hashes; the attributes are those of `Manifest`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rows: NonNegativeInt
    bytes: NonNegativeInt
    num_shards: NonNegativeInt
    captions: NonNegativeInt
    lengths: list[tuple[NonNegativeInt, NonNegativeInt]]
    has_images: bool
    has_labels: bool
    pages: list[ManifestPage]
    tokenizer: str | None = None
    location: str = "."
    accounts: dict[str, Any] | None = None
    schema: int = SCHEMA_VERSION

    def content(self) -> dict[str, Any]:
        """The fields as values of JSON."""
        return {**{item.name: getattr(self, item.name) for item in fields(Top)}, "pages": [*map(asdict, self.pages)]}

    @cached_property
    def root(self) -> str:
        """Hash of what decides a plan: all fields but location and accounts. Moving the tars does not change it."""
        content = self.content()
        del content["location"], content["accounts"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Manifest(Top):
    """The list of shards, in row order: `for entry in manifest`. Safe to share between threads.

    Attributes:
        rows, bytes, num_shards, captions: totals.
        lengths: (tokens, captions) for each length that occurs, ascending; all captions have 0 tokens if no tokenizer
            counted them. Of a corpus of labels only: (0, rows).
        has_images: whether the rows have images; False for tars whose members come to the rows of others.
        has_labels: whether any row has a label.
        pages: files with the entries and columns of the shards, in row order; entries are read when first asked for.
        tokenizer: fingerprint of the tokenizer that counted the captions, or None.
        location: folder of the tars, relative to `folder`; "." is `folder` itself. Or its URL, in an index on this
            machine, with the password or signature that it may carry.
        accounts: where the rows come from (rows in, written, quarantined, …), for people and checks.
        schema: version of the format on disk.
        folder: the folder of shards.
    """

    folder: Folder = field(default=LocalFolder(Path()), compare=False)
    _opened: dict[int, PageColumns] = field(init=False, default_factory=dict, compare=False, repr=False)
    _locks: list[Any] = field(
        init=False, default_factory=lambda: [new_lock() for _ in range(OPENERS)], compare=False, repr=False
    )

    @classmethod
    def read(cls, location: Location, cache: ShardCache | None = None) -> Manifest:
        """The manifest of a folder of shards; reads manifest.json and no page.

        Args:
            location: a path or a URL.
            cache: for the files behind a URL.

        Raises:
            DataError: there is none, it is damaged, was edited, or is of another schema.
            ConfigError: see `find_folder`.
        """
        folder = find_folder(location, cache)
        data = folder.read_manifest()
        path = f"{folder}/{INNER}{MANIFEST_NAME}"
        try:
            content = json.loads(data, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise DataError(f"'{path}': not JSON: {error}; {REMAKE}") from error
        if not isinstance(content, dict):
            raise DataError(f"'{path}': expected an object, got {type(content).__name__}; {REMAKE}")
        top = _checked(content, path)
        folder = folder_of_index(folder, top.location, cache)
        return cls(**{item.name: getattr(top, item.name) for item in fields(Top)}, folder=folder)

    @cached_property
    def members(self) -> Members:
        """Which members of a sample the index was made of."""
        return Members.from_content((self.accounts or {}).get("members"))

    @property
    def has_captions(self) -> bool:
        """Whether the rows have captions; False for a corpus of labels only. True for a corpus without rows."""
        return self.captions > 0 or self.rows == 0

    def shard_path(self, shard: int) -> Path:
        """Path of the tar. A tar behind a URL is fetched into the cache first, which may remove it at any time."""
        return self.folder.shard_path(self.location, self.listed(shard))

    def shard_place(self, shard: int) -> str:
        """Path or URL of the tar, for messages."""
        return self.folder.place(self.location, self.listed(shard).name)

    def is_cached(self, shard: int) -> bool:
        """Whether the tar is read from a cache, which may remove it."""
        return self.folder.cache is not None

    def open_shard(self, shard: int, stop: Event | None = None) -> int:
        """A descriptor of the tar, which the caller closes; a tar behind a URL is fetched if it is not in the cache.

        Raises:
            FileNotFoundError: there is none.
            DataError, ConfigError, Interrupted: see `mmdata.storage.cache.ShardCache.open`.
        """
        return self.folder.open_shard(self.location, self.listed(shard), stop)

    def columns(self, shard: int) -> ShardColumns:
        """The columns of a shard; see `ShardColumns.open`.

        Raises:
            DataError: the index file is missing or not the one that the manifest names.
        """
        number, place = self._find(shard)
        entry, page = self._page(number).listed(place), self.pages[number]
        end = entry.index_offset + entry.index_bytes
        part = FileRange(INNER + page.index, entry.index_sha256, entry.index_offset, end, page.index_bytes)
        try:
            return self.folder.with_range(part, partial(ShardColumns.open, entry=entry))
        except FileNotFoundError:
            raise self._missing(page.index, "index") from None

    def tar_hashes(self) -> Any:
        """SHA-256 of each tar, Arrow strings (num_shards,); reads all pages."""
        return pa.concat_arrays([pa.array([], pa.string()), *(page.tar_hashes for page in self._all_pages())])

    @cached_property
    def shard_rows(self) -> Ints:
        """Rows of each shard, int64 (num_shards,); reads all pages."""
        return np.concatenate([np.empty(0, np.int64), *(page.numbers["rows"] for page in self._all_pages())])

    def listed(self, shard: int) -> ListedShard:
        """The entry of one shard, without its histogram; reads the shard's page the first time.

        Raises:
            DataError: the page is missing or damaged, or a name in the entry is not a plain file name.
            IndexError: `shard` is not one of 0 … num_shards−1.
        """
        page, place = self._find(shard)
        return self._page(page).listed(place)

    def entry(self, shard: int) -> ShardEntry:
        """The entry of one shard; reads its page each time.

        Raises:
            DataError: the page is missing or damaged, or a name in the entry is not a plain file name.
            IndexError: `shard` is not one of 0 … num_shards−1.
        """
        page, place = self._find(shard)
        return self._page(page).entry(place, self._histograms(page))

    def _find(self, shard: int) -> tuple[int, int]:
        """The number of a shard's page, and the shard's number in that page."""
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} asked of a manifest of {self.num_shards}")
        return divmod(shard, PAGE_SHARDS)

    def __iter__(self) -> Iterator[ShardEntry]:
        for number, page in enumerate(self._all_pages()):
            histograms = self._histograms(number)
            yield from (page.entry(place, histograms) for place in range(len(page)))

    def cells(self) -> Iterator[Histograms]:
        """The histograms of all shards, a page of consecutive shards at a time; `unpack_cells` says what a cell is."""
        self._all_pages()
        for number in range(len(self.pages)):
            yield self._histograms(number)

    def token_histogram(self) -> Ints:
        """Captions by length, from manifest.json alone: entry i counts those of i tokens."""
        lengths = np.array(self.lengths, np.int64).reshape(-1, 2)
        histogram = np.zeros(lengths[-1, 0] + 1 if len(lengths) else 0, np.int64)
        histogram[lengths[:, 0]] = lengths[:, 1]
        return histogram

    def moved(self, location: str) -> Manifest:
        """Write another location of the tars: manifest.json is replaced, whole or not at all."""
        manifest = replace(self, location=location)
        write_whole(local_folder(str(self.folder)) / INNER / MANIFEST_NAME, manifest.to_json())
        return manifest

    def to_json(self) -> bytes:
        """The content of manifest.json: the same manifest gives the same bytes."""
        content = {**self.content(), "root": self.root}
        content["checksum"] = _checksum_of(content)
        pages = ",\n".join("  " + json.dumps(page, sort_keys=True) for page in content["pages"])
        lines = [f" {json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in content.items()]
        lines[list(content).index("pages")] = f' "pages": [\n{pages}\n ]' if pages else ' "pages": []'
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    @property
    def files(self) -> list[str]:
        """Names of the pages and index files, in the folder of manifest.json."""
        return [name for page in self.pages for name in (page.file, page.index)]

    def _page(self, number: int) -> PageColumns:
        with self._locks[number % OPENERS]:
            if number not in self._opened:
                page = self.pages[number]
                use = partial(PageColumns.open, page=page)
                opened = self._with_file(page.file, page.sha256, use, kind="manifest page")
                self._opened[number] = opened
            return self._opened[number]

    def _histograms(self, number: int) -> Histograms:
        """The histograms of a page, read again each time."""
        opened, page = self._page(number), self.pages[number]
        return self._with_file(page.file, page.sha256, opened.read_histograms, kind="manifest page")

    def _with_file(self, name: str, sha256: str, use: Callable[[Path], T], *, kind: str) -> T:
        """Result of `use` on the path of a file that the manifest names; `kind` stands in the message."""
        try:
            return self.folder.with_range(FileRange(INNER + name, sha256), lambda path, start: use(path))
        except FileNotFoundError:
            raise self._missing(name, kind) from None

    def _missing(self, name: str, kind: str) -> DataError:
        place = self.folder.place(INNER, name)
        return DataError(f"{kind} '{place}': no such file, and the manifest names it; {REMAKE}")

    def _all_pages(self) -> Iterator[PageColumns]:
        if len(self._opened) < len(self.pages):
            with ThreadPoolExecutor(OPENERS) as pool:
                list(pool.map(self._page, range(len(self.pages))))
        return map(self._page, range(len(self.pages)))


def _checked(content: dict[str, Any], path: str) -> Top:
    """The fields of a manifest.json, checked; `path` is for messages.

    Raises:
        DataError: it is of another schema, was edited or damaged, or its location is a URL or a command.
    """
    schema = content.get("schema")
    if isinstance(schema, int) and schema != SCHEMA_VERSION:
        remedy = "upgrade with `pip install -U mmdata`" if schema > SCHEMA_VERSION else REMAKE
        raise DataError(f"'{path}': schema {schema}, and this mmdata reads {SCHEMA_VERSION}; {remedy}")
    checksum = content.pop("checksum", None)
    expected = _checksum_of(content)
    root = content.pop("root", None)
    try:
        top = _ADAPTER.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"'{path}': '{place}': {first['msg']}; {REMAKE}") from error
    if root != top.root:
        raise DataError(f"'{path}': content does not match its root hash: edited or damaged; {REMAKE}")
    if checksum != expected:
        raise DataError(f"'{path}': content does not match its checksum: edited or damaged; {REMAKE}")
    for number, page in enumerate(top.pages):
        if page.file != page_name(number):
            raise DataError(f"'{path}': page {number} is '{page.file}', and must be '{page_name(number)}'; {REMAKE}")
    full = [PAGE_SHARDS] * (top.num_shards // PAGE_SHARDS)
    rest = top.num_shards % PAGE_SHARDS
    if [page.shards for page in top.pages] != full + [rest] * bool(rest):
        raise DataError(f"'{path}': its pages do not list {top.num_shards} shards, {PAGE_SHARDS} a page; {REMAKE}")
    if sum(page.rows for page in top.pages) != top.rows:
        raise DataError(f"'{path}': its pages do not list {top.rows} rows; {REMAKE}")
    return top


def _checksum_of(content: dict[str, Any]) -> str:
    """SHA-256 over all fields of manifest.json, accounts and names of classes included.

    The root hash leaves location and accounts out, because a run may continue on another folder with equal rows.
    """
    as_read = json.loads(json.dumps(content))  # keys that are numbers become strings before they are sorted
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


_ADAPTER = TypeAdapter(Top)
