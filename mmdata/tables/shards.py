"""Tars in another folder whose samples come to the rows of an index by key: parallel tars of features or metadata."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config.data import JoinConfig
from mmdata.errors import BadSample, ConfigError, DataError, Reason, counted, excerpt
from mmdata.index.index import Index
from mmdata.index.side import SideFile, SideFiles, digest_of, side_name
from mmdata.index.store import OpenShards, ShardStore
from mmdata.storage.folder import local_folder
from mmdata.tables.captions import TableCaptions, cleaned
from mmdata.tables.match import OtherKeys, check_missing, first_twice, match, warn_of_shared_keys
from mmdata.tables.table import take_rows
from mmdata.tars.captions import MAX_CAPTION_BYTES, clean_captions
from mmdata.tars.member_values import absent, kind_of, open_member, pick
from mmdata.tars.members import Selector
from mmdata.tars.row import IndexedMember

logger = logging.getLogger("mmdata")

HELD_ROWS = 2**22
"""Samples whose columns stay in memory, some 170 bytes each: rows may have them in any order."""
VERSION = 1
"""Of the side files; raise it when their content changes, or when captions are cleaned in another way."""
TEXTS = pa.large_list(pa.large_string())


class RowKeys(NamedTuple):
    """A column of a joined table that gives the keys of rows in tars.

    Attributes:
        of_shard: gives the keys of a shard's rows, Arrow texts.
        place: differs for the columns of two tables.
        fingerprint: of its values.
    """

    of_shard: Callable[[int], Any]
    place: str
    fingerprint: str


class JoinedShards:
    """Tars, and their sample for each row of an index. Safe to share between threads.

    Args:
        settings: of the tars.
        index: whose rows get the members.
        sides: the side files of the index.
        of: name of the setting, for messages.
        keys: the rows' keys in these tars; None: the rows' own.

    Attributes:
        folder, missing: of the settings.
        of: as given.
        leaves_out: whether rows that the tars do not have are not loaded.
        num_found: how many rows of the index the tars have.
        path: of the file that says which.
        fingerprint: equal for the same samples at the same rows.

    Raises:
        ConfigError: the tars are not joined; no row of the index has one of the keys, or rows without one are an error.
        DataError: there is no index of the tars, it is damaged, or a key comes twice in it.
    """

    def __init__(
        self,
        settings: JoinConfig,
        index: Index,
        sides: SideFiles,
        *,
        of: str,
        keys: RowKeys | None = None,
    ) -> None:
        assert settings.shards is not None, "it is no table"
        self.of, self.folder = of, settings.shards
        self.missing: Literal["keep", "mask", "error"] = settings.missing
        self.leaves_out = settings.missing == "mask"
        local_folder(self.folder)
        try:
            self._known = Index.open(self.folder)
        except DataError as error:
            raise DataError(f"{of}: {error}") from error
        self._known.held_rows = HELD_ROWS
        self._first_rows, self._sides = index.starts, sides
        self._made_of = {"version": VERSION, "samples": self._known.fingerprint, "keys": keys and keys.fingerprint}
        self._name = side_name(self.folder, os.path.abspath(self.folder), settings.key, keys and keys.place)
        keys_of: Callable[[int], Any] = keys.of_shard if keys else lambda shard: index.shard(shard).keys
        found = self._side("rows", partial(self._match, index, keys_of))
        self.path = found.path
        self.fingerprint = digest_of(self._known.fingerprint, found.fingerprint)
        # (num_rows,), the sample of each row, -1 where there is none
        self._samples: NDArray[np.int64] = found.array("sample").to_numpy()
        self.num_found = int(np.count_nonzero(self._samples >= 0))
        check_missing(self._samples < 0, len(index), self.missing, index, of=of, where=str(self))
        self._shards = ShardStore(self._known)

    def __str__(self) -> str:
        return f"'{self.folder}'"

    @property
    def open_shards(self) -> OpenShards:
        """The tars that stay open."""
        return self._shards.open_shards

    def has_rows(self, shard: int) -> NDArray[np.bool_]:
        """Whether the tars have each row of a shard."""
        return self._samples[self._first_rows[shard] : self._first_rows[shard + 1]] >= 0

    def captions(self, selector: Selector, *, of: str) -> TableCaptions:
        """The captions in a member; `of`: name of the setting, for messages.

        Raises:
            ConfigError: the member holds no texts, they are not joined, or no sample has a caption in it.
        """
        kind = kind_of(selector, of=of)
        if kind not in ("json", "txt") or (kind == "json" and not selector.key):
            raise ConfigError(f"{of}: '{selector}': captions are in json:KEY or txt")

        def make() -> Any:
            return cleaned(take_rows(self._texts(selector, kind, of=of), self._samples), place=self.place, of=of)

        return TableCaptions(partial(self._side, member=str(selector)), make)

    def members(self, row: int) -> dict[str, IndexedMember]:
        """All members of a row's sample, by extension.

        Raises:
            BadSample: the tars have no sample of the row.
        """
        if (sample := int(self._samples[row])) < 0:
            raise BadSample(Reason.MISSING_FIELD, f"no sample of the row's key in {self}")
        return self._shards.members(sample)

    def read_member(self, row: int, member: IndexedMember, stop: Event) -> bytes:
        """The bytes of a member of a row's sample; see `ShardStore.read_member`."""
        return self._shards.read_member(int(self._samples[row]), member, stop)

    def key(self, row: int) -> str:
        """The key of a row's sample in these tars."""
        return self._shards.key(int(self._samples[row]))

    def place(self, row: int) -> str:
        """Tar and sample of a row, for messages."""
        sample = int(self._samples[row])
        return str(self) if sample < 0 else self._shards.place(sample)

    def _side(self, kind: str, make: Callable[[], Any], member: str | None = None) -> SideFile:
        """The side file of some kind that is made of the tars' samples, or of the captions of a member."""
        of_member = "" if member is None else f".{digest_of(member)}"
        what = f"{self.of}: {self}" if member is None else f"{self.of}: the captions of {member} in {self}"
        return self._sides.get(f"{self._name}{of_member}.{kind}", {**self._made_of, "member": member}, make, what=what)

    def _match(self, index: Index, keys_of: Callable[[int], Any]) -> Any:
        known = self._keys()
        self._refuse_twice(known)
        found = match(OtherKeys(known, self.of, str(self), "its samples"), index, keys_of, shards=(0, index.num_shards))
        warn_of_shared_keys(found, index, of=self.of, what="the tars")
        return pa.table({"sample": found})

    def _keys(self) -> Any:
        """The keys of all samples, Arrow texts: copied, so that other columns need not stay in memory."""
        shards = map(self._known.shard, range(self._known.num_shards))
        keys = [columns.keys.take(pa.array(np.arange(len(columns)))) for columns in shards]
        return pa.chunked_array(keys, pa.string()).cast(pa.large_string())

    def _refuse_twice(self, keys: Any) -> None:
        if (rows := first_twice(keys.combine_chunks())) is not None:
            shards, _ = self._known.locate(np.array(rows))
            places = " and ".join(f"'{self._known.shard_name(shard)}'" for shard in shards.tolist())
            key = excerpt(keys[rows[0]].as_py())
            raise DataError(f"{self.of}: {self}: key {key} comes twice: in {places}; a row could have only one of them")

    def _texts(self, selector: Selector, kind: str, *, of: str) -> Any:
        """The captions of the samples that rows have: Arrow lists of texts, one for each sample of the tars."""
        texts: list[list[str] | None] = [None] * len(self._known)
        samples = np.unique(self._samples[self._samples >= 0]).tolist()
        lacking, first = 0, ""
        for sample in samples:
            try:
                texts[sample] = self._captions_of(sample, selector, kind)
            except BadSample as bad:
                lacking += 1
                first = first or f"{self._shards.place(sample)}: {bad}"
        if lacking == len(samples):
            raise ConfigError(f"{of}: none of {counted(len(samples), 'sample')} has a caption in {selector}: {first}")
        if lacking:
            logger.warning("%s: %s without a caption in it; the first: %s", of, counted(lacking, "sample"), first)
        return pa.chunked_array([pa.array(texts, TEXTS)])

    def _captions_of(self, sample: int, selector: Selector, kind: str) -> list[str]:
        """The captions of a sample, at least one; raises BadSample."""
        member = self._shards.members(sample).get(selector.extension)
        if member is None:
            raise BadSample(Reason.MISSING_FIELD, f"no member .{selector.extension}")
        if member.size > MAX_CAPTION_BYTES:
            raise BadSample(Reason.CAPTION_TOO_LONG, f"{member.size} bytes; at most {MAX_CAPTION_BYTES}")
        opened = open_member(self._shards.read_member(sample, member, Event()), kind)
        value = pick(opened, selector)
        if value is None:
            raise BadSample(Reason.MISSING_FIELD, absent(selector, opened))
        return clean_captions(value)[0]
