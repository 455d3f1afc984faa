"""How many boxes each row has: batches have room for those of their rows. Counted once, and kept beside the index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config.data import RowsConfig
from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.index import Index, ShardStore
from mmdata.index.side import side_name
from mmdata.plan.buckets import Bucket
from mmdata.processes import map_concurrently
from mmdata.tables.joined import Joined
from mmdata.tars.members import MAX_BYTES, Selector, open_member, pick
from mmdata.tars.scan import IndexedMember

logger = logging.getLogger("mmdata")

Counts = NDArray[np.int32]

SETTING = "data.targets.boxes"
VERSION = 1
"""Of the side files; raise it when boxes are counted in another way."""
THREADS = 4
"""Shards whose boxes are counted at a time: those behind URLs are fetched."""


def box_counts(data: RowsConfig, index: Index, joined: Joined) -> Counts | None:
    """How many boxes each row of the index has, int32 (len(index),), 0 without a list of them; None: nobody asks.

    Reads the side file that the first start, or `mmdata join`, has written. Without one, reads the member of each row.

    Raises:
        ConfigError: no such source of boxes.
        DataError: a member is not the one that was indexed: a plan must not depend on one rank's copy of the shards.
    """
    if data.targets is None or data.targets.boxes is None:
        return None
    join, selector, kind = joined.member(data.targets.boxes, setting=SETTING)
    samples = joined.shards[join] if join else ShardStore(index)
    stop = Event()

    def of_row(row: int) -> int:
        try:
            return count_boxes(
                samples.members(row), lambda member: samples.read_member(row, member, stop), selector, kind
            )
        except BadSample as bad:
            if bad.reason is Reason.MISSING_FIELD:  # the joined tars have no sample of the row
                return 0
            raise DataError(f"{SETTING}: {samples.place(row)}, member .{selector.extension}: {bad.detail}") from bad

    def of_shard(shard: int) -> Counts:
        return np.array([of_row(row) for row in range(*index.starts[shard : shard + 2].tolist())], np.int32)

    def make() -> Any:
        index.fetch_columns(np.arange(index.num_shards))
        found = map_concurrently(of_shard, range(index.num_shards), threads=THREADS, end=stop.set, ahead=1)
        return pa.table({"boxes": np.concatenate([np.empty(0, np.int32), *found])})

    folders = [source.folder.identity for source in index.sources]
    made_of = {"version": VERSION, "samples": joined.shards[join].fingerprint if join else ""}
    name = f"{side_name(str(selector), join, str(selector), folders)}.boxes"
    columns = joined.sides.made(name, made_of, make, what=f"{SETTING}: the number of boxes of {len(index):,} rows")
    return columns.column("boxes").to_numpy()


def count_boxes(
    members: Mapping[str, IndexedMember], read: Callable[[IndexedMember], bytes], selector: Selector, kind: str
) -> int:
    """How many boxes a sample has: the length of the list that a selector names; 0 if there is none.

    Args:
        members: of the sample, by extension.
        read: gives the bytes of one.
        selector, kind: see `Joined.member`.
    """
    member = members.get(selector.extension)
    if member is None or member.size > MAX_BYTES:
        return 0
    data = read(member)
    try:
        value = pick(open_member(data, kind), selector)
    except BadSample:
        return 0
    return len(value) if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim) else 0


def check_boxes(counts: Counts, buckets: Sequence[Bucket]) -> int:
    """Warn of rows with more boxes than any bucket; returns how many these are.

    Raises:
        ConfigError: no bucket has boxes.
    """
    most = max(bucket.boxes for bucket in buckets)
    if not most:
        raise ConfigError(
            f"{SETTING}: the buckets of this policy have no boxes: give each the number that its batches have room "
            "for, Bucket(77, 224, 224, boxes=8)"
        )
    if more := int((counts > most).sum()):
        logger.warning(
            "%s: %d of %d rows have more than %d boxes, up to %d: the largest of them are kept; "
            "data.targets.box_buckets says how many batches have room for",
            *(SETTING, more, len(counts), most, counts.max()),
        )
    return more
