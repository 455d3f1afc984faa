"""From settings to a plan. Reads no image."""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from mmdata.config import DataConfig
from mmdata.config.batches import GroupsConfig
from mmdata.config.corpus import sources
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index
from mmdata.index.caption_lengths import CountsTokens, counts_of
from mmdata.plan import (
    BatchShare,
    BucketPolicy,
    CaptionSources,
    Groups,
    IndexRows,
    Mixture,
    NoTexts,
    OrderedPlan,
    Plan,
    ShardCaptions,
    ShardSpan,
)
from mmdata.plan.captions import caption_sources, check_rows, equal_rows
from mmdata.plan.choose import bucket_policy
from mmdata.plan.mixture import read_groups
from mmdata.plan.row_weights import OF, row_weights
from mmdata.plan.rows import starts_of
from mmdata.plan.weights import WeightedPlan
from mmdata.tables.joined import Joined
from mmdata.tables.select import select_rows
from mmdata.tables.selection import Selection
from mmdata.tables.table import NpyFile

logger = logging.getLogger("mmdata")

NOTICEABLE_PADDING = 0.2
"""Share of masked places from which on the log says so."""
MOST_PADDING = 0.5
"""Share of masked places from which on weights of rows are an error."""


def build_plan(
    data: DataConfig,
    index: Index,
    tokenizer: CountsTokens | None,
    *,
    count_lengths: bool = False,
    joined: Joined | None = None,
    captions: CaptionSources | None = None,
) -> Plan:
    """The plan that a section `data` describes.

    Caption lengths come from the index if it was made with this tokenizer. Otherwise every caption is read and counted.

    Args:
        data: settings.
        index: of the shards.
        tokenizer: for the captions; None: batches have no texts.
        count_lengths: know the lengths even if there is only one text length, which does not ask for them.
        joined: the tables of `data.join`; None: they are read here, where the selection needs them.
        captions: the sources that `data.captions` names; None: they are read here. Their tokens are counted.

    Raises:
        ConfigError: a tokenizer, and shards of labels only; a row without a caption in any source; or batches that are
            larger than an epoch.
        DataError: the index has no rows, or a dataset of a mixture has none.
    """
    for part in index.manifests:
        if part.rows == 0:
            raise DataError(
                f"shards '{part.folder}': no rows in the index; see __mmdata__/quarantine.jsonl there for those left "
                "out, or leave the dataset out of data.shards"
            )
    starts = starts_of(index, data.max_rows)
    selection = select_rows(data, index, starts, joined)
    if tokenizer is not None:
        captions = captions or caption_sources(data, index, joined)
    if captions is not None:
        check_rows(captions, index, starts, selection)
    captions = _planned_captions(data, index, tokenizer, captions, count_lengths=count_lengths)
    equals = equal_rows(data, index, joined)
    rows = IndexRows(index, captions, limit=data.max_rows, selection=selection, equals=equals)
    policy = bucket_policy(data, index, captions, selection=selection)
    mixture = build_mixture(data, index)
    if data.order is not None:
        return _ordered_plan(data, rows, policy, mixture)
    _check_batch_size(data, policy, mixture, rows, selection)
    settings: dict[str, Any] = {
        "global_batch_size": data.global_batch_size,
        "seed": data.seed,
        "shuffle": data.shuffle,
        "window_rows": data.shuffle_window_rows,
        "mixture": mixture,
        "leftover": data.leftover,
    }
    weights = row_weights(data, index, starts, selection, joined)
    if weights is None:
        plan = Plan(rows, policy, num_lanes=data.num_lanes, **settings)
    else:
        plan = WeightedPlan(rows, policy, weights, **settings)
        _check_padding(plan)
    if data.leftover == "drop" and plan.num_steps(0) == 0:
        raise ConfigError(
            f"data.leftover drop: none of the {len(policy.buckets)} batch shapes fills a batch of "
            f"{data.global_batch_size:,} rows: set data.global_batch_size lower, or have fewer shapes "
            "(data.num_text_buckets)"
        )
    return plan


