"""The index of tars without images: where each sample begins, by its key. `data.join` brings their members to rows.

It is three files in the folder's `__mmdata__`: `members.arrow` has a row a sample, `members.hashes` a hash a member,
and `members.json`, which is written last, names the tars and the checksums of the others. Without hashes, as in indexes
of earlier versions, only headers are read, and captions.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from mmdata.atomic import lock, write_whole
from mmdata.errors import DataError, excerpt
from mmdata.hashing import fast_hash
from mmdata.index.joined_captions import CAPTIONS_NAME, CaptionWriter, read_captions
from mmdata.index.member_hashes import HASHES_NAME, HashWriter, MemberHashes, hash_in_file
from mmdata.index.ragged import offsets_of
from mmdata.index.tars import LocalTars
from mmdata.safe_read import read_regular
from mmdata.storage.folder import INNER, local_folder
from mmdata.storage.folder import MEMBERS_HEAD_NAME as HEAD_NAME
from mmdata.storage.listed import check_plain_name
from mmdata.tars.members import Selector
from mmdata.tars.samples import SampleReader
from mmdata.tars.scan import Progress
from mmdata.tars.tar import Member, read_members

DATA_NAME = "members.arrow"
VERSION = 1
SCHEMA = pa.schema([pa.field("key", pa.large_string(), nullable=False), pa.field("start", pa.int64(), nullable=False)])
compute: Any = pyarrow.compute  # pyarrow's functions have no types


class ListedTar(NamedTuple):
    """A tar: its file name, its size in bytes, and how many samples it has."""

    name: str
    bytes: int
    samples: int


@dataclass(frozen=True)
class KeysIndex:
    """The samples of tars, in the order of the tars.

    Attributes:
        folder: of the index.
        location: folder of the tars, relative to `folder`.
        tars: in order.
        extensions: how many members each extension has.
        ignored: members that belong to no sample.
        captions: how many captions there are of each selector that was named.
        checksum: of the data, by which the file of captions knows them.
        keys: an Arrow array of texts (n,), no two equal.
        starts: offset of each sample's first header, int64 (n,).
        hashes: of the members; None: they were not hashed.
        hashes_checksum: of their file.
    """

    folder: Path
    location: str
    tars: list[ListedTar]
    extensions: dict[str, int]
    ignored: int
    captions: dict[str, int]
    checksum: int
    keys: Any
    starts: NDArray[np.int64]
    hashes: MemberHashes | None = None
    hashes_checksum: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The first sample of each tar, then the number of samples: int64 (num_tars + 1,)."""
        return offsets_of(np.array([tar.samples for tar in self.tars], np.int64))

    def path(self, tar: int) -> Path:
        """Path of a tar."""
        return self.folder / self.location / self.tars[tar].name

    @property
    def remedy(self) -> str:
        """For messages about tars that are not those that were indexed."""
        return f"fetch it again, or run `{self.command()}`"

    def command(self, *more: str) -> str:
        """The command that makes the index anew, with the captions of its members and of `more`."""
        tars = os.path.normpath(self.folder / self.location)
        out = "" if self.location == "." else f" --out {self.folder}"
        captions = ",".join([*self.captions, *(one for one in more if one not in self.captions)])
        return f"mmdata index {tars} --members-only --overwrite{out}" + (f" --caption {captions}" if captions else "")

    @classmethod
    def read(cls, folder: str | os.PathLike[str], *, of: str) -> KeysIndex:
        """The index of a folder; `of`: name of the setting, for messages.

        Raises:
            DataError: there is none, or it is damaged.
            ConfigError: a URL or a command.
        """
        place = local_folder(folder)
        try:
            head = read_regular(place / INNER / HEAD_NAME)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{of}: '{place}': no {INNER}{HEAD_NAME}; `mmdata index {place} --members-only` makes it for tars "
                "whose members are joined"
            ) from None
        try:
            content = json.loads(head)
            if content["version"] != VERSION:
                raise DataError(f"{of}: '{place / INNER / HEAD_NAME}': version {content['version']}; a newer mmdata")
            data = read_regular(place / INNER / DATA_NAME)
            if fast_hash(data) != content["xxh3"]:
                raise ValueError(f"{DATA_NAME} is not the one that it names")
            tars = [ListedTar(str(name), int(size), int(samples)) for name, size, samples in content["tars"]]
            for tar in tars:
                check_plain_name(tar.name, str(place))
            table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
            if table.schema != SCHEMA or len(table) != sum(tar.samples for tar in tars):
                raise ValueError(f"{DATA_NAME} has other columns or rows")
            listed, hashes = content.get("hashes"), None
            if listed is not None:
                hashes = MemberHashes(place / INNER / HASHES_NAME, len(table), listed["members"])
            about = (content["location"], tars, content["extensions"], content["ignored"], content["captions"])
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{of}: '{place / INNER / HEAD_NAME}': damaged: {excerpt(str(error), 120)}; make it anew: "
                f"`mmdata index {place} --members-only --overwrite`"
            ) from error
        starts, checksum = table.column("start").to_numpy(), listed["xxh3"] if listed else 0
        return cls(place, *about, content["xxh3"], table.column("key"), starts, hashes, checksum)

    def captions_of(self, name: str, *, of: str) -> Any:
        """The captions of a selector; see `read_captions`."""
        return read_captions(self.folder / INNER, name, len(self), self.checksum, of=of, remedy=self.command())


