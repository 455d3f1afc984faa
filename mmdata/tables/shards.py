"""Tars in another folder whose samples come to the rows of an index by key: parallel tars of features or metadata."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from threading import Event
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config.data import JoinConfig
from mmdata.errors import BadSample, DataError, Interrupted, Reason
from mmdata.index.index import Index
from mmdata.index.keys_index import KeysIndex
from mmdata.index.member_hashes import hash_member
from mmdata.index.sample_members import ShardFile, find_members
from mmdata.index.side import SideFile, SideFiles, side_name
from mmdata.index.store import OpenShard, OpenShards
from mmdata.safe_read import open_regular
from mmdata.tables.captions import TableCaptions, cleaned
from mmdata.tables.match import OtherKeys, check_missing, match, warn_of_shared_keys
from mmdata.tables.table import take_rows
from mmdata.tars.tar import Member, split_name

VERSION = 1
"""Of the side files; raise it when their content changes, or when captions are cleaned in another way."""


class JoinedShards:
    """Tars, and their sample for each row of an index. Safe to share between threads.

    Args:
        settings: of the tars.
        index: whose rows get the members.
        sides: the side files of the index.
        of: name of the setting, for messages.
        keys: gives the keys of a shard's rows in these tars, Arrow texts; None: the rows' own.

    Attributes:
        folder, missing: of the settings.
        of: as given.
        leaves_out: whether rows that the tars do not have are not loaded.
        num_found: how many rows of the index the tars have.
        path: of the file that says which.
        open_shards: the tars that stay open.

    Raises:
        ConfigError: the tars are not joined; no row of the index has one of the keys, or rows without one are an error.
        DataError: there is no index of the tars, or it is damaged.
    """

    def __init__(
        self,
        settings: JoinConfig,
        index: Index,
        sides: SideFiles,
        *,
        of: str,
        keys: Callable[[int], Any] | None = None,
    ) -> None:
        assert settings.shards is not None, "it is no table"
        self.of, self.folder = of, settings.shards
        self.missing: Literal["keep", "mask", "error"] = settings.missing
        self.leaves_out = settings.missing == "mask"
        self._known = KeysIndex.read(self.folder, of=of)
        self._firsts, self._first_rows, self._sides = self._known.firsts, index.starts, sides
        self._made_of = {"version": VERSION, "samples": self._known.checksum, "key": settings.key}
        self._name = side_name(self.folder, os.path.abspath(self.folder), settings.key)
        found = self._side("rows", partial(self._match, index, keys or (lambda shard: index.shard(shard).keys)))
        self.path = found.path
        # (num_rows,), the sample of each row, -1 where there is none
        self._samples: NDArray[np.int64] = found.array("sample").to_numpy()
        self.num_found = int(np.count_nonzero(self._samples >= 0))
        check_missing(self._samples < 0, len(index), self.missing, index, of=of, where=str(self))
        self.open_shards = OpenShards()

    def __str__(self) -> str:
        return f"'{self.folder}'"

    def has_rows(self, shard: int) -> NDArray[np.bool_]:
        """Whether the tars have each row of a shard."""
        return self._samples[self._first_rows[shard] : self._first_rows[shard + 1]] >= 0

    def command(self, member: str) -> str:
        """The command that indexes the captions of one more member."""
        return self._known.command(member)

    @property
    def caption_names(self) -> list[str]:
        """The members whose captions are kept beside the index."""
        return list(self._known.captions)

    def captions(self, name: str, *, of: str) -> TableCaptions:
        """The captions of a member, one of `caption_names`; `of`: name of the setting, for messages."""
        samples = self._samples

        def make() -> Any:
            return cleaned(take_rows(self._known.captions_of(name, of=of), samples), place=self.place, of=of)

        return TableCaptions(partial(self._side, member=name), make)

    def members(self, row: int, wanted: Collection[str], stop: Event) -> dict[str, Member]:
        """Members of a row's sample by extension: all of them, or some with the wanted ones.

        Raises:
            BadSample: the tars have no sample of the row, or are not those that were indexed.
        """
        sample, tar = self._locate(row)
        if sample < 0:
            raise BadSample(Reason.MISSING_FIELD, f"no sample of the row's key in {self}")
        name, size, _ = self._known.tars[tar]
        file = ShardFile(self, tar, size, stop)
        start = int(self._known.starts[sample])
        key = self._key(sample)
        return find_members(file, start, key, name=name, exact=True, wanted=wanted, remedy=self._known.remedy)

    def read_member(self, row: int, member: Member, stop: Event) -> bytes:
        """The bytes of a member of a row's sample.

        Raises:
            BadSample: they are not those that were indexed; only where the index has hashes.
        """
        sample, tar = self._locate(row)
        data = self.read(tar, member.offset, member.size, stop)
        split = split_name(member.name)
        if self._known.hashes is not None and split is not None:
            try:
                is_known = hash_member(split[1], data) in self._known.hashes.of(sample)
            except ValueError as error:
                raise DataError(f"{self.of}: {error}; make the index anew with `{self._known.command()}`") from None
            if not is_known:
                raise BadSample(Reason.FILE_CHANGED, f"its bytes are not those that were indexed; {self._known.remedy}")
        return data

    def place(self, row: int) -> str:
        """Tar and sample of a row, for messages."""
        sample, _ = self._locate(row)
        return str(self) if sample < 0 else self._place_of_sample(sample)

    def read(self, shard: int, offset: int, size: int, stop: Event | None = None) -> bytes:
        """Bytes [offset, offset + size) of a tar.

        Raises:
            DataError: it is missing, its size is not the indexed one, or the range lies outside it.
            Interrupted: `stop` is set.
        """
        if stop is not None and stop.is_set():
            raise Interrupted(self._known.tars[shard].name)
        data = self._opened(shard).read(offset, size)
        if offset < 0 or len(data) != size:
            raise DataError(
                f"shard '{self._known.path(shard)}': bytes {offset} to {offset + size} asked; {self._known.remedy}"
            )
        return data

    def _side(self, kind: str, make: Callable[[], Any], member: str | None = None) -> SideFile:
        """The side file of some kind that is made of the tars' samples, or of the captions of a member."""
        name = self._name if member is None else side_name(self.folder, os.path.abspath(self.folder), member)
        what = f"{self.of}: {self}" if member is None else f"{self.of}: the captions of {member} in {self}"
        return self._sides.get(f"{name}.{kind}", {**self._made_of, "member": member}, make, what=what)

    def _match(self, index: Index, keys_of: Callable[[int], Any]) -> Any:
        other = OtherKeys(self._known.keys, self.of, str(self), "its samples")
        found = match(other, index, keys_of, shards=(0, index.num_shards))
        warn_of_shared_keys(found, index, of=self.of, what="the tars")
        return pa.table({"sample": found})

    def _locate(self, row: int) -> tuple[int, int]:
        """Number of a row's sample, and of its tar; -1 and any tar if the row has none."""
        sample = int(self._samples[row])
        return sample, int(np.searchsorted(self._firsts, sample, side="right")) - 1

    def _place_of_sample(self, sample: int) -> str:
        tar = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        return f"shard '{self._known.path(tar)}', sample '{self._key(sample)}'"

    def _key(self, sample: int) -> str:
        return self._known.keys[sample].as_py()

    def _opened(self, shard: int) -> OpenShard:
        if (known := self.open_shards.get(shard)) is not None:
            return known
        path, expected = self._known.path(shard), self._known.tars[shard].bytes
        try:
            opened = OpenShard(open_regular(path, "shard"), cached=False)
        except FileNotFoundError:
            raise DataError(
                f"{self.of}: shard '{path}': no such file, and it was indexed; {self._known.remedy}"
            ) from None
        if opened.size != expected:
            raise DataError(
                f"{self.of}: shard '{path}': {opened.size} bytes, and its index was made of {expected}; "
                f"{self._known.remedy}"
            )
        return self.open_shards.keep(shard, opened)
