"""Dry run of a plan: steps, shapes and padding of an epoch. No image is read.

mmdata plan configs/scenes.yaml
mmdata plan configs/scenes.yaml data.global_batch_size=1024 --world-size 8
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mmdata import cli
from mmdata.config import load_config
from mmdata.inspect.epoch import epoch_in_words
from mmdata.loader.corpus import open_index
from mmdata.plan import IndexRows, summarize
from mmdata.plan.from_config import build_plan
from mmdata.transform.text import load_tokenizer


def main() -> int:
    """Print the table of buckets and the padding."""
    parser = cli.Parser("plan", __doc__)
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--epoch", type=int, default=0, help="captions, and so lengths, may differ by epoch")
    parser.add_argument("--world-size", type=int, default=1, metavar="W", help="ranks, to say what each reads")
    arguments = parser.parse_intermixed_args()

    data = load_config(arguments.config, arguments.overrides).data
    tokenizer = load_tokenizer(data)
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
            padding = f"{1 - count.tokens / (count.rows * bucket.length):.1%}" if bucket.length else "no texts"
            counts = (f"{batch_size:,}", f"{count.steps:,}", f"{count.rows:,}")
            table.add_row(f"{bucket.length}", bucket.image, *counts, padding)
    Console().print(table)
    for line in epoch_in_words(summary, plan, index, data):
        print(line)
    return 0


if __name__ == "__main__":
    cli.run(main)