def build_keys_index(
    source: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    captions_in: Sequence[Selector] = (),
    hashes: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[KeysIndex, list[str]]:
    """Write the index of a folder of tars whose members are joined to the rows of others.

    Args:
        source: folder (its `*.tar`, sorted by name) or a tar.
        out: folder in whose `__mmdata__` it is written; default: the folder of the tars.
        captions_in: members that hold captions: they are read, and kept beside the index.
        hashes: whether all members are read and hashed, so that one that is rewritten later is found.
        overwrite: replace an existing one that differs.
        progress: called with (bytes done, bytes in all).

    Returns:
        The index, and a line for people about the captions of each selector.

    Raises:
        DataError: no tar, a damaged one, a key that comes twice, or an index of other contents; nothing is published.
        ConfigError: a URL.
    """
    tars = LocalTars(source)
    folder = Path(out or str(tars))
    (folder / INNER).mkdir(parents=True, exist_ok=True)
    with lock(folder):
        found = _Found(hashes=HashWriter() if hashes else None)
        return _build(tars, folder, found, list(captions_in), overwrite=overwrite, progress=progress)


def _build(
    tars: LocalTars,
    folder: Path,
    found: _Found,
    selectors: list[Selector],
    *,
    overwrite: bool,
    progress: Progress | None,
) -> tuple[KeysIndex, list[str]]:
    """`build_keys_index`, while no other process writes the folder."""
    done, total = 0, sum(size or 0 for size in tars.sizes)
    captions = CaptionWriter(selectors, folder / INNER) if selectors else None
    try:
        for name in tars.names:
            path = Path(str(tars)) / name
            _read(path, found, captions, lambda at, done=done: progress and progress(done + at, total))
            done += found.tars[-1].bytes
        _refuse_twice(found.keys, found.tars)
        if captions is not None:
            captions.end()
        _publish(folder, tars.location(folder), found, captions, overwrite=overwrite)
    except BaseException:
        if captions is not None:
            captions.discard()
        raise
    return KeysIndex.read(folder, of="index"), captions.in_words() if captions is not None else []


@dataclass
class _Found:
    """What was read so far."""

    hashes: HashWriter | None
    tars: list[ListedTar] = field(default_factory=list[ListedTar])
    batches: list[Any] = field(default_factory=list[Any])
    extensions: Counter[str] = field(default_factory=Counter[str])
    ignored: int = 0

    @property
    def table(self) -> Any:
        """The samples, an Arrow table."""
        return pa.Table.from_batches(self.batches, SCHEMA)

    @property
    def keys(self) -> Any:
        """Their keys."""
        return self.table.column("key")


def _read(path: Path, found: _Found, captions: CaptionWriter | None, step: Callable[[int], object]) -> None:
    """Read the headers of a tar, its captions, and, for hashes, all of it."""
    keys: list[str] = []
    starts: list[int] = []
    with path.open("rb") as file:

        def read(member: Member) -> bytes:
            file.seek(member.offset)
            return file.read(member.size)

        reader = SampleReader(read_members(file, name=path.name), name=path.name)
        for group in reader:
            keys.append(group.key)
            starts.append(group.start)
            found.extensions.update(list(group.members))
            if captions is not None:
                captions.add(group, read, path.name)
            if found.hashes is not None:
                found.hashes.add([hash_in_file(file, *member) for member in group.members.items()])
            step(group.start)
        size = file.seek(0, os.SEEK_END)
    if captions is not None:
        captions.end_tar()
    found.tars.append(ListedTar(path.name, size, len(keys)))
    columns = [pa.array(keys, pa.large_string()), pa.array(np.array(starts, np.int64))]
    found.batches.append(pa.record_batch(columns, schema=SCHEMA))
    found.ignored += reader.ignored


def _refuse_twice(keys: Any, tars: list[ListedTar]) -> None:
    if compute.count_distinct(keys).as_py() == len(keys):
        return
    counts = compute.value_counts(keys)
    key = counts.filter(compute.greater(counts.field("counts"), 1)).field("values")[0]
    rows = compute.indices_nonzero(compute.equal(keys, key)).to_numpy()[:2]
    firsts = offsets_of(np.array([tar.samples for tar in tars], np.int64))
    places = " and ".join(f"'{tars[tar].name}'" for tar in np.searchsorted(firsts, rows, side="right") - 1)
    raise DataError(f"key {excerpt(key.as_py())} comes twice: in {places}; a row could have only one of them")


def _publish(folder: Path, location: str, found: _Found, captions: CaptionWriter | None, *, overwrite: bool) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(found.table)
    data = sink.getvalue().to_pybytes()
    content = {
        "version": VERSION,
        "location": location,
        "tars": found.tars,
        "extensions": dict(sorted(found.extensions.items())),
        "ignored": found.ignored,
        "captions": {} if captions is None else captions.captions,
        "xxh3": fast_hash(data),
    }
    hashes = found.hashes.content() if found.hashes is not None else None
    if found.hashes is not None and hashes is not None:
        content["hashes"] = {"members": found.hashes.members, "xxh3": fast_hash(hashes)}
    head = json.dumps(content, ensure_ascii=False).encode()
    inner = folder / INNER
    path = inner / HEAD_NAME
    if path.exists() and not overwrite and not _is_the_same(read_regular(path), content):
        raise DataError(f"'{path}': is of other tars, or of other contents; replace it with --overwrite")
    path.unlink(missing_ok=True)  # it names the old files
    if captions is not None:
        captions.publish(fast_hash(data))
    else:
        (inner / CAPTIONS_NAME).unlink(missing_ok=True)
    if hashes is not None:
        write_whole(inner / HASHES_NAME, hashes)
    else:
        (inner / HASHES_NAME).unlink(missing_ok=True)
    write_whole(inner / DATA_NAME, data)
    write_whole(path, head)


def _is_the_same(head: bytes, content: dict[str, Any]) -> bool:
    """Whether an index's head says what another says; one may have hashes, and the other none."""
    try:
        written = json.loads(head)
    except ValueError:
        return False
    ours = json.loads(json.dumps(content))
    return isinstance(written, dict) and {**written, "hashes": None} == {**ours, "hashes": None}
