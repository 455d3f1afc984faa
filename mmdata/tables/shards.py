"""Tars in another folder whose samples come to the rows of an index by key: parallel tars of features or metadata."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from threading import Event
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import BadSample, ConfigError, DataError, Reason, counted, excerpt
from mmdata.hashing import fast_hash
from mmdata.index.index import Index
from mmdata.index.members import SampleMembers
from mmdata.index.ragged import offsets_of
from mmdata.index.store import OpenShards, ShardStore
from mmdata.storage.folder import local_folder
from mmdata.tables.captions import TableCaptions
from mmdata.tables.match import check_missing, first_twice, match, warn_of_shared_keys
from mmdata.tables.place import name_of_words
from mmdata.tables.stored import Arrays, Keep, Store, make_anew
from mmdata.tars.captions import MAX_CAPTION_BYTES, clean_captions
from mmdata.tars.member_values import absent, kind_of, open_member, pick
from mmdata.tars.members import Selector
from mmdata.tars.row import IndexedMember

logger = logging.getLogger("mmdata")

HELD_ROWS = 2**22
"""Samples whose columns stay in memory, some 170 bytes each: rows may have them in any order."""
CAPTIONS_VERSION = 2
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

    Raises:
        ConfigError: no row of the index has one of the keys, or rows without one are an error.
        DataError: there is no index, it is damaged, or a key comes twice in it.
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
        self.of, self.folder = of, folder
        self._keeps, self._fingerprint = store, index.fingerprint
        self.missing: Literal["keep", "mask", "error"] = missing
        self.leaves_out = missing == "mask"
        local_folder(folder)
        try:
            self._known = Index.open(folder)
        except DataError as error:
            raise DataError(f"{of}: {error}") from error
        self._known.held_rows = HELD_ROWS
        known = self._keys()
        self._refuse_twice(known)
        found = match(known, index, keys)
        check_missing(found, missing, known, index, of=of, where=f"'{folder}'", what="its samples", keys_of=keys)
        warn_of_shared_keys(found, index, of=of, what="the tars")
        self._samples = found  # (num_rows,), the sample of each row, -1 where there is none
        self._first_rows = index.starts
        self._shards = ShardStore(self._known)
        self._read = SampleMembers(self._known, self._shards)

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
            ConfigError: the member holds no texts, or no sample has a caption in it.
        """
        kind = kind_of(selector, of=of)
        if kind not in ("json", "txt") or (kind == "json" and not selector.key):
            raise ConfigError(f"{of}: '{selector}': captions are in json:KEY or txt")
        keep = self._keep(selector)
        found = keep("texts", lambda: self._texts(selector, kind, of=of))
        texts = pa.LargeStringArray.from_buffers(
            len(found["ends"]) - 1, pa.py_buffer(found["ends"]), pa.py_buffer(found["bytes"])
        )
        column = pa.LargeListArray.from_arrays(pa.array(found["starts"]), texts)
        return TableCaptions(pa.chunked_array([column]), self._samples, place=self._read.place, of=of, keep=keep)

    def members(self, row: int) -> dict[str, IndexedMember]:
        """All members of a row's sample, by extension.

        Raises:
            BadSample: the tars have no sample of the row.
        """
        if (sample := int(self._samples[row])) < 0:
            raise BadSample(Reason.MISSING_FIELD, f"no sample of the row's key in {self}")
        return self._read.members(sample)

    def read_member(self, row: int, member: IndexedMember, stop: Event) -> bytes:
        """The bytes of a member of a row's sample; see `SampleMembers.read_member`."""
        return self._read.read_member(int(self._samples[row]), member, stop)

    def key(self, row: int) -> str:
        """The key of a row's sample in these tars."""
        return self._read.key(int(self._samples[row]))

    def place(self, row: int) -> str:
        """Tar and sample of a row, for messages."""
        sample = int(self._samples[row])
        return str(self) if sample < 0 else self._read.place(sample)

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

    def _texts(self, selector: Selector, kind: str, *, of: str) -> Arrays:
        """The captions of the samples that rows have: UTF-8, the ends of the texts, and the first of each sample."""
        samples = np.unique(self._samples[self._samples >= 0])
        counts = np.zeros(len(self._known), np.int64)
        texts: list[bytes] = []
        lacking, first = 0, ""
        for sample in samples.tolist():
            try:
                captions = self._captions_of(sample, selector, kind)
            except BadSample as bad:
                lacking += 1
                first = first or f"{self._read.place(sample)}: {bad}"
                continue
            counts[sample] = len(captions)
            texts += [caption.encode() for caption in captions]
        if not texts:
            raise ConfigError(f"{of}: none of {counted(len(samples), 'sample')} has a caption in {selector}: {first}")
        if lacking:
            logger.warning("%s: %s without a caption in it; the first: %s", of, counted(lacking, "sample"), first)
        ends = offsets_of(np.array([len(text) for text in texts], np.int64))
        return {"starts": offsets_of(counts), "ends": ends, "bytes": np.frombuffer(b"".join(texts), np.uint8)}

    def _captions_of(self, sample: int, selector: Selector, kind: str) -> list[str]:
        """The captions of a sample, at least one; raises BadSample."""
        member = self._read.members(sample).get(selector.extension)
        if member is None:
            raise BadSample(Reason.MISSING_FIELD, f"no member .{selector.extension}")
        if member.size > MAX_CAPTION_BYTES:
            raise BadSample(Reason.CAPTION_TOO_LONG, f"{member.size} bytes; at most {MAX_CAPTION_BYTES}")
        opened = open_member(self._read.read_member(sample, member, Event()), kind)
        value = pick(opened, selector)
        if value is None:
            raise BadSample(Reason.MISSING_FIELD, absent(selector, opened))
        return clean_captions(value)[0]

    def _keep(self, selector: Selector) -> Keep:
        """Keeps arrays that are made of the captions of a member, beside the index of the rows."""
        if (store := self._keeps) is None:
            return make_anew
        which = [self._fingerprint, self._known.fingerprint, str(fast_hash(self._samples.tobytes()))]
        made_of = {"version": CAPTIONS_VERSION, "member": str(selector), "of": which}
        words = name_of_words(self.folder, [os.path.abspath(self.folder), str(selector)])

        def keep(what: str, make: Callable[[], Arrays]) -> Arrays:
            return store.get(f"{words}.{what}", lambda found: found == made_of, lambda: (made_of, make())).arrays

        return keep
