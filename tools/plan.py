"""mmdata plan: steps, shapes and padding of an epoch; no image is read.

mmdata plan shards/photos                      # a folder of shards: says which settings it assumes
mmdata plan shards/photos data.global_batch_size=1024 data.image_buckets=3
mmdata plan configs/scenes.yaml
mmdata plan configs/scenes.yaml data.global_batch_size=1024 --world-size 8
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mmdata import cli
from mmdata.commands.paths import check_config_or_shards
from mmdata.errors import counted, printable


def main() -> int:
    """Print the table of buckets and the padding."""
    parser = cli.Parser("plan", __doc__)
    parser.add_argument("config", metavar="CONFIG_OR_SHARDS", help="YAML file, or a folder (URL) of shards")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--epoch", type=int, default=0, help="captions, and so lengths, may differ by epoch")
    parser.add_argument("--world-size", type=int, default=1, metavar="W", help="ranks, to say what each reads")
    arguments = parser.parse_intermixed_args()

    check_config_or_shards(arguments.config, arguments.overrides)
    # Imported here: torch takes seconds to import, and a wrong path is told at once.
    from mmdata.commands.plan import plan_of
    from mmdata.inspect.epoch import epoch_in_words
    from mmdata.plan import IndexRows, summarize
    from mmdata.plan.weights import WeightedPlan

    planned = plan_of(arguments.config, arguments.overrides)
    plan, rows = planned.plan, planned.plan.rows
    if planned.assumed:
        print(printable(f"no config is given; assumed: {', '.join(planned.assumed)}"))
    assert isinstance(rows, IndexRows)
    summary = summarize(plan, arguments.epoch, world_size=arguments.world_size, hashes=rows.hashes)

    if (selection := rows.selection) is not None:
        print(printable(f"{selection.name}: {len(selection):,} of {int(rows.starts[-1]):,} rows"))
    if isinstance(plan, WeightedPlan):
        values = plan.weights.values[plan.weights.values > 0]
        given = f"{len(values):,} rows with weights from {values.min():.3g} to {values.max():.3g}"
        print(printable(f"{plan.weights.name}: {given}, {counted(plan.weights.num_parts, 'part')} an epoch"))
    table = Table(title=f"epoch {arguments.epoch}: {counted(summary.rows, 'row')} in {counted(summary.steps, 'step')}")
    for name in ("text length", "image", "batch", "steps", "rows", "padding"):
        table.add_column(name, justify="right")
    for (bucket, count), batch_size in zip(summary.buckets.items(), plan.batch_sizes, strict=True):
        if count.steps:
            padding = f"{1 - count.tokens / (count.rows * bucket.length):.1%}" if bucket.length else "no texts"
            counts = (f"{batch_size:,}", f"{count.steps:,}", f"{count.rows:,}")
            table.add_row(f"{bucket.length}", bucket.image, *counts, padding)
    Console().print(table)
    for problem in planned.problems:
        print(printable(f"the model does not take this: {problem}"))
    for line in epoch_in_words(summary, plan, planned.index, planned.data, masked=planned.masks):
        print(line)
    return 0


if __name__ == "__main__":
    cli.run(main)
