"""Tars in another folder whose samples come to the rows of an index by key: parallel tars of features or metadata."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from threading import Event
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import BadSample, DataError, Interrupted, Reason
from mmdata.hashing import fast_hash
from mmdata.index.index import Index
from mmdata.index.keys_index import KeysIndex
from mmdata.index.member_hashes import hash_member
from mmdata.index.sample_members import ShardFile, find_members
from mmdata.index.store import OpenShard, OpenShards
from mmdata.safe_read import open_regular
from mmdata.tables.captions import TableCaptions
from mmdata.tables.match import check_missing, match, warn_of_shared_keys
from mmdata.tables.place import name_of_words
from mmdata.tables.stored import Arrays, Keep, Store, make_anew
from mmdata.tars.tar import Member, split_name

CAPTIONS_VERSION = 1
"""Of what is kept of captions; raise it when captions are cleaned in another way."""


class JoinedShards:
    """Tars, and their sample for each row of an index. Safe to share between threads.

    Args:
        folder: of their index.
        missing: see `JoinConfig.missing`.
        index: whose rows get the members.
        of: name of the setting, for messages.
        keys: gives the keys of a shard's rows in these tars, Arrow texts; None: the rows' own.
        store: keeps what is made of their captions; None: nothing is kept.

    Attributes:
        folder, missing, of: as given.
        leaves_out: whether rows that the tars do not have are not loaded.
        open_shards: the tars that stay open.

    Raises:
        ConfigError: no row of the index has one of the keys, or rows without one are an error.
        DataError: there is no index, or it is damaged.
    """

    def __init__(
        self,
        folder: str,
        missing: Literal["keep", "mask", "error"],
        index: Index,
        *,
        of: str,
        keys: Callable[[int], Any] | None = None,
        store: Store | None = None,
    ) -> None:
        self.of = of
        self._store, self._fingerprint = store, index.fingerprint
        self.missing: Literal["keep", "mask", "error"] = missing
        self.leaves_out = missing == "mask"
        known = KeysIndex.read(folder, of=of)
        found = match(known.keys, index, keys)
        check_missing(found, missing, known.keys, index, of=of, where=f"'{folder}'", what="its samples", keys_of=keys)
        warn_of_shared_keys(found, index, of=of, what="the tars")
        self.folder, self._known, self._firsts = folder, known, known.firsts
        self._samples = found  # (num_rows,), the sample of each row, -1 where there is none
        self._first_rows = index.starts
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
        column = self._known.captions_of(name, of=of)
        return TableCaptions(column, self._samples, place=self._place_of_sample, of=of, keep=self._keep(name))

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

    def _keep(self, name: str) -> Keep:
        """Keeps arrays that are made of the captions of a member, beside the index of the rows."""
        if (store := self._store) is None:
            return make_anew
        which = [self._fingerprint, str(self._known.checksum), str(fast_hash(self._samples.tobytes()))]
        made_of = {"version": CAPTIONS_VERSION, "member": name, "of": which}
        words = name_of_words(self.folder, [os.path.abspath(self.folder), name])

        def keep(what: str, make: Callable[[], Arrays]) -> Arrays:
            return store.get(f"{words}.{what}", lambda found: found == made_of, lambda: (made_of, make())).arrays

        return keep

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
