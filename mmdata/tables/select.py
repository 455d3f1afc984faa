"""From settings to a selection: the filters of `data.select` and of `data.val.share`, and what passes all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.config.corpus import SelectFile, sources
from mmdata.errors import ConfigError, excerpt
from mmdata.hashing import share_bound
from mmdata.index import Index
from mmdata.tables.arrow_values import compute
from mmdata.tables.condition import parse_condition
from mmdata.tables.joined import Joined, JoinedTable
from mmdata.tables.row_columns import RowColumns
from mmdata.tables.row_files import SUFFIXES, NpyFile, ReadsLines, has_uids, is_file, read_lines, uids_of
from mmdata.tables.selection import Selection

logger = logging.getLogger("mmdata")

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UID = "uid"
"""Column of a joined table that DataComp's uids are compared with, in place of the keys."""


@dataclass(frozen=True)
class WantedKeys:
    """Keys that a filter looks for.

    Attributes:
        keys: distinct, Arrow texts.
        among: what they are looked for among, for messages.
        of_shard: gives these of a shard's rows, Arrow texts; null where a row has none.
    """

    keys: Any
    among: str
    of_shard: Callable[[int], Any]

    def mask(self, shard: int) -> Bools:
        """The rows of a shard that have one of the keys."""
        texts = self.of_shard(shard).cast(pa.large_string())
        return compute.is_in(texts, value_set=self.keys, skip_nulls=True).to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class Filter:
    """Lets some rows of some shards pass.

    Attributes:
        name: of the rule, for messages and states.
        shards: first shard, and the shard after the last; rows of others are not asked for, and pass.
        mask: gives the rows of a shard that pass, bool (rows of the shard,); called for rising shards.
        reads_index: whether it reads the shard's index file.
        wanted: the keys that it looks for; None: it looks for none.
    """

    name: str
    shards: tuple[int, int]
    mask: Callable[[int], Bools]
    reads_index: bool = True
    wanted: WantedKeys | None = None


def select_rows(data: DataConfig, index: Index, starts: Ints, joined: Joined | None = None) -> Selection | None:
    """The rows that a section `data` plans; None: all of them.

    Args:
        data: settings.
        index: of the shards.
        starts: first row of each shard, then the number of rows; may end before the index does (`data.max_rows`).
        joined: what `data.join` names; None: it is opened here.

    Raises:
        ConfigError: a file or a condition is wrong; or they leave no row, or none to evaluate on.
        DataError: a file is damaged.
    """
    filters, share = list(filters_of(data, index, joined)), data.val.share
    if not filters and share is None:
        return None
    found = [0] * len(filters)  # rows that each lets pass
    selected = 0  # rows that all of them let pass, before the share is taken

    def masks() -> Iterator[Bools]:
        nonlocal selected
        for shard, count in enumerate(np.diff(starts).tolist()):
            mask = np.ones(count, np.bool_)
            for number, rule in enumerate(filters):
                if count and rule.shards[0] <= shard < rule.shards[1]:
                    own = rule.mask(shard)[:count]
                    found[number] += int(np.count_nonzero(own))
                    mask &= own
            selected += int(np.count_nonzero(mask))
            if share is not None and mask.any():
                mask &= below_share(index, shard, share)[:count] == (data.split == "val")
            yield mask

    of_all = [(0, index.num_shards)] if share is not None else []
    read = [np.arange(*span) for span in of_all + [rule.shards for rule in filters if rule.reads_index]]
    index.fetch_columns(np.intersect1d(np.flatnonzero(np.diff(starts)), np.concatenate([np.empty(0, np.int64), *read])))
    names = [rule.name for rule in filters]
    if share is not None:
        names.append(f"data.split {data.split} of data.val.share {share:g}")
    selection = Selection(starts, masks(), name=" and ".join(names))
    for rule, count in zip(filters, found, strict=True):
        _check_found(rule, count, index)
    if filters:
        _check_selected(index, selection, filters)
        # A condition may read a file, and a file may change: a state knows the rows themselves.
        selection.name += f" ({selection.digest})"
    if share is not None:
        _check_share(data, share, selected, len(selection))
    return selection


