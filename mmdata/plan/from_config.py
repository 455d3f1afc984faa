"""From settings to a plan. Reads no image."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from mmdata.config import DataConfig
from mmdata.config.corpus import sources
from mmdata.config.data import RowsConfig
from mmdata.errors import ConfigError, DataError
from mmdata.hashing import hash64
from mmdata.index import Index
from mmdata.index.caption_lengths import CountsTokens, counts_of
from mmdata.plan.boxes import box_counts, check_boxes
from mmdata.plan.buckets import BucketPolicy
from mmdata.plan.captions import CaptionSources, NoTexts, ShardCaptions, caption_sources, check_captions, check_rows
from mmdata.plan.choose import bucket_policy
from mmdata.plan.groups import groups_of
from mmdata.plan.mixture import Mixture, ShardSpan
from mmdata.plan.ordered import OrderedPlan
from mmdata.plan.plan import Plan
from mmdata.plan.rows import IndexRows
from mmdata.plan.weights import WeightedPlan, row_weights
from mmdata.tables.joined import Joined
from mmdata.tables.select import select_rows
from mmdata.tables.table import NpyFile
from mmdata.tables.values import DATES

logger = logging.getLogger("mmdata")

NOTICEABLE_PADDING = 0.2
"""Share of masked places from which on the log says so."""


def build_plan(
    data: DataConfig,
    index: Index,
    tokenizer: CountsTokens | None,
    *,
    count_lengths: bool = False,
    joined: Joined | None = None,
    captions: CaptionSources | None = None,
    order: ArrayLike | None = None,
    policy: BucketPolicy | None = None,
) -> Plan:
    """The plan that a section `data` describes.

    Caption lengths come from the index if it was made with this tokenizer. Otherwise every caption is read and counted;
    so are the boxes of `data.targets`, the first time.

    Args:
        data: settings.
        index: of the shards.
        tokenizer: for the captions; None: batches have no texts.
        count_lengths: know the lengths even if there is only one text length, which does not ask for them.
        joined: the tables of `data.join`; None: they are opened here.
        captions: the sources that `data.captions` names; None: they are opened here. Their tokens are counted.
        order: rows in place of those of `data.order`, which may then name anything.
        policy: in place of the buckets that the settings describe.

    Raises:
        ConfigError: a tokenizer, and shards of labels only; a row without a caption in any source; boxes, and a policy
            without; or batches that are larger than an epoch.
        DataError: the index has no rows, or a dataset of a mixture has none.
    """
    for part in index.manifests:
        if part.rows == 0:
            raise DataError(
                f"shards '{part.folder}': no rows in the index; see __mmdata__/quarantine.jsonl there for those left "
                "out, or leave the dataset out of data.shards"
            )
    joined = joined or Joined.from_config(data, index)
    selection = select_rows(data, index, joined)
    if tokenizer is not None and captions is None:
        captions = caption_sources(data, index, joined)
    if captions is not None:
        check_rows(captions, index, selection, len(index))
    if tokenizer is None:
        captions = CaptionSources.in_turn(NoTexts(index))
    elif captions is None:
        check_captions(
            index,
            "data.tokenizer",
            "leave data.tokenizer out for batches of images and labels; or make captions of the class names with "
            '`mmdata convert SOURCE OUT --caption-template "a photo of a {}."`',
        )
        captions = CaptionSources.in_turn(ShardCaptions(index))
    by_length = policy is not None or data.text_buckets != [data.max_length]
    if tokenizer is not None and (count_lengths or by_length):
        captions.count(counts_of(tokenizer, data.caption_template))
    equals = equal_rows(data, index, joined)
    boxes = box_counts(data, index, joined)
    rows = IndexRows(index, captions, selection=selection, equals=equals, boxes=boxes)
    planned = boxes if boxes is None or selection is None else np.concatenate([boxes[some] for some in rows.planned()])
    policy = policy or bucket_policy(data, index, captions, selection=selection, boxes=planned)
    if planned is not None:
        check_boxes(planned, policy.buckets)
    plan = Plan(
        rows,
        policy,
        global_batch_size=data.global_batch_size,
        seed=data.seed,
        shuffle=data.shuffle,
        window_rows=data.shuffle_window_rows,
        num_lanes=data.num_lanes,
        mixture=build_mixture(data, index),
        leftover=data.leftover,
    )
    if order is not None:
        plan = OrderedPlan(plan, order)
    elif data.order is not None:
        plan = _ordered_plan(data.order, plan)
    elif (weights := row_weights(data, index, rows, joined)) is not None:
        plan = WeightedPlan(plan, weights)
    _check_full(data, plan)
    if isinstance(plan, WeightedPlan):
        _tell_padding(data, plan)
    return plan


def _ordered_plan(order: str, plan: Plan) -> OrderedPlan:
    """The rows of a plan in the order of `data.order`.

    Raises:
        ConfigError: no such file, or it holds something else than rows that are planned.
        DataError: the file is damaged.
    """
    file = NpyFile(order, of="data.order")
    try:
        return OrderedPlan(plan, file.read(0, len(file)))
    except ValueError as error:
        raise ConfigError(f"data.order '{order}': {str(error).removeprefix('order: ')}") from error


def _check_full(data: DataConfig, plan: Plan) -> None:
    """Raise ConfigError if no batch of a plan would be full."""
    evaluates = not data.shuffle and data.transform == "eval"  # then one batch that is not full costs nothing
    limit, selection = plan.most_rows, plan.rows.selection
    if data.leftover == "drop" and plan.num_steps(0) == 0:
        raise ConfigError(
            f"data.leftover drop: none of the {len(plan.policy.buckets)} batch shapes fills a batch of "
            f"{data.global_batch_size:,} rows: set data.global_batch_size lower, or have fewer shapes "
            "(data.text_buckets)"
        )
    if evaluates or min(plan.batch_sizes) <= limit:
        return
    unit = data.num_lanes * plan.mixture.unit_rows * sum(plan.mixture.weights)
    unit = unit if data.token_budget is None else math.lcm(unit, data.row_multiple)
    among = "" if selection is None else f" of {int(plan.rows.starts[-1]):,} ({selection.name})"
    remedies = [f"set it to {limit // unit * unit:,} or less"] if limit >= unit else []
    most, full = "no batch can have more", "none would be full"
    if isinstance(plan, WeightedPlan) and limit < plan.num_rows:
        among = (
            f" ({plan.weights.name}: an epoch has {plan.weights.num_parts} parts, as many as the largest weight, so "
            "that no batch has a row twice)"
        )
        most, full = "a batch has on average no more", "few would be full"
        remedies.append("give smaller weights" if data.row_weights else "set data.captions to one")
    if not remedies:
        remedies.append(f"load more rows: {unit:,} is the smallest batch")
    raise ConfigError(
        f"data.global_batch_size {data.global_batch_size:,}: {most} than {limit:,} rows{among}, so "
        f"{full}; {', or '.join(remedies)}"
    )


def _tell_padding(data: DataConfig, plan: WeightedPlan) -> None:
    """Warn of weights by which many places of an epoch are masked: no batch has a row twice, so parts may be small."""
    weights, batch_rows = plan.weights, min(plan.batch_sizes)
    rows = weights.rows_of_part
    masked = 1 - rows / (math.ceil(rows / batch_rows) * batch_rows)
    if masked > NOTICEABLE_PADDING:
        less = ", or a smaller largest weight," if data.row_weights else ""
        logger.warning(
            "%s: an epoch has %d parts of about %.1f rows, and batches of %d: about %.0f %% of the places are masked; "
            "a smaller data.global_batch_size%s masks less",
            *(weights.name, weights.num_parts, rows, batch_rows, 100 * masked, less),
        )


def num_rows(data: DataConfig) -> int:
    """The number of rows that a section `data` loads in an epoch, without the repeats of a mixture.

    Raises:
        ConfigError: as `select_rows`.
        DataError: no manifest.
    """
    index = Index.open([source.shards for source in sources(data)])
    selection = select_rows(data, index)
    return len(index) if selection is None else len(selection)


def build_mixture(data: DataConfig, index: Index) -> Mixture:
    """The mixture that a section `data` describes.

    Raises:
        ConfigError: groups by label without labels, or a file of groups that was made for another corpus.
        DataError: the file of groups is damaged.
    """
    spans = [
        ShardSpan(indexed.first_shard, indexed.last_shard, source.repeat or 1.0, source.weight)
        for source, indexed in zip(sources(data), index.sources, strict=True)
    ]
    return Mixture(tuple(spans), groups_of(data.groups, index) if data.groups else None)


def equal_rows(data: RowsConfig, index: Index, joined: Joined) -> NDArray[np.int64] | None:
    """What stands for the hashes of captions, by the column that `data.caption_hash` names; None: nothing does.

    Returns:
        int64 (len(index),), equal for equal values; 0 where a row has none.

    Raises:
        ConfigError: no such column; the nearest one is named.
    """
    if data.caption_hash is None:
        return None
    kinds, what = ("number", "bool", "text", *DATES), "numbers, texts or dates"
    of_shard = joined.pick(data.caption_hash, *kinds, of="data.caption_hash", what=what)
    index.fetch_columns(np.arange(index.num_shards))
    found = (_hashes_of_values(of_shard(shard)) for shard in range(index.num_shards))
    return np.concatenate([np.empty(0, np.int64), *found])


def _hashes_of_values(values: Any) -> NDArray[np.int64]:
    """A hash of each value of an Arrow array (n,), int64 (n,); 0 where there is none."""
    encoded = values.dictionary_encode()
    texts = encoded.dictionary.cast(pa.string()).to_pylist()
    hashes = np.array([*(hash64(text.encode()) for text in texts), 0], np.int64)  # -1 is the last: no value
    return hashes[encoded.indices.fill_null(-1).to_numpy()]