def _planned_captions(
    data: DataConfig,
    index: Index,
    tokenizer: CountsTokens | None,
    captions: CaptionSources | None,
    *,
    count_lengths: bool,
) -> CaptionSources:
    """The captions of batches, counted where the plan needs their lengths; `captions`: the sources of `data.captions`.

    Raises:
        ConfigError: a folder of the index holds labels only, and there is a tokenizer.
    """
    if tokenizer is None:
        return CaptionSources.in_turn(NoTexts(index))
    if captions is None:
        _check_captions(index)
        captions = CaptionSources.in_turn(ShardCaptions(index))
    if count_lengths or data.text_buckets == "auto" or len(data.text_buckets) > 1:
        captions.count(counts_of(tokenizer, data.caption_template))
    return captions


def _check_batch_size(
    data: DataConfig, policy: BucketPolicy, mixture: Mixture, rows: IndexRows, selection: Selection | None
) -> None:
    """Raise ConfigError if even the smallest batch has more rows than an epoch, unless `data.allow_larger_batch`."""
    evaluates = not data.shuffle and data.transform == "eval"  # then one batch that is not full costs nothing
    places = rows.starts if selection is None else selection.starts
    first = mixture.shares[0]
    counts = [places[min(one.last_shard, len(places) - 1)] - places[one.first_shard] for one in first.spans]
    epoch = sum(int(count) * one.repeat for count, one in zip(counts, first.spans, strict=True))
    # With weights an epoch is one pass over the first dataset, which fills its part of each batch.
    limit = int(min(epoch * mixture.total_weight / first.weight, int(places[-1])))
    smallest = min(getattr(policy, "batch_sizes", [data.global_batch_size]))
    if data.allow_larger_batch or evaluates or smallest <= limit:
        return
    weights = [share.weight for share in mixture.shares]
    unit = data.num_lanes * mixture.unit_rows * mixture.total_weight // math.gcd(*weights)
    unit = unit if data.token_budget is None else math.lcm(unit, data.batch_multiple)
    selected = "" if selection is None else f" of {int(rows.starts[-1]):,} ({selection.name})"
    remedy = f"set it to {limit // unit * unit:,} or less, or " if limit >= unit else "set "
    raise ConfigError(
        f"data.global_batch_size {data.global_batch_size:,}: no batch can have more than {limit:,} rows{selected}, so "
        f"none would be full; {remedy}data.allow_larger_batch=true, which fills batches up with masked rows"
    )


def _ordered_plan(data: DataConfig, rows: IndexRows, policy: BucketPolicy, mixture: Mixture) -> OrderedPlan:
    """The plan of `data.order`.

    Raises:
        ConfigError: no such file, or it holds something else than rows that are selected; or fewer than a batch.
        DataError: the file is damaged.
    """
    assert data.order is not None
    file = NpyFile(data.order, of="data.order")
    settings: dict[str, Any] = {"global_batch_size": data.global_batch_size, "seed": data.seed, "mixture": mixture}
    try:
        plan = OrderedPlan(rows, policy, file.read(0, len(file)), **settings)
    except ValueError as error:
        raise ConfigError(f"data.order '{data.order}': {str(error).removeprefix('order: ')}") from error
    if len(plan.order) < data.global_batch_size and not data.allow_larger_batch:
        raise ConfigError(
            f"data.global_batch_size {data.global_batch_size:,}: data.order has {len(plan.order):,} rows, so no batch "
            "would be full; set it lower, or set data.allow_larger_batch=true, which fills batches up with masked rows"
        )
    return plan


