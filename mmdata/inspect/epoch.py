"""An epoch of a plan in words: padding, datasets, groups, shuffling, duplicates and bytes read. Reads no image."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmdata.config import DataConfig
from mmdata.config.texts import TextsConfig
from mmdata.index import Index
from mmdata.plan import Groups, OrderedPlan, Plan, PlanSummary, duplicates_in_words


def epoch_in_words(
    summary: PlanSummary, plan: Plan, index: Index, data: DataConfig, *, masked: bool = False
) -> Iterator[str]:
    """Lines about an epoch.

    Args:
        summary: of the epoch, by `mmdata.plan.summarize`, with duplicates counted.
        plan: whose epoch it is.
        index: of the plan's rows.
        data: settings that the plan was made from.
        masked: duplicates are not used as negatives for each other (train.mask_false_negatives).
    """
    shown = sum(count.steps > 0 for count in summary.buckets.values())
    if unused := len(summary.buckets) - shown:
        yield f"shapes: {shown} as above; {unused} more of the settings have no batch in this epoch"
    if data.tokenizer is None:
        yield "padding: none; without data.tokenizer batches have no texts"
    else:
        yield _padding(summary, data)
    if summary.cut:
        yield f"cut: {summary.cut:,} captions are longer than max_length ({data.max_length} tokens) and are cut to it"
    if len(summary.rows_by_span) > 1:
        yield from _datasets(summary, plan, index)
    if data.groups is not None and data.groups.source == "run":
        begin = data.groups.every_epochs
        yield (
            f"groups: none here. The run makes them from its own features; its epochs from {begin} on have them, "
            f"{data.groups.size} rows in each, and another padding and number of steps"
        )
    elif groups := plan.mixture.groups:
        yield f"groups: {_groups(groups, int(plan.rows.starts[-1]), data.shuffle_window_rows)}"
    unfilled = f"masked: {summary.masked:,} places that no row fills"
    if isinstance(plan, OrderedPlan):
        yield unfilled
    else:
        yield f"{unfilled}; merged into another bucket: {summary.merged:,} rows"
        best = "1 is best" if len(summary.rows_by_span) == 1 else "the shares of the datasets move it away from 1"
        lift = f"{summary.lift:.2f} × as often as in a uniform shuffle ({best})"
        yield f"shuffle: two rows of a batch share a shard {lift}"
    assert summary.duplicates is not None, "counted"
    yield f"duplicates: {duplicates_in_words(summary.duplicates, masked=masked)}"
    yield f"reading: {_reading(summary, index)}"


def _reading(summary: PlanSummary, index: Index) -> str:
    sizes = np.array([shard.bytes for manifest in index.manifests for shard in manifest])
    read = [int(sizes[shards].sum()) for shards in summary.touched]
    each = f"{read[0] / 1e6:,.1f} MB of shards"
    if len(read) > 1:
        each = f"each of {len(read)} ranks {min(read) / 1e6:,.1f} to {max(read) / 1e6:,.1f} MB of shards"
    return f"{each}, of {sizes.sum() / 1e6:,.1f} MB in all"


def _padding(summary: PlanSummary, data: TextsConfig) -> str:
    return (
        f"padding: {summary.padding_share:.1%} of the text positions; "
        f"padded to {data.max_length} tokens: {summary.padding_share_at(data.max_length):.1%}"
    )


def _datasets(summary: PlanSummary, plan: Plan, index: Index) -> Iterator[str]:
    starts = plan.rows.starts
    for source, span, used in zip(index.sources, plan.mixture.spans, summary.rows_by_span, strict=True):
        own = int(starts[span.last_shard] - starts[span.first_shard])
        yield (
            f"dataset '{source.folder}': {used:,} rows, {used / summary.rows:.1%} of the epoch; "
            f"{used / max(own, 1):.2f} passes over its {own:,}"
        )


def _groups(groups: Groups, num_rows: int, window_rows: int) -> str:
    """How many of the first rows get others of their group into their batch.

    Of 5 rows of one label with size 4, four stand together; with 3 candidates each of the 5 has all three. The number
    is an upper bound where the corpus has several windows, because windows part a group.
    """
    labels = np.asarray(groups.of_rows[:num_rows])
    counts = np.unique(labels[labels >= 0], return_counts=True)[1]
    most = "at most " if num_rows > window_rows else ""
    if groups.candidates:
        having = int(counts[counts > groups.candidates].sum())
        return f"{most}{having:,} of {num_rows:,} rows have all {groups.candidates} candidates"
    together = int((counts // groups.size * groups.size).sum())
    if groups.share < 1:
        most, together = "at most ", min(together, round(groups.share * num_rows))
    return f"{most}{together:,} of {num_rows:,} rows stand in whole groups of {groups.size}"