def excluded_by(data: DataConfig, index: Index, row: int, joined: Joined | None = None) -> list[str]:
    """What leaves a row out, in words; empty if nothing does.

    Args:
        data, index, joined: as for `select_rows`.
        row: of the index.
    """
    shard = int(np.searchsorted(index.starts, row, side="right")) - 1
    place = row - int(index.starts[shard])
    rules = [rule for rule in filters_of(data, index, joined) if rule.shards[0] <= shard < rule.shards[1]]
    found = [rule.name for rule in rules if not rule.mask(shard)[place]]
    if (share := data.val.share) is not None and below_share(index, shard, share)[place] != (data.split == "val"):
        found.append(f"data.split {data.split} of data.val.share {share:g}")
    return found


def filters_of(
    data: DataConfig, index: Index, joined: Joined | None, *, lines: ReadsLines = read_lines
) -> Iterator[Filter]:
    """The filters of `data.select`, of the datasets of a mixture, and of tables that leave rows out.

    Args:
        data, index, joined: as for `select_rows`.
        lines: reads the files of keys.
    """
    if data.select is None and not data.join and all(source.select is None for source in sources(data)):
        return
    joined = joined or Joined.from_config(data, index)
    for table in (one for one in joined.parts if one.leaves_out):
        yield Filter(f"{table.of} missing: mask", (0, index.num_shards), table.has_rows, reads_index=False)
    if data.select is not None:
        yield _filter(data.select, index, joined, (0, index.num_shards), of="data.select", lines=lines)
    listed = sources(data)
    for number, (source, indexed) in enumerate(zip(listed, index.sources, strict=True)):
        if source.select is not None:
            span = (indexed.first_shard, indexed.last_shard)
            yield _filter(source.select, index, joined, span, of=f"data.shards.{number}.select", lines=lines)


def _filter(
    select: str | SelectFile, index: Index, joined: Joined, shards: tuple[int, int], *, of: str, lines: ReadsLines
) -> Filter:
    if isinstance(select, str) and not is_file(select):
        return _of_condition(select, index, joined, shards, of=of, lines=lines)
    file, column = (select, None) if isinstance(select, str) else (select.file, select.column)
    name = f"{of} {Path(file).name}" + (f" column {column}" if column else "")
    if not file.lower().endswith(".npy"):
        return _of_keys(lines(file, column, of=of), index, None, shards, name)
    array = NpyFile(file, of=of)
    if has_uids(array.dtype):
        return _of_keys(uids_of(array), index, joined.table_of(UID) if UID in joined.types else None, shards, name)
    first_row = int(index.starts[shards[0]])
    num_rows = int(index.starts[shards[1]]) - first_row
    if array.dtype == np.bool_:
        if len(array) != num_rows:
            raise ConfigError(
                f"{of}: '{file}' is a mask of {len(array):,} rows, and the index has {num_rows:,}: it was made for "
                "other shards"
            )
        bounds = index.starts - first_row
        return Filter(name, shards, lambda shard: array.read(*bounds[shard : shard + 2].tolist()), reads_index=False)
    rows = _row_numbers(array, num_rows, where=f"{of}: '{file}'")
    return Filter(name, shards, partial(_rows_of_shard, rows + first_row, index.starts), reads_index=False)


def _of_condition(
    select: str, index: Index, joined: Joined, shards: tuple[int, int], *, of: str, lines: ReadsLines
) -> Filter:
    if _is_a_path(select):
        raise ConfigError(f"{of}: '{select}': files of keys, masks and rows end in {', '.join(SUFFIXES)}")
    columns = RowColumns(index, joined)
    condition = parse_condition(select, columns.types, of=of, lines=partial(lines, of=of))
    columns.warn_of_hidden(condition.names, of=of)

    def mask(shard: int) -> Bools:
        values = {name: columns.of_shard(shard, name) for name in condition.names}
        return condition(values, int(index.starts[shard + 1] - index.starts[shard]))

    return Filter(f"{of} {select}", shards, mask)


def _of_keys(
    keys: Sequence[str], index: Index, table: JoinedTable | None, shards: tuple[int, int], name: str
) -> Filter:
    """Looks for keys of the index; or, of a table, for uids."""
    if not keys:
        raise ConfigError(f"{name}: the file has no keys")
    texts = pa.array(keys, pa.large_string()).unique()
    if table is None:
        wanted = WantedKeys(texts, "keys of the index", lambda shard: index.shard(shard).keys)
    else:
        wanted = WantedKeys(texts, f"uids of {table}", partial(table.of_shard, name=UID))
    return Filter(name, shards, wanted.mask, wanted=wanted)