def _check_padding(plan: WeightedPlan) -> None:
    """Tell, or refuse, weights by which many places of an epoch are masked.

    No batch has a row twice. So a row of weight 100 takes 100 batches, however few the other rows are.

    Raises:
        ConfigError: most places would be masked, though there are enough rows for a batch.
    """
    weights, batch_rows = plan.weights, min(plan.batch_sizes)
    parts, total = weights.num_parts, weights.rows_of_epoch()
    rows = total / parts
    places = parts * math.ceil(rows / batch_rows) * batch_rows
    masked = 1 - total / places
    if masked <= NOTICEABLE_PADDING:
        return
    is_cut = weights.name.startswith(OF)
    said = (
        f"{weights.name}: an epoch has {parts} parts of about {rows:,.1f} rows, and batches of {batch_rows}: "
        f"about {100 * masked:.0f} % of the places are masked"
    )
    if masked < MOST_PADDING or plan.num_rows < batch_rows:
        less = "a smaller data.global_batch_size" + (
            ", or a smaller largest weight (data.max_repeats)," if is_cut else ""
        )
        logger.warning("%s; %s masks less", said, less)
        return
    instead = f"data.max_repeats to less than {parts}" if is_cut else "data.captions to one"
    raise ConfigError(
        f"{said}, {places - round(total):,} of {places:,}. A part has no row twice, so there are as many as the "
        f"largest weight: set {instead}, or data.global_batch_size to {max(1, math.ceil(2 * rows) - 1)} or less"
    )


def num_rows(data: DataConfig) -> int:
    """The number of rows that a section `data` loads in an epoch, without the repeats of a mixture.

    Raises:
        ConfigError: as `select_rows`.
        DataError: no manifest.
    """
    index = Index.open([source.shards for source in sources(data)])
    starts = starts_of(index, data.max_rows)
    selection = select_rows(data, index, starts)
    return int(starts[-1]) if selection is None else len(selection)


def _check_captions(index: Index) -> None:
    """Raise a ConfigError if a folder of the index holds labels only."""
    for part in index.manifests:
        if not part.has_captions:
            raise ConfigError(
                f"shards '{part.folder}': {part.rows:,} rows with labels and no captions, and data.tokenizer is given: "
                "leave data.tokenizer out for batches of images and labels; or make captions of the class names with "
                '`mmdata convert SOURCE OUT --caption-template "a photo of a {}."`'
            )


def build_mixture(data: DataConfig, index: Index) -> Mixture:
    """The mixture that a section `data` describes.

    Raises:
        ConfigError: groups by label without labels, or a file of groups that was made for another corpus or in groups
            of another size.
        DataError: the file of groups is damaged.
    """
    listed = sources(data)
    spans = [
        ShardSpan(indexed.first_shard, indexed.last_shard, source.repeat or 1.0)
        for source, indexed in zip(listed, index.sources, strict=True)
    ]
    if listed[0].weight is None:
        shares = (BatchShare(tuple(spans)),)
    else:
        shares = tuple(BatchShare((span,), source.weight or 1) for source, span in zip(listed, spans, strict=True))
    groups = build_groups(data.groups, index) if data.groups else None
    return Mixture(shares, groups)


def build_groups(settings: GroupsConfig, index: Index) -> Groups:
    """The group of each row: the corpus's labels, or the groups of a file."""
    size, candidates = settings.size or 1, settings.candidates or 0
    if settings.source == "run":  # which makes groups between its epochs
        return Groups(np.full(len(index), -1), size, candidates, "run", settings.share)
    if settings.source != "label":
        of_rows = read_groups(Path(settings.source), index, size=settings.size, candidates=settings.candidates)
        digest = hashlib.sha256(of_rows.tobytes()).hexdigest()[:16]
        return Groups(of_rows, size, candidates, f"file {digest}", settings.share)
    if not index.has_labels:
        raise ConfigError(
            "data.groups by label: no row of the corpus has a label; convert it with --label-column, or set source to "
            "a file of groups, which `mmdata neighbours` makes"
        )
    return Groups(index.column("label"), size, candidates, "label", settings.share)
