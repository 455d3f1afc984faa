"""Dry run of a plan: steps, shapes and padding of an epoch. No image is read.

mmdata plan configs/scenes.yaml
mmdata plan configs/scenes.yaml data.global_batch_size=1024 --world-size 8
"""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table

from mmdata import cli
from mmdata.config import DataConfig, load_config
from mmdata.loader.corpus import open_index
from mmdata.plan import Groups, IndexRows, summarize
from mmdata.plan.from_config import build_plan
from mmdata.transform.text import Tokenizer


def main() -> int:
    """Print the table of buckets and the padding."""
    parser = argparse.ArgumentParser(
        prog="mmdata plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--epoch", type=int, default=0, help="captions, and so lengths, may differ by epoch")
    parser.add_argument("--world-size", type=int, default=1, metavar="W", help="ranks, to say what each reads")
    arguments = parser.parse_intermixed_args()

    data = load_config(arguments.config, arguments.overrides).data
    tokenizer = Tokenizer.load(data.tokenizer, max_length=data.max_length)
    index = open_index(data)
    plan = build_plan(data, index, tokenizer, count_lengths=True)
    rows = plan.rows
    assert isinstance(rows, IndexRows)
    summary = summarize(plan, arguments.epoch, world_size=arguments.world_size, hashes=rows.hashes)

    table = Table(title=f"epoch {arguments.epoch}: {summary.rows:,} rows in {summary.steps:,} steps")
    for name in ("text length", "image", "batch", "steps", "rows", "padding"):
        table.add_column(name, justify="right")
    for (bucket, count), batch_size in zip(summary.buckets.items(), plan.batch_sizes, strict=True):
        if count.steps:
            padding = f"{1 - count.tokens / (count.rows * bucket.length):.1%}"
            counts = (f"{batch_size:,}", f"{count.steps:,}", f"{count.rows:,}")
            table.add_row(f"{bucket.length}", bucket.image, *counts, padding)
    Console().print(table)
    if unused := len(summary.buckets) - table.row_count:
        print(f"shapes: {table.row_count} as above; {unused} more of the settings have no batch in this epoch")
    print(
        f"padding: {summary.padding_share:.1%} of the text positions; "
        f"{summary.padding_share_at(data.max_length):.1%} if every caption were padded to {data.max_length}"
    )
    if summary.cut:
        print(f"cut: {summary.cut:,} captions are longer than max_length ({data.max_length} tokens) and are cut to it")
    if len(summary.rows_by_span) > 1:
        for source, span, used in zip(index.sources, plan.mixture.spans, summary.rows_by_span, strict=True):
            own = int(rows.starts[span.last_shard] - rows.starts[span.first_shard])
            print(
                f"dataset '{source.folder}': {used:,} rows, {used / summary.rows:.1%} of the epoch; "
                f"{used / max(own, 1):.2f} passes over its {own:,}"
            )
    if groups := plan.mixture.groups:
        print(f"groups: {describe_groups(groups, int(rows.starts[-1]), data.shuffle_window_rows)}")
    print(f"masked: {summary.masked:,} places that no row fills; merged into another bucket: {summary.merged:,} rows")
    best = "1 is best" if len(summary.rows_by_span) == 1 else "the shares of the datasets move it away from 1"
    print(f"shuffle: two rows of a batch share a shard {summary.lift:.2f} × as often as in a uniform shuffle ({best})")
    print(
        f"duplicates: {summary.duplicates:,} rows meet their own image or caption in a batch"
        + (f"; {remedy(data)}" if summary.duplicates else "")
    )
    sizes = np.array([entry.bytes for entry in index.manifest])
    read = [int(sizes[shards].sum()) for shards in summary.touched]
    print(
        f"reading: each of {arguments.world_size} ranks {min(read) / 1e6:,.1f} to {max(read) / 1e6:,.1f} MB of shards, "
        f"of {sizes.sum() / 1e6:,.1f} MB in all"
    )
    return 0


def describe_groups(groups: Groups, num_rows: int, window_rows: int) -> str:
    """How many of the first rows have others of their group beside them; at most, where windows part a group.

    Of 5 rows of one label with size 4, four stand together; with 3 candidates each of the 5 has all three.
    """
    labels = np.asarray(groups.of_rows[:num_rows])
    counts = np.unique(labels[labels >= 0], return_counts=True)[1]
    most = "at most " if num_rows > window_rows else ""
    if groups.candidates:
        having = int(counts[counts > groups.candidates].sum())
        return f"{most}{having:,} of {num_rows:,} rows have all {groups.candidates} candidates"
    together = int((counts // groups.size * groups.size).sum())
    return f"{most}{together:,} of {num_rows:,} rows stand in whole groups of {groups.size}"


def remedy(data: DataConfig) -> str:
    """What can be done about duplicates that meet in a batch."""
    if data.unique or data.groups or data.num_lanes > 1:
        return "train.mask_false_negatives=true makes them no negatives"
    return "data.unique=true keeps them apart where other batches have room"


if __name__ == "__main__":
    cli.run(main)