def _row_numbers(array: NpyFile, num_rows: int, *, where: str) -> Ints:
    """The rows that a file names, in rising order."""
    if array.dtype.kind not in "iu":
        raise ConfigError(
            f"{where} is an array of {array.dtype}; known are bool (a mask), whole numbers (rows) and two u8 "
            "(DataComp's uids)"
        )
    given = array.read(0, len(array)).astype(np.int64)
    if len(given) == num_rows and not (given >> 1).any():
        raise ConfigError(f"{where} has a 0 or 1 for each row, which looks like a mask: save it as bool")
    rows, counts = np.unique(given, return_counts=True)
    if (counts > 1).any():
        raise ConfigError(f"{where}: row {int(rows[counts.argmax()]):,} comes {counts.max():,} times")
    if len(rows) and not 0 <= rows[0] <= rows[-1] < num_rows:
        wrong = int(rows[0] if rows[0] < 0 else rows[-1])
        raise ConfigError(f"{where}: row {wrong:,}, and the index has rows 0 to {num_rows - 1:,}")
    return rows


def _is_a_path(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # a condition may be longer than any file's name
        return False


def _rows_of_shard(rows: Ints, starts: Ints, shard: int) -> Bools:
    first, last = starts[shard : shard + 2].tolist()
    found = np.zeros(last - first, np.bool_)
    found[rows[slice(*np.searchsorted(rows, [first, last]).tolist())] - first] = True
    return found


def below_share(index: Index, shard: int, share: float) -> Bools:
    """The rows of a shard whose image hash lies below a share of all hashes.

    Rows with equal images are on one side, in whichever shards they lie, and the rows below a share are below every
    larger share too. `mmdata convert --val-share` draws the same line.
    """
    return index.shard(shard).fixed("image_hash") < share_bound(share)


def _check_found(rule: Filter, found: int, index: Index) -> None:
    """Raise ConfigError if a filter lets no row pass; log how many keys were not found."""
    wanted, of_one = rule.wanted, rule.name.startswith("data.shards.")
    if not found and wanted is not None:
        first = next((text for text in wanted.of_shard(rule.shards[0]).to_pylist() if text is not None), None)
        known = f", and {wanted.among} are like {excerpt(first)}" if first is not None else ""
        like = excerpt(compute.min(wanted.keys).as_py())
        raise ConfigError(f"{rule.name}: no row has one of its {len(wanted.keys):,} keys: they are like {like}{known}")
    if not found:
        remedy = "; leave that dataset out, or select more" if of_one and len(index.sources) > 1 else ""
        raise ConfigError(f"{rule.name}: selects no row{remedy}")
    if wanted is None:
        return
    if found == int(np.diff(index.starts[list(rule.shards)])[0]):
        logger.warning("%s: every row has one of its %s keys, so all are selected", rule.name, f"{len(wanted.keys):,}")
    if found < len(wanted.keys):
        logger.warning("%s: %d keys, and %d rows have one of them", rule.name, len(wanted.keys), found)


def _check_selected(index: Index, selection: Selection, filters: Sequence[Filter]) -> None:
    """Raise ConfigError if what is selected leaves a dataset without rows."""
    for number, indexed in enumerate(index.sources):
        if not np.diff(selection.starts[[indexed.first_shard, indexed.last_shard]]).any():
            if len(index.sources) == 1:
                raise ConfigError(f"{selection.name}: selects no row of '{indexed.folder}'")
            span = indexed.first_shard, indexed.last_shard
            names = [one.name for one in filters if one.shards[0] < span[1] and span[0] < one.shards[1]]
            raise ConfigError(
                f"{' and '.join(names) or selection.name}: selects no row of data.shards.{number} ('{indexed.folder}')"
                "; leave that dataset out, or select more"
            )


def _check_share(data: DataConfig, share: float, rows: int, chosen: int) -> None:
    """Raise ConfigError if a share of some rows leaves none to train on or to evaluate on."""
    train, val = (rows - chosen, chosen) if data.split == "val" else (chosen, rows - chosen)
    if not (train and val):
        raise ConfigError(
            f"data.val.share {share:g} of {rows:,} rows leaves {train:,} to train on and {val:,} to evaluate on; equal "
            f"images stay together, so set it to about {min(0.5, max(0.01, 8 / rows)):.2g}, or name other shards "
            "(data.val.shards)"
        )
